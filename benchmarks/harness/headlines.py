"""The figures of README.md and the first table of docs/evidence.md, from benchmarks/results."""

from __future__ import annotations

import re
import textwrap
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.harness.record import Record, load_records, load_results
from runners.errors import UserError

TRANSCRIPT = "quickstart.txt"
_PATHS = re.compile(r"(run|writes to|log|report) .*|model .*/.*")  # lines that name this machine's folders
LINES = (
    (
        "quickstart",
        "cpu",
        "quickstart, {cores} CPU cores, from command to end: <seed *: from command to end|.3g> s; "
        "greedy exact match on <seed *: held-out problems|.3g> held-out problems from "
        "<seed *: exact match before|.3g> % to <seed *: exact match after|.3g> %, {seeds} seeds",
    ),
    (
        "rollout",
        "cpu",
        "32 completions of one prompt of 512 tokens, {cores} CPU cores: "
        "<G 32: ours over copied prompts|.1f> × the speed of mlx-lm's `BatchGenerator` with copied "
        "prompts, <G 32: ours over shared prefill|.1f> × its speed with a shared prefill",
    ),
    (
        "rollout",
        "cuda",
        "a rollout of 16 prompts × 8 completions × 256 tokens on {device}: "
        "<16 × 8, 0.5B: the batch|,.0f> tokens per second for Qwen2.5-0.5B's shape, "
        "<16 × 8, d20: the batch|,.0f> for nanochat-d20's",
    ),
    (
        "learner",
        "cpu",
        "the gradient of 32 completions of 256 tokens, vocabulary 32,768, {cores} CPU cores: "
        "<32 × (128 + 256): time, ours / naive|.2f> × the time of a straightforward implementation, "
        "<32 × (128 + 256): peak, ours / naive|.2f> × its peak memory",
    ),
    (
        "peers",
        "cpu",
        "a whole step, {cores} CPU cores: with LoRA <lora: step, TRL / ours|.2f> × as fast as TRL and "
        "<lora: step, mlx-lm-lora / ours|.2f> × as fast as mlx-lm-lora; with all weights "
        "<full: step, TRL / ours|.2f> × as fast as TRL and "
        "<full: step, mlx-lm-lora / ours|.2f> × as fast as mlx-lm-lora",
    ),
    (
        "mac",
        "metal",
        "Qwen3-0.6B, 4 bits, 4 × 256 tokens, LoRA, on {cpu}: "
        "<Qwen3-0.6B, 4 bits, 4 × 256: sampling|,.0f> tokens per second sampled, "
        "<Qwen3-0.6B, 4 bits, 4 × 256: steps|.2g> steps per second, "
        "<Qwen3-0.6B, 4 bits, 4 × 256: measured peak|,.0f> MB",
    ),
)
"""Benchmark, backend, and a text with <FIGURE|FORMAT>; `*` in a name stands for all seeds."""
EVIDENCE = (
    (
        "against_trl",
        "cpu",
        "the quickstart from command to end, with the same exact match as TRL: "
        "<all seeds: from command to end: TRL / grpo_fn|.3g> × as fast",
    ),
    (
        "real_model",
        "cuda",
        "training SmolLM2-135M to answer in JSON, with the same reward as TRL: "
        "<all seeds: JSON form: seconds of training: TRL / grpo_fn|.3g> × as fast",
    ),
    (
        "real_model",
        "cuda",
        "training SmolLM2-135M to add, with the same reward as TRL: "
        "<all seeds: sums: seconds of training: TRL / grpo_fn|.3g> × as fast",
    ),
    (
        "real_samplers",
        "cuda",
        "training with a calibrated 4-bit sampler: "
        "<all seeds: sums, affine-4 calibrated, token_truncate: below full precision|.3g> points "
        "below full precision",
    ),
    (
        "cold_start",
        "cuda",
        "supervised updates, then GRPO, on GSM8K: "
        "<all seeds: SFT, then GRPO, adaptive, long: accuracy / before training|.3g> × the accuracy "
        "before training",
    ),
)
"""The same for results in benchmarks/results/evidence."""


def shown(results: Path) -> str:
    """The output of the measured quickstart, shortened to its start, one evaluation, and its end.

    Raises:
        UserError: it is missing or incomplete.
    """
    file = results / TRANSCRIPT
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines = [line for line in text.splitlines() if not _PATHS.fullmatch(line)]
    evaluations = [n for n, line in enumerate(lines) if line.startswith("eval ")]
    if len(evaluations) < 3 or not lines[-1].startswith("tokens sampled"):
        wanted = "is not what a whole quickstart prints: run python -m benchmarks.quickstart"
        raise UserError(f"{file} {wanted}")
    first, second, last = evaluations[0], evaluations[1], evaluations[-1]
    parts = [lines[: first + 3], lines[second - 1 : second + 1], lines[last - 1 :]]
    return "```\n" + "\n…\n".join("\n".join(part) for part in parts) + "\n```"


def headlines(results: Path) -> str:
    """The list of figures, with a line for each existing record.

    Raises UserError if a record lacks a figure of its line.
    """
    lines = []
    for name, backend, text in LINES:
        record = load_results(results, name).get(backend)
        if record is not None:
            words = f"- {_filled(record, text)} (`python -m benchmarks.{name}`)"
            # No line ends inside code or before a unit.
            kept = re.sub(r"`[^`]*`|\d [%s×]", lambda found: found[0].replace(" ", "\0"), words)
            lines += textwrap.wrap(kept, 118, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def ten(results: Path) -> str:
    """The table of docs/evidence.md: the figures of README.md, and those of each comparison."""
    lines = ["| figure | measured by |", "|---|---|"]
    found = headlines(results).replace("\n  ", " ").splitlines()
    lines += [re.sub(r"^- (.*) \((`[^`]*`)\)$", r"| \1 | \2 |", line) for line in found]
    for name, backend, text in EVIDENCE:
        record = load_records(results / "evidence" / f"{name}.json").get(backend)
        if record is not None:
            file = f"`benchmarks/results/evidence/{name}.json`"
            lines.append(f"| {_filled(record, text)} | {file} |")
    return "\n".join(lines)


def _filled(record: Record, text: str) -> str:
    """The text with the record's machine and figures."""
    seeds = {figure.name.partition(": ")[0] for figure in record.figures}
    counted = len([name for name in seeds if name.startswith("seed ")])
    words = {**record.machine, "seeds": counted}
    return re.sub("<(.+?)[|](.+?)>", lambda found: _value(record, found[1], found[2]), text.format(**words))


def _value(record: Record, name: str, form: str) -> str:
    """A figure, or the range of several."""
    found = [figure.value for figure in record.figures if fnmatchcase(figure.name, name)]
    if not found:
        wanted = f"the result of {record.name} has no figure {name!r}, which README.md wants"
        raise UserError(wanted)
    ends = [format(value, form) for value in (min(found), max(found))]
    return "–".join(dict.fromkeys(ends))
