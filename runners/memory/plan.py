"""`grpo plan`: a forecast of a run's memory as a table or as JSON, and the messages if it does not fit."""

from __future__ import annotations

import io
import json
from typing import Any

import attrs

from runners.config.loading import Config
from runners.errors import UserError, gigabytes
from runners.machine.memory_readings import read_memory, usable_memory
from runners.machine.startup import Platform
from runners.memory.forecast import Forecast, forecast, longest_prompt
from runners.memory.micro_batch import resolve_micro_batch
from runners.memory.model_sizes import ModelSizes, model_sizes
from runners.memory.remedies import key_to_turn, largest_batch, remedies

TABLE_WIDTH = 100


@attrs.frozen
class MemoryPlan:
    """The output of `grpo plan`."""

    text: str  # for stdout
    problem: str | None  # one line if the run does not fit


def make_plan(config: Config, platform: Platform, *, as_json: bool = False, ranks: int = 1) -> MemoryPlan:
    """The plan of a checked config, for each of `ranks` ranks; only the model's shapes are loaded.

    Raises UserError for a model or data that cannot be used.
    """
    found = forecast(config, platform, read_memory().total, prompt=longest_prompt(config), ranks=ranks)
    facts = _facts(found, platform)
    text = json.dumps(facts, indent=1) if as_json else _table(found, facts)
    problem = None if found.fits else (too_large_line(found) or over_memory_line(found, platform))
    return MemoryPlan(text, problem)


def too_large_line(found: Forecast) -> str | None:
    """One line if not even weights, moments and gradients fit into the memory; else None."""
    if found.floor <= found.total:
        return None
    config = found.config
    way = "take a smaller or a quantized model"
    if config.model.tune == "full":
        adapted = attrs.evolve(config, model=attrs.evolve(config.model, tune="lora"))
        needed = forecast(adapted, Platform("cpu"), found.total, prompt=found.prompt).floor
        way = f'model.tune = "lora" needs {gigabytes(needed)}' if needed <= found.total else way
    return (
        f"{config.where('model.path')}: {config.model.path} needs {gigabytes(found.floor)} for weights, "
        f"moments and gradients alone, but there is only {gigabytes(found.total)}{_limit(found)}; {way}"
    )


def over_memory_line(found: Forecast, platform: Platform) -> str | None:
    """One line if the predicted peak exceeds the memory, with keys that would lower it; else None."""
    if found.fits:
        return None
    peak = found.peak
    name, nbytes = max(peak.parts.items(), key=lambda part: part[1])
    ways = remedies(found, platform)
    way = " or ".join(ways[:2]) + " would fit" if ways else f"lower {key_to_turn(found)}"
    return (
        f"the run is expected to take {gigabytes(peak.total)} at its peak ({peak.name}: {name} "
        f"{gigabytes(nbytes)}), but there is only {gigabytes(found.total)}{_limit(found)}; {way}"
    )


@attrs.frozen
class MemoryOutlook:
    """The memory facts of a run before it starts."""

    key: str  # the config's key that lowers the peak
    notices: tuple[str, ...]
    micro_batch_tokens: int  # the config's value, or the chosen one


def sizes_if_it_can_fit(config: Config, platform: Platform, ranks: int = 1) -> ModelSizes | str:
    """The model's sizes, or a line on why they are unknown.

    Raises UserError if weights, moments and gradients alone exceed the memory.
    """
    try:
        sizes = model_sizes(config, platform)
    except UserError as error:  # faults of the model itself are reported when it is loaded
        return f"memory: not predicted: {error}"
    line = too_large_line(forecast(config, platform, read_memory().total, prompt=1, sizes=sizes, ranks=ranks))
    if line:
        raise UserError(line)
    return sizes


def memory_outlook(
    config: Config, platform: Platform, sizes: ModelSizes | str, prompt: int, ranks: int = 1
) -> MemoryOutlook:
    """The notices and the micro-batch for a run with prompts of at most so many tokens."""
    if isinstance(sizes, str):
        tokens = resolve_micro_batch(config, sizes, platform, prompt).system.micro_batch_tokens
        return MemoryOutlook("system.micro_batch_tokens", (sizes,), tokens)
    total = usable_memory(config.system.memory_limit_gb)
    found = forecast(config, platform, total, prompt=prompt, sizes=sizes, ranks=ranks)
    line = over_memory_line(found, platform)
    notices = (f"memory: {line}",) if line else ()
    return MemoryOutlook(key_to_turn(found), notices, found.config.system.micro_batch_tokens)


def _facts(found: Forecast, platform: Platform) -> dict[str, Any]:
    config = found.config
    return {
        "model": config.model.path,
        "ranks": found.ranks,
        "parameters_trained": found.sizes.weights.trained,
        "prompt_tokens": found.prompt,
        "prompt_tokens_from": found.prompt_source,
        "phases": {phase.name: {"total": phase.total, "parts": dict(phase.parts)} for phase in found.phases},
        "peak": {"phase": found.peak.name, "bytes": found.peak.total},
        "floor": found.floor,
        "memory": found.total,
        "fits": found.fits,
        "largest_batch_size": largest_batch(found, platform),
    }


def _table(found: Forecast, facts: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    grid = Table("phase", "what", box=None, pad_edge=False)
    grid.add_column("bytes", justify="right")
    for phase in found.phases:
        grid.add_section()
        mark = "  ← peak" if phase is found.peak else ""
        grid.add_row(phase.name, "in all", f"{gigabytes(phase.total)}{mark}")
        for name, nbytes in sorted(phase.parts.items(), key=lambda part: -part[1]):
            grid.add_row("", name, gigabytes(nbytes))
    stream = io.StringIO()
    console = Console(file=stream, width=TABLE_WIDTH, color_system=None)
    console.print(grid)
    config, prompts = found.config, facts["largest_batch_size"]
    console.print()
    for name, value in {
        "peak": f"{gigabytes(found.peak.total)} of {gigabytes(found.total)}{_limit(found)}",
        "largest batch": f"optim.batch_size = {prompts} (now {config.optim.batch_size})",
        **({"ranks": f"{found.ranks}; the figures are for one of them"} if found.ranks > 1 else {}),
        "assumes": f"prompts of {found.prompt} tokens ({found.prompt_source}), completions of "
        f"{config.rollout.max_new_tokens}",
    }.items():
        console.print(f"{name:<14}{value}", markup=False, highlight=False, soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _limit(found: Forecast) -> str:
    limit = found.config.system.memory_limit_gb * 1e9
    return " (system.memory_limit_gb)" if limit and found.total == int(limit) else ""
