"""Fills in the keys of [rollout] that depend on the machine: launch of steps, and number of rows."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx

from grpo_fn.policy import decode_weights_bytes
from grpo_fn.trees import nbytes
from runners.config.loading import Config
from runners.machine.launch_modes import usual_launch
from runners.machine.memory_readings import free_memory
from runners.machine.startup import Platform
from runners.tuning.row_memory import Workload, cast_bytes, groups_that_fit


def resolve_decoding(
    config: Config, work: Workload, *, state: Any, platform: Platform
) -> tuple[Config, tuple[str, ...]]:
    """The config with rollout.launch and rollout.max_batch resolved, and a line if memory limits the rows.

    `state` is the run's state; all its arrays count as memory in use.
    """
    rollout, notices = config.rollout, ()
    if rollout.launch == "auto":
        rollout = attrs.evolve(rollout, launch=usual_launch(platform))
    if not rollout.max_batch:
        groups = _fitting(config, work, state)
        if groups < len(work.lengths):
            rows = groups * work.num_generations
            rollout = attrs.evolve(rollout, max_batch=rows)
            notices = (f"decoding: memory holds {rows:,} of {work.rows:,} rows together",)
    return attrs.evolve(config, rollout=rollout), notices


def _fitting(config: Config, work: Workload, state: Any) -> int:
    """How many groups fit into memory beside the run's arrays, including those not made yet."""
    coming = max(nbytes(state, work.policy.frozen) - mx.get_active_memory(), 0)
    free = free_memory(config.system.memory_limit_gb) - coming - cast_bytes(work)
    with work.policy.bound(work.params) as model:
        return groups_that_fit(work, model, free - decode_weights_bytes(model))
