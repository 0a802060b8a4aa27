"""Rows of the live block: rewards with their last change, lengths, time by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from runners.machine.terminal import visible
from runners.telemetry.progress import Progress, is_finite, number_text

MOST_REWARDS = 6  # rows
_REWARD, _MEAN, _TIME = "rewards/", "/mean", "time/"


def detail_rows(progress: Progress, width: int) -> list[RenderableType]:
    """Further rows from an update's metrics; only those whose metrics exist."""
    rows: list[RenderableType] = []
    if (rewards := _rewards(progress, width)) is not None:
        rows.append(rewards)
    rows += [
        Text(line, style="dim", no_wrap=True, overflow="ellipsis")
        for line in (_lengths(progress.metrics), _times(progress.metrics))
        if line
    ]
    return rows


def _rewards(progress: Progress, width: int) -> RenderableType | None:
    metrics, before = progress.metrics, progress.before
    names = [
        key[len(_REWARD) : -len(_MEAN)] for key in metrics if key.startswith(_REWARD) and key.endswith(_MEAN)
    ]
    if not names:
        return None
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, overflow="ellipsis", max_width=max(width - 24, 8))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    for name in names[:MOST_REWARDS]:
        key = f"{_REWARD}{name}{_MEAN}"
        value, earlier = metrics[key], before.get(key)
        grid.add_row(Text(visible(name)), Text(_or_none(value)), _change(value, earlier))
    if len(names) > MOST_REWARDS:
        grid.add_row(Text(f"and {len(names) - MOST_REWARDS} more"), Text(), Text())
    return grid


def _or_none(value: Any) -> str:
    return number_text(value) if is_finite(value) else "none"


def _change(value: Any, earlier: Any) -> Text:
    """The change since the previous update; empty if one of the two has no value."""
    if not is_finite(value) or not is_finite(earlier):
        return Text()
    change = value - earlier
    if change == 0:
        return Text("=", style="dim")
    return Text(f"{'+' if change > 0 else ''}{number_text(change)}", style="green" if change > 0 else "red")


def _lengths(metrics: Mapping[str, Any]) -> str:
    low, mean, high, cut = (
        metrics.get(f"completions/{name}")
        for name in ("min_length", "mean_length", "max_length", "clipped_ratio")
    )
    if not is_finite(low) or not is_finite(mean) or not is_finite(high):
        return ""
    text = f"tokens a completion  {low:.0f} to {high:.0f}, mean {number_text(mean)}"
    return f"{text}, {100 * cut:.0f}% cut off" if is_finite(cut) and cut else text


def _times(metrics: Mapping[str, Any]) -> str:
    whole = metrics.get("step_time")
    if not is_finite(whole) or not whole:
        return ""
    parts = {
        key[len(_TIME) :]: value
        for key, value in metrics.items()
        if key.startswith(_TIME) and is_finite(value) and key != "time/eval" and key != "time/elapsed"
    }
    # Shares below half a percent are left out.
    shares = sorted(((100 * v / whole, k) for k, v in parts.items() if 200 * v >= whole), reverse=True)
    return f"time {number_text(whole)} s  " + ", ".join(f"{k} {share:.0f}%" for share, k in shares)
