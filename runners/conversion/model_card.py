"""The README.md of an exported model: its origin, its training and its results.

It shows a run's config and results, and nothing of the machine: no folder, no host, no user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

import attrs

import grpo_fn
from runners.config.names import SHIPPED
from runners.config.recorded import read_recorded
from runners.errors import spell, spell_tables
from runners.evaluation.comparison import wilson
from runners.files.json_files import finite_number, read_json, read_lines, whole_number
from runners.files.run_files import METRICS, RESOLVED
from runners.models.folders import HUB_NAME
from runners.tokenization.prompt_settings import PROMPT_FILE, PromptSettings

_TUNED = {"full": "every weight", "lora": "LoRA", "dora": "DoRA"}
# About the run's machine: not what the model learns.
_SECTIONS_LEFT_OUT = ("log", "system", "checkpoint")
_KEYS_LEFT_OUT = {"output_dir", "launch", "check_every", "max_batch"}
_PATHS = {"path", "loader", "source", "transform", "functions", "factory", "tools", "form"}
_NEEDED = (("model", "path"), ("model", "tune"), ("data", "source"), ("loss", "preset"))
_MEASURED = {"em": "exact match", "eval/reward": "reward"}
_TRAINED = {"reward": "training reward", "completions/mean_length": "completion length, tokens"}
_SHARE = 10  # the first and the last tenth of the updates are compared


@attrs.frozen
class RunFacts:
    """The facts about a model in its run's folder."""

    config: Mapping[str, Mapping[str, Any]]  # config.resolved.json without keys about the machine
    evaluations: Sequence[Mapping[str, Any]]  # the log's lines of held-out problems
    updates: Sequence[Mapping[str, Any]]  # the log's other lines


def run_facts(model: Path) -> RunFacts | None:
    """The facts of the run of a folder `final` or `checkpoint-N`; None if it belongs to no run, or to one
    that does not tell what was trained on what.

    For a checkpoint only events up to its step count. Raises UserError for files that cannot be read.
    """
    run = model.resolve().parent
    if not (run / RESOLVED).is_file():
        return None
    recorded = read_recorded(run / RESOLVED)
    if any(recorded.get(section, {}).get(key) is None for section, key in _NEEDED):
        return None
    lines = list(read_lines(run / METRICS))
    if (model / "trainer_state.json").is_file():
        loop = read_json(model / "trainer_state.json").get("loop")
        last = whole_number(loop.get("update")) if isinstance(loop, dict) else 0
        lines = [line for line in lines if whole_number(line.get("update")) <= last]
    return RunFacts(
        config=shareable(recorded),
        evaluations=[line for line in lines if line.keys() & _MEASURED.keys()],
        updates=[line for line in lines if not line.keys() & _MEASURED.keys()],
    )


