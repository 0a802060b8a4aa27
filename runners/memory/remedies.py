"""Config keys and values that would make a run's predicted memory fit into the machine's."""

from __future__ import annotations

import attrs

from runners.machine.startup import Platform
from runners.memory.forecast import Forecast, forecast, largest

MOST_PROMPTS = 1 << 16  # the largest number of prompts per batch step that is tried


def largest_batch(found: Forecast, platform: Platform) -> int:
    """The largest `optim.batch_size` whose peak fits into the memory; 0 if not even one prompt fits."""

    def fits(prompts: int) -> bool:
        return _with(found, platform, "optim", batch_size=prompts).fits

    return largest(fits, most=MOST_PROMPTS)


def remedies(found: Forecast, platform: Platform) -> list[str]:
    """Settings that would make the peak fit, as `section.key = value`, the mildest first."""
    config = found.config
    size = config.rollout.num_generations
    rows = size * config.optim.batch_size

    def part(groups: int) -> Forecast:
        return _with(found, platform, "rollout", max_batch=groups * size)

    def tokens(power: int) -> Forecast:
        return _with(found, platform, "system", micro_batch_tokens=1 << power)

    def checkpointed() -> Forecast:
        return _with(found, platform, "system", grad_checkpoint=True)

    candidates: list[str] = []
    groups = largest(lambda n: part(n).fits, most=max(rows // size - 1, 0))
    if groups:
        candidates.append(f"rollout.max_batch = {groups * size}")
    power = largest(
        lambda n: tokens(n).fits, most=max(config.system.micro_batch_tokens - 1, 1).bit_length() - 1
    )
    if power:
        candidates.append(f"system.micro_batch_tokens = {1 << power}")
    if not config.system.grad_checkpoint and checkpointed().fits:
        candidates.append("system.grad_checkpoint = true")
    prompts = largest_batch(found, platform)
    if 0 < prompts < config.optim.batch_size:
        candidates.append(f"optim.batch_size = {prompts}")
    return candidates


def key_to_turn(found: Forecast) -> str:
    """The config's key that lowers the peak phase."""
    name = found.peak.name
    if name in ("prompts", "rollout", "turns"):
        return "rollout.max_batch" if found.config.optim.batch_size > 1 else "rollout.num_generations"
    if name.startswith("evaluation"):
        return "rollout.max_batch"
    if name in ("gradient", "log-probs"):
        return "system.micro_batch_tokens"
    return "model.tune"


def _with(found: Forecast, platform: Platform, section: str, **changes: object) -> Forecast:
    config = attrs.evolve(found.config, **{section: attrs.evolve(getattr(found.config, section), **changes)})
    return forecast(config, platform, found.total, prompt=found.prompt, sizes=found.sizes, ranks=found.ranks)
