"""Filling in what [rollout] leaves to the machine: launch, check_every and max_batch.

Memory sets the bound on the rows; the rest is the answer of an earlier run, or of a measurement where that
pays, or the backend's usual one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import statistics
from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx

from grpo_fn.backends import disabled_names
from grpo_fn.policy import decode_weights_bytes
from grpo_fn.trees import nbytes
from runners.config.loading import Config
from runners.config.sections import RolloutConfig
from runners.machine.launch_modes import launch_modes
from runners.machine.memory_readings import free_memory
from runners.machine.startup import Platform
from runners.tuning.decode_choice import (
    DecodeCandidates,
    DecodeTimes,
    choose_decoding,
    measure_decoding,
    reason_not_to_measure,
    usual_decoding,
)
from runners.tuning.row_memory import cast_bytes, groups_that_fit
from runners.tuning.saved_answers import cache_file, recall, remember
from runners.tuning.workload import Workload


def is_fixed(rollout: RolloutConfig) -> bool:
    """Whether the config leaves nothing open."""
    return rollout.launch != "auto" and rollout.check_every > 0 and rollout.max_batch > 0


def resolve_decoding(
    config: Config,
    work: Workload,
    *,
    model_config: dict[str, Any],
    state: Any,
    batch_steps: int,
    platform: Platform,
    say: Callable[[str], None],
) -> tuple[Config, tuple[str, ...]]:
    """The config with those three keys resolved, and the lines that report it.

    `model_config` is the model's config.json; `state` the run's, whose arrays will all be in memory;
    `batch_steps` how many rollouts the run makes. Where the keys are fixed, nothing is measured, read or
    written.
    """
    rollout = config.rollout
    if is_fixed(rollout):
        return config, ()
    # Without lanes, `split` is `eval`.
    ways = tuple(way for way in launch_modes(platform) if way != "split" or work.takes_lanes)
    candidates = DecodeCandidates.of(rollout, work, ways, _fitting(config, work, state, "split" in ways))
    facts = _facts(config, work, model_config, platform, candidates)
    file = cache_file()
    answer, fault = recall(file, facts)
    faults, quiet = [fault], False
    if answer is not None:
        why = f"as found before: {file}"
    elif reason := reason_not_to_measure(work, platform.backend, batch_steps):
        answer, why = usual_decoding(candidates, work), f"not measured: {reason}"
        faults.clear()  # nothing is going to be written
        quiet = True  # the usual answer is no news
    else:
        say("measuring how to decode")
        times, left, reason = measure_decoding(work, candidates)
        mx.reset_peak_memory()  # the run's own peak is what its log is about
        if times is None:
            answer, why = usual_decoding(left, work), f"not measured: {reason}"
        else:
            answer, why = choose_decoding(times, left, work), _timings_line(times, left)
        faults.append(remember(file, facts, answer))
    resolved = attrs.evolve(
        rollout,
        launch=answer.launch if rollout.launch == "auto" else rollout.launch,
        check_every=rollout.check_every or answer.check_every,
        max_batch=rollout.max_batch or answer.max_batch,
    )
    short = candidates.groups[0] < len(work.lengths) and not rollout.max_batch
    bound = f"; memory holds {candidates.groups[0] * work.num_generations}" if short else ""
    if quiet and not bound:
        return attrs.evolve(config, rollout=resolved), tuple(fault for fault in faults if fault)
    line = f"decoding: {_in_words(resolved, work)}{bound} ({why})"
    return attrs.evolve(config, rollout=resolved), (line, *(fault for fault in faults if fault))


def _fitting(config: Config, work: Workload, state: Any, lanes: bool) -> int:
    """How many prompts' groups memory holds beside the run's own arrays, made already or not."""
    if config.rollout.max_batch:
        return len(work.lengths)
    coming = max(nbytes(state, work.policy.frozen) - mx.get_active_memory(), 0)
    free = free_memory(config.system.memory_limit_gb) - coming - cast_bytes(work)
    with work.policy.bound(work.params) as model:
        return groups_that_fit(work, model, free - decode_weights_bytes(model, lanes=lanes))


def _facts(
    config: Config,
    work: Workload,
    model_config: dict[str, Any],
    platform: Platform,
    candidates: DecodeCandidates,
) -> dict[str, Any]:
    """All that an answer depends on; lengths by powers of two, so that like runs share one."""
    rollout, model = config.rollout, config.model
    shape = json.dumps(model_config, sort_keys=True, default=str)
    sampler = work.sampler
    return {
        "backend": platform.backend,
        "device": platform.device,
        "cores": platform.cores,
        "blas": platform.blas,
        "mlx": importlib.metadata.version("mlx"),
        "model": hashlib.sha256(shape.encode()).hexdigest()[:16],
        "tune": model.tune,
        "compute": str(work.policy.compute_dtype),
        "quantization": rollout.quantization,
        "storage": rollout.storage,
        "prompts": len(work.lengths),
        "generations": work.num_generations,
        "prompt": _bucket(max(work.lengths)),
        "new": _bucket(work.max_new_tokens),
        "truncates": sampler.top_p < 1 or sampler.top_k > 0 or sampler.min_p > 0,
        "entropy": sampler.with_entropy,
        "groups": list(candidates.groups),
        "launches": list(candidates.launches),
        "checks": list(candidates.checks),
        "disabled": list(disabled_names()),
    }


def _bucket(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _in_words(rollout: RolloutConfig, work: Workload) -> str:
    rows = f"{rollout.max_batch} rows" if rollout.max_batch else f"all {work.rows} rows"
    return f"{rollout.launch} per step, a look every {rollout.check_every}, {rows} together"


def _timings_line(times: DecodeTimes, candidates: DecodeCandidates) -> str:
    largest = candidates.groups[0]
    medians = ((name, statistics.median(times.step(largest, name))) for name in candidates.launches)
    steps = ", ".join(f"{name} {1e3 * median:.1f} ms a step" for name, median in medians)
    return f"measured in {times.spent:.1f} s: {steps}"
