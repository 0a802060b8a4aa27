"""Writes the README.md of an exported model: its origin, its training and its results.

The file contains a run's config and results, but no folder, host or user name.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import attrs

import grpo_fn
from runners.config.loading import read_recorded
from runners.config.names import HUB_NAME, SHIPPED
from runners.errors import printable, spell
from runners.evaluation.comparison import wilson
from runners.files.json_files import finite_number, read_json, read_lines, whole_number
from runners.files.run_files import METRICS, RESOLVED
from runners.files.toml_files import toml_text
from runners.machine.terminal import visible
from runners.tokenization.prompt_settings import PROMPT_FILE, PromptSettings

_TUNED = {"full": "every weight", "lora": "LoRA", "dora": "DoRA"}
# About the run's machine; these keys do not affect what the model learns.
_SECTIONS_LEFT_OUT = ("log", "system", "checkpoint")
_KEYS_LEFT_OUT = {"output_dir", "launch", "check_every", "max_batch"}
_PATHS = {"path", "loader", "source", "transform", "functions", "factory", "tools", "form"}
_NEEDED = (("model", "path"), ("model", "tune"), ("data", "source"), ("loss", "preset"))
_MEASURED = {"em": "exact match", "eval/reward": "reward"}
_TRAINED = {"reward": "training reward", "completions/mean_length": "completion length, tokens"}
_SHARE = 10  # the first and the last tenth of the updates are compared
_CARD = """\
---
{{ front }}
---

# {{ heading }}

{% if facts %}
Trained with GRPO ({{ facts.config["loss"]["preset"] }}, {{ tuned }}) by grpo_fn {{ version }}.

- Model: {{ (base or facts.config["model"]["path"]) | origin }}
- Data: {{ facts.config["data"]["source"] | origin }}

{% else %}
Written by grpo_fn {{ version }}{{ " from " ~ (base | code) if base }}.

{% endif %}
{% if quantized %}
The weights are quantized: {{ quantized }}.
{{- " The results were measured in full precision." if facts }}

{% endif %}
{% if facts %}
## Results

| | before | after |
|---|---|---|
{% for row in results %}
| {{ row | join(" | ") }} |
{% endfor %}
{% if facts.updates %}

{{ last_update }} updates; training reward and length are means over the first and the last \
{{ share }}.
{% endif %}

{% endif %}
{% if prompt %}
## Prompt

{% for what, text in prompt_texts.items() if text %}
{{ what }}

{{ text | fenced }}

{% endfor %}
Maximum length of a reply: {{ "{:,}".format(prompt.max_new_tokens) }} tokens.

{% endif %}
{% if facts %}
## Config

{{ config | fenced("toml") }}

{% endif %}
## Use

{% if prompt %}
{{ ("grpo generate " ~ argument ~ ' "…"') | fenced("sh") }}

It uses the prompt settings above from `{{ prompt_file }}`. mlx-lm does not read that file; pass \
the system message as `--system-prompt` and the first words as `--prefill-response`:

{% endif %}
{{ ("mlx_lm.generate --model " ~ argument ~ ' --prompt "…"') | fenced("sh") }}
"""


@attrs.frozen
class RunFacts:
    """Facts about a model, read from its run's folder."""

    config: Mapping[str, Mapping[str, Any]]  # config.resolved.json without keys about the machine
    evaluations: Sequence[Mapping[str, Any]]  # the log's lines of held-out problems
    updates: Sequence[Mapping[str, Any]]  # the log's other lines


def run_facts(model: Path) -> RunFacts | None:
    """Returns facts about the run that a folder `final` or `checkpoint-N` belongs to. Returns None
    if it belongs to no run, or if the run's folder does not name model and data.

    For a checkpoint, only events up to its step are used. Raises UserError for files that cannot be
    read.
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
        shareable(recorded),
        evaluations=[line for line in lines if line.keys() & _MEASURED.keys()],
        updates=[line for line in lines if not line.keys() & _MEASURED.keys()],
    )


def shareable(config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns a resolved config without keys about the machine, and with names instead of paths."""

    def shared(key: str, value: Any) -> Any:
        if key not in _PATHS or not value:
            return value
        return _name(value) if isinstance(value, str) else [_name(each) for each in value]

    return {
        section: {
            key: shared(key, value) for key, value in table.items() if key not in _KEYS_LEFT_OUT
        }
        for section, table in config.items()
        if section not in _SECTIONS_LEFT_OUT
    }


def _name(text: str) -> str:
    """Returns a path's last part, including the function after a file. A Hub name or a module's
    function is unchanged.
    """
    place, colon, function = text.rpartition(":")
    if colon and place.endswith(".py"):
        return f"{PurePath(place).name}:{function}"
    if colon or (HUB_NAME.fullmatch(text) and not Path(text).exists()):
        return text
    return PurePath(text).name


