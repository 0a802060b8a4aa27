"""Writes the figures of README.md from benchmarks/results; no figure is typed in."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.places import filled
from benchmarks.harness.record import Record, load_records, load_results
from runners.errors import UserError

FRONT = Path(__file__).resolve().parents[2] / "README.md"
TRANSCRIPT = "quickstart.txt"
_PATHS = re.compile(r"(run|writes to|log|report) .*|model .*/.*")  # lines that name this machine's folders
Line = Callable[[Record], str]


def shown(transcript: str) -> str:
    """The output of a quickstart, shortened to its start, one evaluation, and its end."""
    lines = [line for line in transcript.splitlines() if not _PATHS.fullmatch(line)]
    evaluations = [n for n, line in enumerate(lines) if line.startswith("eval ")]
    if len(evaluations) < 3 or not lines[-1].startswith("tokens sampled"):
        raise UserError(
            f"{TRANSCRIPT} is not what a whole quickstart prints: run python -m benchmarks.quickstart"
        )
    first, second, last = evaluations[0], evaluations[1], evaluations[-1]
    parts = [lines[: first + 3], lines[second - 1 : second + 1], lines[last - 1 :]]
    return "\n…\n".join("\n".join(part) for part in parts)


def headlines(results: Path) -> str:
    """The list of figures, with a line for each existing record.

    Raises UserError if a record lacks a figure of its line.
    """
    lines = []
    for name, backend, line in LINES:
        record = load_results(results, name).get(backend)
        if record is not None:
            words = f"- {line(record)} (`python -m benchmarks.{name}`)"
            # No line ends inside code or before a unit.
            kept = re.sub(r"`[^`]*`|\d [%s×]", lambda found: found[0].replace(" ", "\0"), words)
            lines += textwrap.wrap(kept, 118, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def ten(results: Path) -> str:
    """The table of docs/evidence.md: the figures of README.md, and one or two from each comparison."""
    lines = ["| figure | measured by |", "|---|---|"]
    found = headlines(results).replace("\n  ", " ").splitlines()
    lines += [re.sub(r"^- (.*) \((`[^`]*`)\)$", r"| \1 | \2 |", line) for line in found]
    for name, backend, figure, words in EVIDENCE:
        record = load_records(results / "evidence" / f"{name}.json").get(backend)
        if record is not None:
            value = f"{_value(record, f'all seeds: {figure}'):.3g}"
            lines.append(f"| {words.format(value)} | `benchmarks/results/evidence/{name}.json` |")
    return "\n".join(lines)


def rendered(text: str, results: Path) -> str:
    """README.md's text with both places filled.

    Raises:
        UserError: a place or its content is missing.
    """
    transcript = results / TRANSCRIPT
    if not transcript.is_file():
        raise UserError(f"{transcript} is missing: run python -m benchmarks.quickstart")
    places = {
        "quickstart": f"```\n{shown(transcript.read_text(encoding='utf-8'))}\n```",
        "figures": headlines(results),
    }
    return filled(FRONT.name, text, places)


def _value(record: Record, name: str) -> float:
    for figure in record.figures:
        if figure.name == name:
            return figure.value
    raise UserError(f"the result of {record.name} has no figure {name!r}, which README.md wants")


def _quickstart(record: Record) -> str:
    seeds = [f.name.partition(":")[0] for f in record.figures if f.name.endswith(": from command to end")]
    if not seeds:
        raise UserError("the result of quickstart has no run from command to end, which README.md wants")

    def of(what: str) -> str:
        values = [_value(record, f"{seed}: {what}") for seed in seeds]
        low, high = f"{min(values):.3g}", f"{max(values):.3g}"
        return low if low == high else f"{low}–{high}"

    return (
        f"quickstart, {_cores(record)}, from command to end: {of('from command to end')} s; greedy exact "
        f"match on {of('held-out problems')} held-out problems from {of('exact match before')} % to "
        f"{of('exact match after')} %, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    )


def _rollout(record: Record) -> str:
    copied = _value(record, "G 32: ours over copied prompts")
    shared = _value(record, "G 32: ours over shared prefill")
    return (
        f"32 completions of one prompt of 512 tokens, {_cores(record)}: {copied:.1f} × the speed of mlx-lm's "
        f"`BatchGenerator` with copied prompts, {shared:.1f} × its speed with a shared prefill"
    )


def _rollout_cuda(record: Record) -> str:
    small = _value(record, "16 × 8, 0.5B: the batch")
    d20 = _value(record, "16 × 8, d20: the batch")
    return (
        f"a rollout of 16 prompts × 8 completions × 256 tokens on {record.machine['device']}: {small:,.0f} "
        f"tokens per second for Qwen2.5-0.5B's shape, {d20:,.0f} for nanochat-d20's"
    )


def _learner(record: Record) -> str:
    time = _value(record, "32 × (128 + 256): time, ours / naive")
    peak = _value(record, "32 × (128 + 256): peak, ours / naive")
    return (
        f"the gradient of 32 completions of 256 tokens, vocabulary 32,768, {_cores(record)}: {time:.2f} × "
        f"the time of a straightforward implementation, {peak:.2f} × its peak memory"
    )


def _peers(record: Record) -> str:
    said = []
    for tune, words in (("lora", "with LoRA"), ("full", "with all weights")):
        trl = _value(record, f"{tune}: step, TRL / ours")
        other = _value(record, f"{tune}: step, mlx-lm-lora / ours")
        said.append(f"{words} {trl:.2f} × as fast as TRL and {other:.2f} × as fast as mlx-lm-lora")
    return f"a whole step, {_cores(record)}: {'; '.join(said)}"


def _mac(record: Record) -> str:
    shape = "Qwen3-0.6B, 4 bits, 4 × 256"
    sampling, steps = (_value(record, f"{shape}: {what}") for what in ("sampling", "steps"))
    peak = _value(record, f"{shape}: measured peak") / 1e3
    return (
        f"{shape} tokens, LoRA, on {record.machine['cpu']}: {sampling:,.0f} tokens per second sampled, "
        f"{steps:.2g} steps per second, {peak:.1f} GB"
    )


LINES: tuple[tuple[str, str, Line], ...] = (
    ("quickstart", "cpu", _quickstart),
    ("rollout", "cpu", _rollout),
    ("rollout", "cuda", _rollout_cuda),
    ("learner", "cpu", _learner),
    ("peers", "cpu", _peers),
    ("mac", "metal", _mac),
)
"""Benchmark, backend and the text about its record."""


EVIDENCE = (
    (
        "against_trl",
        "cpu",
        "from command to end: TRL / grpo_fn",
        "the quickstart from command to end, with the same exact match as TRL: {} × as fast",
    ),
    (
        "real_model",
        "cuda",
        "JSON form: seconds of training: TRL / grpo_fn",
        "training SmolLM2-135M to answer in JSON, with the same reward as TRL: {} × as fast",
    ),
    (
        "real_model",
        "cuda",
        "sums: seconds of training: TRL / grpo_fn",
        "training SmolLM2-135M to add, with the same reward as TRL: {} × as fast",
    ),
    (
        "real_samplers",
        "cuda",
        "sums, affine-4 calibrated, token_truncate: below full precision",
        "training with a calibrated 4-bit sampler: {} points below full precision",
    ),
    (
        "cold_start",
        "cuda",
        "SFT, then GRPO, adaptive, long: accuracy / before training",
        "supervised updates, then GRPO, on GSM8K: {} × the accuracy before training",
    ),
)
"""Command, backend, figure over all seeds, and the text about it."""


def _cores(record: Record) -> str:
    return f"{record.machine['cores']} CPU cores"
