"""The table of `grpo bench`: the parts of a step with their shares and floors, and advice."""

from __future__ import annotations

from runners.errors import gigabytes
from runners.machine.terminal import aligned
from runners.profiling.step_bench import StepBench


def table(found: StepBench) -> str:
    """The parts with their shares and floors, and advice."""
    rows = [("part", "seconds", "share", "floor", "of the floor")]
    for part, seconds in found.seconds.items():
        floor = found.floors.get(part)
        rows.append(
            (
                part,
                f"{seconds:.3f}",
                f"{100 * seconds / max(found.step, 1e-9):.0f} %",
                "" if floor is None else f"{floor:.3f}",
                "" if not floor else f"{seconds / floor:.1f} x",
            )
        )
    rows.append(("a step", f"{found.step:.3f}", "100 %", "", ""))
    rollout = found.tokens / max(found.seconds["rollout"], 1e-9)
    expected = f", {gigabytes(found.expected_peak)} forecast" if found.expected_peak else ""
    lines = {
        "measured": f"the median of {found.steps} steps; the first one took {found.first:.1f} s",
        "sampled": f"{found.tokens:,.0f} tokens a step: {rollout:,.0f} a second of the rollout, "
        f"{found.tokens / max(found.step, 1e-9):,.0f} of the whole step",
        "learned": f"{found.learned:,.0f} tokens a step, prompts included",
        "peak": f"{gigabytes(found.peak)} of MLX's arrays{expected}",
        "machine": f"{found.rates.matmul / 1e12:.3g} TFLOP/s in products, "
        f"reads {found.rates.read / 1e9:.3g} GB/s",
        "most time": f"{found.limit}; shorter with {found.advice}",
    }
    table = [*aligned(rows, right=range(1, 5)), "", *(f"{name:<12}{value}" for name, value in lines.items())]
    return "\n".join(table)
