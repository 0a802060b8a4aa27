"""`grpo plan`: a run's memory as a table or as JSON, and what a run reports if it does not fit."""

from __future__ import annotations

import io
import json
from typing import Any

import attrs

from runners.config.loading import Config
from runners.errors import UserError, gigabytes
from runners.machine.memory_readings import free_memory, read_memory, usable_memory
from runners.machine.startup import Platform
from runners.memory.forecast import (
    MOST_PROMPTS,
    USUAL_TOKENS,
    Forecast,
    forecast,
    largest,
    longest_prompt,
    rows_that_fit,
    with_keys,
)
from runners.memory.sizes import ModelSizes, model_sizes

TABLE_WIDTH = 100


def make_plan(
    config: Config, platform: Platform, *, as_json: bool = False, ranks: int = 1
) -> tuple[str, str | None]:
    """The plan of a checked config for each of `ranks` ranks, and one line if the run does not fit.

    Only the model's shapes are loaded. Raises UserError for a model or data that cannot be used.
    """
    longest = longest_prompt(config)
    prompt = config.data.max_prompt_length if longest is None else longest
    source = "data.max_prompt_length" if longest is None else "the longest prompt of the data"
    sizes = sizes_on_ranks(config, platform, ranks)
    found = forecast(config, platform, read_memory().total, prompt=prompt, sizes=sizes)
    facts = {
        "model": config.model.path,
        "ranks": ranks,
        "parameters_trained": sizes.trained,
        "prompt_tokens": prompt,
        "prompt_tokens_from": source,
        "phases": {name: {"total": found.totals[name], "parts": found.phases[name]} for name in found.phases},
        "peak": {"phase": found.peak, "bytes": found.nbytes},
        "floor": found.floor,
        "memory": found.total,
        "fits": found.fits,
        "largest_batch_size": largest_batch(found, platform),
    }
    text = json.dumps(facts, indent=1) if as_json else _table(found, facts)
    return text, too_large_line(config, platform, found.total, sizes) or over_memory_line(found)


def sizes_on_ranks(config: Config, platform: Platform, ranks: int = 1) -> ModelSizes:
    """`model_sizes` for one of several ranks."""
    sizes = model_sizes(config, platform)
    return attrs.evolve(sizes, ranks=ranks, sharded=config.optim.shard and ranks > 1)


def sizes_if_it_can_fit(config: Config, platform: Platform, ranks: int = 1) -> ModelSizes | str:
    """The model's sizes, or a line on why they are unknown.

    Raises UserError if weights, moments and gradients alone exceed the memory.
    """
    try:
        sizes = sizes_on_ranks(config, platform, ranks)
    except UserError as error:  # faults of the model itself are reported when it is loaded
        return f"memory: not predicted: {error}"
    line = too_large_line(config, platform, read_memory().total, sizes)
    if line:
        raise UserError(line)
    return sizes


def too_large_line(config: Config, platform: Platform, total: int, sizes: ModelSizes) -> str | None:
    """One line if not even weights, moments and gradients fit into the memory; else None."""
    limit = config.system.memory_limit_gb * 1e9
    total = int(min(total, limit)) if limit else total
    needed = sum(sizes.held.values()) + sizes.gradients
    if needed <= total:
        return None
    way = "take a smaller or a quantized model"
    if config.model.tune == "full":
        adapted = model_sizes(with_keys(config, "model", tune="lora"), platform)
        least = sum(adapted.held.values()) + adapted.gradients
        way = f'model.tune = "lora" needs {gigabytes(int(least))}' if least <= total else way
    return (
        f"{config.where('model.path')}: {config.model.path} needs {gigabytes(int(needed))} for weights, "
        f"moments and gradients alone, but there is only {gigabytes(total)}{_limit(config, total)}; {way}"
    )