def model_card(
    title: str,
    facts: RunFacts | None,
    prompt: PromptSettings | None,
    *,
    quantized: str,
    base: str,
    licence: Mapping[str, Any],
) -> str:
    """Returns the card as Markdown.

    Args:
        title: the model's name.
        facts: facts about the model's run, or None without a run.
        prompt: the prompt format of training, or None if unknown.
        quantized: a description of how the weights are packed, or "" for unpacked weights.
        base: the Hub name of the trained model; "" if it has none.
        licence: license, license_name and license_link from the base model's card, if known.
    """
    import jinja2
    from huggingface_hub import ModelCardData

    source = facts.config["data"]["source"] if facts else ""
    front = ModelCardData(
        library_name="mlx",
        pipeline_tag="text-generation",
        tags=["mlx", "grpo"] if facts else ["mlx"],
        base_model=base or None,
        **licence,
        datasets=source if source not in SHIPPED and "/" in source else None,
    )
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"code": _code, "fenced": _fenced, "origin": _origin}
    return environment.from_string(_CARD).render(
        front=front.to_yaml(),
        heading=title if HUB_NAME.fullmatch(title) else _code(title),
        version=grpo_fn.__version__,
        facts=facts,
        prompt=prompt,
        quantized=quantized,
        base=base,
        tuned=_TUNED[facts.config["model"]["tune"]] if facts else "",
        results=_results(facts) if facts else [],
        share=_share(facts) if facts else 0,
        last_update=whole_number(facts.updates[-1].get("update")) if facts and facts.updates else 0,
        prompt_texts=_prompt_texts(prompt) if prompt else {},
        config=toml_text(facts.config).strip() if facts else "",
        prompt_file=PROMPT_FILE,
        argument=shlex.quote(printable(title)),
    )


def _share(facts: RunFacts) -> int:
    """Returns the number of updates at the start and at the end of a run whose means are
    compared.
    """
    return max(len(facts.updates) // _SHARE, 1)


def _results(facts: RunFacts) -> list[tuple[str, str, str]]:
    """Returns the rows of the results table: what was measured, the value before, the value
    after.
    """
    rows = []
    for key, name in _MEASURED.items():
        measured = [line for line in facts.evaluations if finite_number(line.get(key)) is not None]
        if measured:
            first = measured[0]
            last = measured[-1]
            before = _figure(first, key) if first.get("update") == 0 else "–"
            count = whole_number(last.get("em_subset")) or ""
            rows.append((f"{name}, {count} held-out problems", before, _figure(last, key)))
    share = _share(facts)
    for key, name in _TRAINED.items():
        found = (finite_number(line.get(key)) for line in facts.updates)
        values = [value for value in found if value is not None]
        if values:
            rows.append((name, f"{_mean(values[:share]):.4g}", f"{_mean(values[-share:]):.4g}"))
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)  # no sum of finite numbers overflows


def _figure(line: Mapping[str, Any], key: str) -> str:
    """Returns a measured mean, with its 95 % interval if the line contains the necessary fields."""
    mean = float(line[key])
    count = whole_number(line.get("em_subset"))
    spread = finite_number(line.get("eval/reward_std"))
    form = ".1%" if key == "em" else ".4g"
    interval: tuple[float, float] | None = None
    if key == "em" and count and 0 <= mean <= 1:
        interval = wilson(round(mean * count), count)
    elif key != "em" and count and spread is not None:
        half = 1.96 * spread / count**0.5
        interval = (mean - half, mean + half)
    if interval is None:
        return f"{mean:{form}}"
    return f"{mean:{form}} [{interval[0]:{form}}, {interval[1]:{form}}]"


def _prompt_texts(prompt: PromptSettings) -> dict[str, str]:
    kwargs = prompt.chat_template_kwargs
    return {
        "System message:": prompt.system_prompt.strip(),
        "First words of the reply, part of the prompt:": prompt.nudge,
        "A reply ends with:": ", ".join(map(spell, prompt.stop)),
        "Arguments of the chat template, besides the messages:": spell(kwargs) if kwargs else "",
    }


def _origin(name: str) -> str:
    return "what ships with grpo_fn" if name in SHIPPED else _code(name)


def _code(text: str) -> str:
    """Returns an untrusted text as a code span, in which neither Markdown nor HTML is
    interpreted.
    """
    ticks = _ticks(text, 1)
    return f"{ticks} {printable(text)} {ticks}"


def _fenced(text: str, language: str = "text") -> str:
    ticks = _ticks(text, 3)
    return f"{ticks}{language}\n{visible(text)}\n{ticks}"


def _ticks(text: str, least: int) -> str:
    """Returns a sequence of backticks longer than any in the text."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])