def shareable(config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """A resolved config without keys about the machine, and with names in place of paths."""

    def shared(key: str, value: Any) -> Any:
        if key not in _PATHS or not value:
            return value
        return _name(value) if isinstance(value, str) else [_name(each) for each in value]

    return {
        section: {key: shared(key, value) for key, value in table.items() if key not in _KEYS_LEFT_OUT}
        for section, table in config.items()
        if section not in _SECTIONS_LEFT_OUT
    }


def model_card(
    title: str,
    facts: RunFacts | None,
    prompt: PromptSettings | None,
    *,
    quantized: str,
    base: str,
    licence: Mapping[str, str],
) -> str:
    """The card as Markdown.

    Args:
        title: the model's name.
        facts: of its run; None: no run.
        prompt: how the model was asked in training; None: not known.
        quantized: how the weights are packed, in words; "" if they are not.
        base: the Hub name of the trained model; "" if it has none.
        licence: license, license_name and license_link of the base model's card, as far as they are known.
    """
    parts = [_front_matter(facts, base, licence), f"# {title}\n", _origin(facts, base, quantized)]
    parts += _results(facts) if facts else []
    parts += _prompt(prompt) if prompt else []
    if facts is not None:
        parts.append(f"## Config\n\n{_fenced(spell_tables(facts.config).strip(), 'toml')}")
    return "\n".join([*parts, _use(title, prompt)])


def _name(text: str) -> str:
    """The last part of a path, with a file's function; a Hub name or a module's function as it is."""
    place, colon, function = text.rpartition(":")
    if colon and place.endswith(".py"):
        return f"{PurePath(place).name}:{function}"
    if colon or (HUB_NAME.fullmatch(text) and not Path(text).exists()):
        return text
    return PurePath(text).name


def _front_matter(facts: RunFacts | None, base: str, licence: Mapping[str, Any]) -> str:
    from huggingface_hub import ModelCardData

    source = facts.config["data"]["source"] if facts else ""
    card = ModelCardData(
        library_name="mlx",
        pipeline_tag="text-generation",
        tags=["mlx", "grpo"] if facts else ["mlx"],
        base_model=base or None,
        **licence,
        datasets=source if source not in SHIPPED and "/" in source else None,
    )
    return f"---\n{card.to_yaml()}\n---\n"


def _origin(facts: RunFacts | None, base: str, quantized: str) -> str:
    written = f"grpo_fn {grpo_fn.__version__}"
    packed = f"\nThe weights are quantized: {quantized}." if quantized else ""
    if facts is None:
        return f"Written by {written}{f' from {base}' if base else ''}.\n" + (f"{packed}\n" if packed else "")
    model, data, loss = (facts.config[name] for name in ("model", "data", "loss"))
    source, problems = (
        "what ships with grpo_fn" if name in SHIPPED else name
        for name in (base or model["path"], data["source"])
    )
    lines = [f"Trained with GRPO ({loss['preset']}, {_TUNED[model['tune']]}) by {written}.\n"]
    lines += [f"- Model: {source}", f"- Data: {problems}"]
    lines += [f"{packed} The results are those of full precision."] if packed else []
    return "\n".join([*lines, ""])


def _figure(line: Mapping[str, Any], key: str) -> str:
    """A measured mean with its 95 % interval, if the line has what it takes."""
    mean, count = float(line[key]), whole_number(line.get("em_subset"))
    spread = finite_number(line.get("eval/reward_std"))
    if key == "em":
        right = round(mean * count)
        interval = wilson(right, count) if count and 0 <= right <= count else None
        return f"{mean:.1%}" + (f" [{interval.low:.1%}, {interval.high:.1%}]" if interval else "")
    if not count or spread is None:
        return f"{mean:.4g}"
    half = 1.96 * spread / count**0.5
    return f"{mean:.4g} [{mean - half:.4g}, {mean + half:.4g}]"


def _results(facts: RunFacts) -> list[str]:
    rows = ["| | before | after |", "|---|---|---|"]
    for key, name in _MEASURED.items():
        if measured := [line for line in facts.evaluations if finite_number(line.get(key)) is not None]:
            first, last = measured[0], measured[-1]
            before = _figure(first, key) if first.get("update") == 0 else "–"
            count = whole_number(last.get("em_subset")) or ""
            rows.append(f"| {name}, {count} held-out problems | {before} | {_figure(last, key)} |")
    many = max(len(facts.updates) // _SHARE, 1)
    for key, name in _TRAINED.items():
        found = (finite_number(line.get(key)) for line in facts.updates)
        if values := [value for value in found if value is not None]:
            rows.append(f"| {name} | {fmean(values[:many]):.4g} | {fmean(values[-many:]):.4g} |")
    if facts.updates:
        updates = whole_number(facts.updates[-1].get("update"))
        what = "training reward and length are means over the first and the last"
        rows += ["", f"{updates} updates; {what} {many}."]
    return ["## Results\n", *rows, ""]


def _prompt(prompt: PromptSettings) -> list[str]:
    kwargs = spell(prompt.chat_template_kwargs) if prompt.chat_template_kwargs else ""
    shown = {
        "System message:": prompt.system_prompt.strip(),
        "First words of the reply, given to it:": prompt.nudge,
        "A reply ends with:": ", ".join(map(spell, prompt.stop)),
        "The chat template got, besides the messages:": kwargs,
    }
    return [
        "## Prompt\n",
        *(f"{what}\n\n{_fenced(text)}" for what, text in shown.items() if text),
        f"A reply had at most {prompt.max_new_tokens:,} tokens.\n",
    ]


def _use(title: str, prompt: PromptSettings | None) -> str:
    """The commands to use the model, and how each takes the prompt settings."""
    theirs = f'```sh\nmlx_lm.generate --model {title} --prompt "…"\n```\n'
    if prompt is None:
        return f"## Use\n\n{theirs}"
    return (
        f'## Use\n\n```sh\ngrpo generate {title} "…"\n```\n\nIt takes the prompt settings above from '
        f"`{PROMPT_FILE}`. mlx-lm does not read that file; it takes the system message as `--system-prompt` "
        f"and the first words as `--prefill-response`:\n\n{theirs}"
    )


def _fenced(text: str, language: str = "text") -> str:
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}{language}\n{text}\n{ticks}\n"