def over_memory_line(found: Forecast) -> str | None:
    """One line if the predicted peak exceeds the memory, with the key that lowers it; else None."""
    if found.fits:
        return None
    name, nbytes = max(found.phases[found.peak].items(), key=lambda part: part[1])
    return (
        f"the run is expected to take {gigabytes(found.nbytes)} at its peak ({found.peak}: {name} "
        f"{gigabytes(nbytes)}), but there is only {gigabytes(found.total)}"
        f"{_limit(found.config, found.total)}; lower {key_to_lower(found)}"
    )


def memory_outlook(
    config: Config, platform: Platform, sizes: ModelSizes | str, prompt: int
) -> tuple[Config, str, tuple[str, ...]]:
    """The config with micro-batch and rollout.max_batch chosen, the key that lowers the peak, and notices.

    `prompt`: tokens of the longest prompt. What the config sets itself stays.
    """
    if isinstance(sizes, str):
        tokens = config.system.micro_batch_tokens or USUAL_TOKENS
        return with_keys(config, "system", micro_batch_tokens=tokens), "system.micro_batch_tokens", (sizes,)
    total = usable_memory(config.system.memory_limit_gb)
    found = forecast(config, platform, total, prompt=prompt, sizes=sizes)
    line = over_memory_line(found)
    notices = [f"memory: {line}"] if line else []
    config, rollout = found.config, config.rollout
    if not rollout.max_batch:
        free = read_memory().active + free_memory(config.system.memory_limit_gb)
        rows = rows_that_fit(attrs.evolve(found, total=free), platform)
        asked = -(-config.optim.batch_size // sizes.ranks) * rollout.num_generations
        if rows < asked:
            config = with_keys(config, "rollout", max_batch=rows)
            notices.append(f"decoding: memory holds {rows:,} of {asked:,} rows together")
    return config, key_to_lower(found), tuple(notices)


def largest_batch(found: Forecast, platform: Platform) -> int:
    """The largest `optim.batch_size` whose peak fits into the memory; 0 if not even one prompt fits."""

    def fits(prompts: int) -> bool:
        other = with_keys(found.config, "optim", batch_size=prompts)
        return forecast(other, platform, found.total, prompt=found.prompt, sizes=found.sizes).fits

    return largest(fits, MOST_PROMPTS)


def key_to_lower(found: Forecast) -> str:
    """The config's key that lowers the peak phase."""
    if found.peak in ("prompts", "rollout"):
        return "rollout.max_batch" if found.config.optim.batch_size > 1 else "rollout.num_generations"
    return {"evaluation": "rollout.max_batch", "gradient": "system.micro_batch_tokens"}.get(
        found.peak, "model.tune"
    )


def _table(found: Forecast, facts: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    grid = Table("phase", "what", box=None, pad_edge=False)
    grid.add_column("bytes", justify="right")
    for phase, parts in found.phases.items():
        grid.add_section()
        mark = "  ← peak" if phase == found.peak else ""
        grid.add_row(phase, "in all", f"{gigabytes(found.totals[phase])}{mark}")
        for name, nbytes in sorted(parts.items(), key=lambda part: -part[1]):
            grid.add_row("", name, gigabytes(nbytes))
    stream = io.StringIO()
    console = Console(file=stream, width=TABLE_WIDTH, color_system=None)
    console.print(grid)
    console.print()
    config, ranks = found.config, facts["ranks"]
    peak = f"{gigabytes(found.nbytes)} of {gigabytes(found.total)}{_limit(config, found.total)}"
    batch = f"optim.batch_size = {facts['largest_batch_size']} (now {config.optim.batch_size})"
    assumed = f"prompts of {found.prompt} tokens ({facts['prompt_tokens_from']}), completions of"
    for name, value in {
        "peak": peak,
        "largest batch": batch,
        **({"ranks": f"{ranks}; the figures are for one of them"} if ranks > 1 else {}),
        "assumes": f"{assumed} {config.rollout.max_new_tokens}",
    }.items():
        console.print(f"{name:<14}{value}", markup=False, highlight=False, soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _limit(config: Config, total: int) -> str:
    limit = config.system.memory_limit_gb * 1e9
    return " (system.memory_limit_gb)" if limit and total == int(limit) else ""
