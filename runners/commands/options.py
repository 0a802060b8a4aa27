"""Defines the options that several commands share."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runners.commands.base import flag, option
from runners.errors import UserError, gigabytes, one_line, spell
from runners.machine.terminal import echo

if TYPE_CHECKING:
    from grpo_fn import Sampling
    from runners.config.loading import Config
    from runners.conversion.packing import QuantizationOptions
    from runners.environments.environments import Environments
    from runners.inference.inference_model import InferenceModel
    from runners.machine.startup import Platform
    from runners.tokenization.prompt_settings import PromptSettings

_NUMBER = click.IntRange(0)


def _row(context: click.Context, parameter: click.Parameter, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise click.BadParameter(f'expected a JSON object such as {{"answer": 6}}, found {text}')
    return found


SAMPLING = (
    option(
        "--temperature",
        "Sampling temperature; 0: always the most likely token.",
        click.FloatRange(0),
        0.7,
        show_default=True,
    ),
    option(
        "--top-p",
        "Keep the most likely tokens that together hold this share of the probability.",
        click.FloatRange(0, 1, min_open=True),
        1.0,
    ),
    option("--top-k", "Keep this many of the most likely tokens; 0: all.", _NUMBER, 0),
    option(
        "--min-p",
        "Keep tokens whose probability is at least this share of the highest one.",
        click.FloatRange(0, 1),
        0.0,
    ),
    option(
        "--repetition-penalty",
        "Values above 1 make repeated tokens less likely.",
        click.FloatRange(0, min_open=True),
        1.0,
    ),
    option(
        "--seed",
        "Random seed; the same seed produces the same result.",
        _NUMBER,
        0,
        show_default=True,
    ),
    option(
        "--max-tokens",
        "Maximum length of a reply, in tokens [as in training, or 512].",
        click.IntRange(1),
    ),
)
TRUST = flag("--trust-remote-code", "Run Python code shipped with a model.")
MODEL = (
    option("--adapter=FOLDER", "Adapters to apply to the model.", default=""),
    option("--loader=FUNCTION", "Function that loads the model, as in model.loader.", default=""),
)
SET = option(
    "--set as overrides=SECTION.KEY=VALUE",
    "Override one value of the config; may be repeated, and the last one wins. VALUE is TOML; strings "
    "need no quotes.",
    multiple=True,
)
QUANTIZE = (
    option("--bits", "Bits per weight.", click.Choice([2, 3, 4, 5, 6, 8])),
    option(
        "--group-size",
        "Number of weights that share a scale [64; mxfp4, mxfp8: 32; nvfp4: 16].",
        int,
    ),
    option("--mode", "Quantization format.", click.Choice(["affine", "mxfp4", "nvfp4", "mxfp8"])),
    option(
        "--recipe",
        "Mixed quantization, with more bits for sensitive layers.",
        click.Choice(["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"]),
    ),
    option(
        "--dtype",
        "Dtype of the weights [the source's].",
        click.Choice(["float32", "float16", "bfloat16"]),
    ),
)
TARGET = option("--out=DIR", "The new folder.", click.Path(path_type=Path), required=True)
FORCE = flag("--force", "Replace DIR if it exists.")
PROMPT = (
    option("--system=TEXT", 'System message [as in training]; "" for none.'),
    option("--nudge=TEXT", 'First words of every reply [as in training]; "" for none.'),
    option(
        "--stop=TEXT",
        'String that ends a reply [as in training]; may be repeated; "" for none.',
        multiple=True,
    ),
    flag(
        "--no-prompt-file", "Ignore the prompt format of training, in the model's grpo_prompt.json."
    ),
)
TOOLS = (
    option(
        "--tools=FILE[:FUNCTION]",
        "Function that the model may call, or a Python file with such functions; may be repeated.",
        multiple=True,
    ),
    option(
        "--env as factory=FILE:CLASS", "Environment whose methods the model may call.", default=""
    ),
)
TOOLS_OF = (
    option(
        "--config=CONFIG", "Use [env] of this training config, including its limits.", default=""
    ),
    option(
        "--row=JSON",
        "Columns passed to the environment's reset.",
        default="{}",
        callback=_row,
    ),
)


def sampling_of(values: Mapping[str, Any], model: "InferenceModel") -> "Sampling":
    """Combines the resolved options in SAMPLING and PROMPT into one value."""
    from grpo_fn import Sampling

    return Sampling(
        max_new_tokens=values["max_tokens"],
        eos_ids=model.eos_ids,
        stop=tuple(values["stop"]),
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=values["top_k"],
        min_p=values["min_p"],
        repetition_penalty=values["repetition_penalty"],
    )


def quantization_of(values: Mapping[str, Any]) -> "QuantizationOptions":
    """Combines the options in QUANTIZE into one value."""
    from runners.conversion.packing import QuantizationOptions

    return QuantizationOptions(
        mode=values["mode"] or "",
        bits=values["bits"],
        group_size=values["group_size"],
        recipe=values["recipe"] or "",
    )


_PROMPT_FIELDS = {  # option -> field of PromptSettings, value if there are no settings
    "system": ("system_prompt", ""),
    "nudge": ("nudge", ""),
    "stop": ("stop", ()),
    "max_tokens": ("max_new_tokens", 512),
    "template_kwargs": ("chat_template_kwargs", {}),
}
_OF_A_CHAT = ("system", "nudge", "template_kwargs")


def resolve_prompt(values: Mapping[str, Any], prompt: "PromptSettings | None") -> dict[str, Any]:
    """Returns the options, with missing PROMPT values and --max-tokens filled in.

    The values come from the model's own settings, `prompt`, and are shown on stderr. Without such
    settings, prompt options are empty and the limit is 512 tokens. `template_kwargs`, extra
    arguments for the chat template, has no option. If an option or the model's settings set `raw`,
    a prompt is a text that the model continues.
    """
    stop = tuple(filter(None, values["stop"])) if values["stop"] else None
    asked_raw = bool(values.get("raw"))
    raw = asked_raw or (prompt is not None and prompt.prompt_form == "raw")
    found = {**values, "stop": stop, "template_kwargs": None, "raw": raw}
    used = []
    for name, (field, default) in _PROMPT_FIELDS.items():
        if found[name] is None:
            own = prompt is not None and not (asked_raw and name in _OF_A_CHAT)
            found[name] = getattr(prompt, field) if own else default
            used += [f"{field} = {spell(found[name])}"] if own and found[name] else []
    used += ['prompt_form = "raw"'] if raw and not asked_raw else []
    if used:
        echo(one_line(f"as in training (grpo_prompt.json): {', '.join(used)}", {}), err=True)
    return found


def open_tools(model: "InferenceModel", values: Mapping[str, Any]) -> "Environments | None":
    """Builds the environments for the resolved options in TOOLS and TOOLS_OF, or returns None if
    there are no tools.
    """
    import attrs

    from runners.config.loading import load_config
    from runners.config.sections import DataConfig, EnvConfig
    from runners.environments.environments import build_environments
    from runners.user_code.worker import Worker

    env = EnvConfig()
    folders = (Path.cwd(),)
    if values["config"]:
        config = load_config(values["config"])
        env = config.env
        folders = config.folders
    if values["tools"] or values["factory"]:
        env = attrs.evolve(env, tools=tuple(values["tools"]), factory=values["factory"])
        folders = (Path.cwd(),)
    if values["row"] and not env.factory:
        raise UserError("--row requires --env FILE:CLASS")
    data = DataConfig(nudge=values["nudge"], chat_template_kwargs=dict(values["template_kwargs"]))
    return build_environments(
        env, data, model.tokenizer, model.decoder, model.eos_ids, folders, Worker()
    )


def open_config(name: str, overrides: Sequence[str]) -> "tuple[Config, Platform]":
    """Returns a command's checked config and this machine's platform, prepared before MLX is imported."""
    from runners.config.loading import load_config
    from runners.machine import startup

    loaded = load_config(name, overrides)
    echo_all(loaded.notices)
    machine = startup.prepare(loaded.system.memory_limit_gb)
    return loaded.check(), machine


def open_model(name: str, values: Mapping[str, Any], *, images: bool = False) -> "InferenceModel":
    """Loads a command's model with the options in MODEL and, if `images`, with its vision part.
    Notices go to stderr.
    """
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


def echo_all(notices: Iterable[str]) -> None:
    """Prints notices to stderr."""
    for notice in notices:
        echo(notice, err=True)


def echo_weights(folder: Path) -> None:
    """Prints the size of a new folder's weights."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    echo(f"{folder}: {gigabytes(size)} of weights")
