"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runners.errors import UserError, gigabytes, one_line, show, spell
from runners.machine.terminal import echo

if TYPE_CHECKING:
    from grpo_fn import Sampling
    from runners.config.loading import Config
    from runners.conversion.convert import QuantizationOptions
    from runners.environments.environments import Environments
    from runners.inference.inference_model import InferenceModel
    from runners.tokenization.prompt_settings import PromptSettings

_Function = Callable[..., Any]

SAMPLING = (
    click.option(
        "--temperature",
        type=click.FloatRange(0),
        default=0.7,
        show_default=True,
        help="0: the likeliest token.",
    ),
    click.option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        default=1.0,
        help="The likeliest tokens with this share of the probability.",
    ),
    click.option("--top-k", type=click.IntRange(0), default=0, help="This many tokens; 0: all."),
    click.option(
        "--min-p",
        type=click.FloatRange(0, 1),
        default=0.0,
        help="Tokens with at least this share of the largest probability.",
    ),
    click.option(
        "--repetition-penalty",
        type=click.FloatRange(0, min_open=True),
        default=1.0,
        help="Above 1: tokens that have occurred become less likely.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="The same seed gives the same result.",
    ),
    click.option(
        "--max-tokens", type=click.IntRange(1), help="Length limit of a reply [as in training, else 512]."
    ),
)
TRUST = (click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with a model."),)
MODEL = (
    click.option("--adapter", default="", metavar="FOLDER", help="Adapters to apply to the model."),
    click.option(
        "--loader",
        default="",
        metavar="FUNCTION",
        help="The function that opens the model, as model.loader in a config.",
    ),
)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Replace one value of the config; may be given more than once, the last one wins. VALUE is TOML, "
    "and a string needs no quotes.",
)
QUANTIZE = (
    click.option(
        "--bits", type=click.Choice(["2", "3", "4", "5", "6", "8"]), help="Quantize to so many bits."
    ),
    click.option(
        "--group-size", type=int, help="Weights that share a scale [64; mxfp4, mxfp8: 32; nvfp4: 16]."
    ),
    click.option(
        "--mode", type=click.Choice(["affine", "mxfp4", "nvfp4", "mxfp8"]), help="Quantize in this format."
    ),
    click.option(
        "--recipe",
        type=click.Choice(["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"]),
        help="Quantize with more bits where they matter most.",
    ),
)
DTYPE = (
    click.option(
        "--dtype",
        type=click.Choice(["float32", "float16", "bfloat16"]),
        help="The weights' dtype [the source's].",
    ),
)
RAW = (
    click.option(
        "--raw", is_flag=True, help="Show control characters as the model writes them, also on a terminal."
    ),
)
PROMPT = (
    click.option(
        "--system", metavar="TEXT", help='The system message [as in training]; "" for a model without one.'
    ),
    click.option(
        "--nudge",
        metavar="TEXT",
        help='First words of every reply, given to the model [as in training]; "" for none.',
    ),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        help='Ends a reply [as in training]; may be given more than once; "" for none.',
    ),
    click.option(
        "--no-prompt-file",
        is_flag=True,
        help="Ignore the model's grpo_prompt.json, which says how it was asked in training.",
    ),
)
TOOLS = (
    click.option(
        "--tools",
        multiple=True,
        metavar="FILE[:FUNCTION]",
        help="A function that the model may call, or a Python file with such functions. May be given more "
        "than once.",
    ),
    click.option(
        "--env",
        "factory",
        default="",
        metavar="FILE:CLASS",
        help='An environment, whose methods the model may call, or "calculator".',
    ),
    click.option("--max-turns", type=click.IntRange(1), help="Turns of the model for a message [8]."),
    click.option("--max-tool-calls", type=click.IntRange(0), help="Calls for a message; 0: any number [0]."),
    click.option("--max-observation-tokens", type=click.IntRange(1), help="Of one call's answer [512]."),
    click.option("--tool-timeout", type=click.FloatRange(0, 1e9), help="Seconds of a turn's calls [30]."),
)
TOOLS_OF = (
    click.option("--config", default="", metavar="CONFIG", help="A training's config: its [env]."),
    click.option("--row", default="", metavar="JSON", help="What the environment's reset gets: columns."),
)
MAX_TOKENS = 512  # of a reply, if neither the command line nor the model sets it


def options(*groups: tuple[Callable[[_Function], _Function], ...]) -> Callable[[_Function], _Function]:
    """A decorator that adds groups of options, in their order."""

    def decorate(function: _Function) -> _Function:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate


