"""The README.md of an exported model: its origin, its training and its results.

It shows a run's config and results, and nothing of the machine: no folder, no host, no user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

import attrs

import runners
from runners.config.recorded import read_recorded
from runners.config.sections import SHIPPED
from runners.errors import spell, spell_tables
from runners.files.json_files import finite_number, read_json, whole_number
from runners.files.json_lines import LineFile
from runners.files.run_files import METRICS, RESOLVED
from runners.models.folders import HUB_NAME
from runners.tokenization.prompt_settings import PROMPT_FILE, PromptSettings

_TUNED = {"full": "every weight", "lora": "LoRA", "dora": "DoRA"}
_OWN: dict[str, str] = dict.fromkeys(SHIPPED, "what ships with grpo_fn")
# Keys about the run's machine, which do not affect what the model learns.
_OF_THE_MACHINE = ("log", "system", "checkpoint")
_KEYS_OF_THE_MACHINE = (
    ("run", "output_dir"),
    ("rollout", "launch"),
    ("rollout", "check_every"),
    ("rollout", "max_batch"),
)
_PATHS = (("model", "path"), ("model", "loader"), ("data", "source"), ("data", "transform"))
_NEEDED = (("model", "path"), ("model", "tune"), ("data", "source"), ("loss", "preset"))
_SHARE = 10  # the first and the last tenth of the updates are compared


@attrs.frozen
class RunFacts:
    """The facts about a model in its run's folder."""

    config: Mapping[str, Mapping[str, Any]]  # config.resolved.json without keys about the machine
    evaluations: Sequence[Mapping[str, Any]]  # the log's lines with exact match
    updates: Sequence[Mapping[str, Any]]  # the log's other lines
    notices: Sequence[str] = ()


def run_facts(model: Path) -> RunFacts | None:
    """The facts of the run of a folder `final` or `checkpoint-N`; None if it belongs to no run, or to one
    that does not tell what was trained on what.

    For a checkpoint only events up to its step count. Raises UserError for files that cannot be read.
    """
    run = model.resolve().parent
    if not (run / RESOLVED).is_file():
        return None
    recorded = read_recorded(run / RESOLVED)
    if any(recorded.get(section, key) is None for section, key in _NEEDED):
        return None
    lines = list(LineFile(run / METRICS).read())
    if (model / "trainer_state.json").is_file():
        loop = read_json(model / "trainer_state.json").get("loop")
        last = whole_number(loop.get("update")) if isinstance(loop, dict) else 0
        lines = [line for line in lines if whole_number(line.get("update")) <= last]
    return RunFacts(
        config=shareable(recorded.values),
        notices=recorded.notices,
        evaluations=[line for line in lines if finite_number(line.get("em")) is not None],
        updates=[line for line in lines if "em" not in line],
    )


