"""The choice of a quantized sampler: the measurements of each candidate, and the rule for the choice."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from runners.errors import gigabytes

NOISE = 1.05  # a format has to be faster than full precision by this factor: less may be chance


@attrs.frozen(kw_only=True)
class MeasuredFormat:
    """One candidate. None: not measured, and the verdict says why."""

    quantization: str
    tokens_per_second: float | None = None  # of completions of full length
    memory: int | None = None  # bytes at the peak of the trial, including the sampler's weights
    kl: float | None = None  # KL(candidate ‖ full precision), nats a token
    difference: float | None = None  # mean |Δ log p| a token, nats
    verdict: str = ""


@attrs.frozen
class Trial:
    """The measurements and the choice."""

    rows: tuple[MeasuredFormat, ...]
    choice: str
    reason: str

    @property
    def title(self) -> str:
        """The choice in a line."""
        return f'rollout.quantization = "auto" takes {self.choice}: {self.reason}'

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Columns and rows of text."""
        columns = ("sampler", "tokens/s", "memory", "KL", "mean |Δ log p|", "")
        return columns, [
            (
                row.quantization,
                "–" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
                "–" if row.memory is None else gigabytes(row.memory),
                "–" if row.kl is None else f"{row.kl:.2g}",
                "–" if row.difference is None else f"{row.difference:.2g}",
                row.verdict,
            )
            for row in self.rows
        ]


def choose_format(rows: Sequence[MeasuredFormat], room: float, kl_limit: float) -> Trial:
    """The fastest that fits into `room` bytes and stays under the KL limit, with a verdict on each.

    Full precision, the first row, is kept unless another format is faster by more than noise. If nothing
    fits, the smallest is chosen.
    """
    judged = []
    for row in rows:
        faults = [row.verdict] if row.verdict else []
        if row.kl is not None and not row.kl <= kl_limit:  # NaN fails too
            faults.append(f"KL above {kl_limit:g}")
        if row.memory is not None and row.memory > room:
            faults.append("too large")
        judged.append(attrs.evolve(row, verdict=", ".join(faults)))
    close = [row for row in judged if row.tokens_per_second and "KL" not in row.verdict]
    fitting = [row for row in close if not row.verdict]
    if not fitting:
        best, reason = min(close, key=lambda row: row.memory or 0), "nothing fits, and it is the smallest"
    else:
        best = max(fitting, key=_speed)
        reason = f"the fastest that fits with a KL of at most {kl_limit:g}"
        if fitting[0].quantization == "none" and _speed(best) < NOISE * _speed(fitting[0]):
            best = fitting[0]
            reason = f"no other is faster by {100 * (NOISE - 1):.0f} % with a KL of at most {kl_limit:g}"
    rows = [attrs.evolve(row, verdict="taken") if row is best else row for row in judged]
    return Trial(tuple(rows), best.quantization, reason)


def _speed(row: MeasuredFormat) -> float:
    return row.tokens_per_second or 0.0