def sampling_of(values: Mapping[str, Any], model: InferenceModel) -> Sampling:
    """The resolved options of SAMPLING and PROMPT as a value."""
    from grpo_fn import Sampling

    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return Sampling(
        max_new_tokens=values["max_tokens"],
        eos_ids=model.eos_ids,
        find_stop=model.decoder.find_stop(values["stop"]),
        **{name: values[name] for name in names},
    )


def quantization_of(values: Mapping[str, Any]) -> QuantizationOptions:
    """The options of QUANTIZE as a value."""
    from runners.conversion.convert import QuantizationOptions

    return QuantizationOptions(
        mode=values["mode"] or "",
        bits=int(values["bits"]) if values["bits"] else None,
        group_size=values["group_size"],
        recipe=values["recipe"] or "",
    )


_PROMPT_FIELDS = {  # option -> field of PromptSettings, value without settings, words
    "system": ("system_prompt", "", lambda text: f"system message {show(text)}"),
    "nudge": ("nudge", "", lambda text: f"nudge {show(text)}"),
    "stop": ("stop", (), lambda texts: f"stop {', '.join(map(show, texts))}"),
    "max_tokens": ("max_new_tokens", MAX_TOKENS, lambda count: f"at most {count:,} tokens"),
    "template_kwargs": ("chat_template_kwargs", {}, lambda table: f"template arguments {spell(table)}"),
}


def resolve_prompt(values: Mapping[str, Any], prompt: PromptSettings | None) -> dict[str, Any]:
    """The options, with missing ones of PROMPT and --max-tokens filled in.

    The values come from the model's own settings, `prompt`; a line on stderr shows them. Without such
    settings they are empty and 512 tokens. `template_kwargs`, further arguments of the chat template, has
    no option.
    """
    stop = tuple(filter(None, values["stop"])) if values["stop"] else None
    found = {**values, "stop": stop, "template_kwargs": None}
    used = []
    for name, (field, default, words) in _PROMPT_FIELDS.items():
        if found[name] is None:
            found[name] = default if prompt is None else getattr(prompt, field)
            used += [words(found[name])] if prompt is not None and found[name] else []
    if used:
        echo(one_line(f"as in training (grpo_prompt.json): {', '.join(used)}", {}), err=True)
    return found


def open_tools(name: str, model: InferenceModel, values: Mapping[str, Any]) -> Environments | None:
    """The tools of a command with the resolved options of TOOLS; None if there are none."""
    from runners.inference.tool_options import build_tools, env_of

    bounds = {name: values[name] for name in ("max_turns", "max_tool_calls", "max_observation_tokens")}
    env, folders = env_of(
        name,
        partial(echo, err=True),
        tools=values["tools"],
        factory=values["factory"],
        config=values["config"],
        bounds=bounds | {"timeout": values["tool_timeout"]},
    )
    if values["row"] and not env.factory:
        raise UserError("--row: found no environment, expected --env FILE:CLASS as well")
    kwargs = values["template_kwargs"]
    return build_tools(model, env, folders, nudge=values["nudge"], template_kwargs=kwargs)


def row_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """--row as columns. Raises UserError if it is not a JSON object."""
    text = values["row"]
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise UserError(f"--row {text}: cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f'--row {text}: expected a JSON object such as {{"answer": 6}}')
    return found


def open_model(name: str, values: Mapping[str, Any], *, images: bool = False) -> InferenceModel:
    """The model of a command, with the options of MODEL, and its vision part; notices go to stderr."""
    if len(values["stop"]) > 1 and not all(values["stop"]):
        raise UserError('--stop "" means no stop string; found others beside it')
    from runners.machine import startup

    machine = startup.prepare()  # before anything imports MLX
    from runners.inference.inference_model import load_inference

    loaded = load_inference(
        name,
        machine,
        adapter=values["adapter"],
        loader=values["loader"],
        trust_remote_code=values["trust_remote_code"],
        with_prompt=not values["no_prompt_file"],
        images=images,
    )
    echo_all((*machine.notices, *loaded.notices))
    return loaded


def read_config(name: str, overrides: Sequence[str]) -> Config:
    """The config of a command, not yet checked; its notices go to stderr."""
    from runners.config.loading import load_config

    config = load_config(name, overrides)
    echo_all(config.notices)
    return config


def echo_all(notices: Iterable[str]) -> None:
    """Lines on stderr."""
    for notice in notices:
        echo(notice, err=True)


def echo_weights(folder: Path) -> None:
    """The size of a new folder's weights."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    echo(f"{folder}: {gigabytes(size)} of weights")