def shareable(config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """A resolved config without keys about the machine, and with names in place of paths."""
    result = {name: dict(table) for name, table in config.items() if name not in _OF_THE_MACHINE}
    for section, key in _KEYS_OF_THE_MACHINE:
        result.get(section, {}).pop(key, None)
    for section, key in _PATHS:
        if result.get(section, {}).get(key):
            result[section][key] = _name(result[section][key])
    if functions := result.get("reward", {}).get("functions"):
        result["reward"]["functions"] = [_name(name) for name in functions]
    return result


def model_card(
    title: str,
    facts: RunFacts | None,
    prompt: PromptSettings | None,
    *,
    quantized: str,
    base: str,
    plain_mlx: bool,
) -> str:
    """The card as Markdown.

    Args:
        title: the model's name.
        facts: of its run; None: no run.
        prompt: how the model was asked in training; None: not known.
        quantized: how the weights are packed, in words; "" if they are not.
        base: the Hub name of the trained model; "" if it has none.
        plain_mlx: whether mlx-lm's commands can open it (they cannot open nanochat's tokenizers).
    """
    parts = [_front_matter(facts, base), f"# {title}\n"]
    parts.append(_origin(facts, base, quantized))
    if facts is not None:
        parts += _results(facts)
    if prompt is not None:
        parts += _prompt(prompt)
    if facts is not None:
        parts.append(f"## Config\n\n{_fenced(spell_tables(facts.config).strip(), 'toml')}")
    parts.append(_use(title, prompt, plain_mlx))
    return "\n".join(part for part in parts if part)


def _name(text: str) -> str:
    """The last part of a path, with a file's function; a Hub name or a module's function as it is."""
    place, colon, function = text.rpartition(":")
    if colon and place.endswith(".py"):
        return f"{PurePath(place).name}:{function}"
    if colon or (HUB_NAME.fullmatch(text) and not Path(text).exists()):
        return text
    return PurePath(text).name


def _front_matter(facts: RunFacts | None, base: str) -> str:
    from huggingface_hub import ModelCardData

    source = facts.config["data"]["source"] if facts else ""
    card = ModelCardData(
        library_name="mlx",
        pipeline_tag="text-generation",
        tags=["mlx", "grpo"] if facts else ["mlx"],
        base_model=base or None,
        datasets=source if source not in SHIPPED and "/" in source else None,
    )
    return f"---\n{card.to_yaml()}\n---\n"


def _origin(facts: RunFacts | None, base: str, quantized: str) -> str:
    text = f"Written by grpo_fn {runners.__version__}" + (f" from {base}." if base else ".")
    if facts is not None:
        model, data, loss = (facts.config[name] for name in ("model", "data", "loss"))
        source, problems = (_OWN.get(name, name) for name in (base or model["path"], data["source"]))
        text = (
            f"Trained with GRPO ({loss['preset']}, {_TUNED[model['tune']]}) by grpo_fn "
            f"{runners.__version__}.\n\n"
            f"- Model: {source}\n- Data: {problems}\n"
        )
    if quantized:
        measured = " The results are those of full precision." if facts is not None else ""
        text = f"{text.strip()}\n\nThe weights are quantized: {quantized}.{measured}"
    return f"{text.strip()}\n"


def _results(facts: RunFacts) -> list[str]:
    rows = []
    if facts.evaluations:
        first, last = facts.evaluations[0], facts.evaluations[-1]
        problems = f"exact match, {whole_number(last.get('em_subset')) or '?'} held-out problems"
        before = f"{first['em']:.1%}" if first.get("update") == 0 else "–"
        rows.append((problems, before, f"{last['em']:.1%}"))
    many = max(len(facts.updates) // _SHARE, 1)
    for name, key in (("reward", "reward"), ("completion length, tokens", "completions/mean_length")):
        found = (finite_number(line.get(key)) for line in facts.updates)
        if values := [value for value in found if value is not None]:
            rows.append((name, f"{fmean(values[:many]):.4g}", f"{fmean(values[-many:]):.4g}"))
    if not rows:
        return []
    table = ["| | before | after |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    updates = whole_number(facts.updates[-1].get("update")) if facts.updates else 0
    note = f"{updates} updates; reward and length are means over the first and the last {many} of them.\n"
    return ["## Results\n", "\n".join(table) + "\n", note if facts.updates else ""]


def _prompt(prompt: PromptSettings) -> list[str]:
    system, nudge, stop = prompt.system_prompt.strip(), prompt.nudge, ", ".join(map(spell, prompt.stop))
    parts = ["## Prompt\n"]
    if system or nudge:
        parts.append("The model was trained with this around every question.\n")
    if system:
        parts.append(f"System message:\n\n{_fenced(system)}")
    if nudge:
        parts.append(f"First words of the reply, given to it:\n\n{_fenced(nudge)}")
    if stop:
        parts.append(f"A reply ends with:\n\n{_fenced(stop)}")
    if prompt.chat_template_kwargs:
        parts.append(
            f"The chat template got, besides the messages:\n\n{_fenced(spell(prompt.chat_template_kwargs))}"
        )
    parts.append(f"A reply had at most {prompt.max_new_tokens:,} tokens.\n")
    return parts


def _use(title: str, prompt: PromptSettings | None, plain_mlx: bool) -> str:
    """The commands to use the model, and how each takes the prompt settings."""
    ours = f'grpo generate {title} "…"'
    theirs = f'mlx_lm.generate --model {title} --prompt "…"'
    if prompt is None:
        return f"## Use\n\n```sh\n{theirs if plain_mlx else ours}\n```\n"
    text = f"## Use\n\n```sh\n{ours}\n```\n\nIt takes the prompt settings above from `{PROMPT_FILE}`."
    if plain_mlx:
        text += (
            " mlx-lm does not read that file; it takes the system message as `--system-prompt` and the first "
            f"words as `--prefill-response`:\n\n```sh\n{theirs}\n```"
        )
    return f"{text}\n"


def _fenced(text: str, language: str = "text") -> str:
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}{language}\n{text}\n{ticks}\n"
