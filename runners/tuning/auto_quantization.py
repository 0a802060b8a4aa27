"""`rollout.quantization = "auto"`: measures the formats on the run's model and prompts, and chooses one.

Every candidate is packed. Rounded weights that are unpacked once per sync have the speed of full precision
and take more memory than it, so they are never the best choice.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.policy import is_quantized
from grpo_fn.prng import QUANTIZATION_TRIAL, stream_key
from grpo_fn.trees import Tree, arrays_of
from runners.config.loading import Config
from runners.errors import UserError
from runners.machine.launch_modes import launch_keywords, usual_launch
from runners.machine.memory_readings import read_memory
from runners.machine.startup import Platform
from runners.models.loaded_model import LoadedModel
from runners.models.role_quantization import make_quantized_role
from runners.tuning.quantization_choice import MeasuredFormat, Trial, choose_format

TRIAL_SECONDS = 18.0  # seconds for all measurements; the documented limit is twenty
CANDIDATES = ("affine-8", "affine-4", "mxfp8", "affine-6", "mxfp4", "nvfp4", "affine-3")
_TRIAL_TOKENS = 16  # new tokens of a timed rollout; fewer if the run's limit is lower
_KL_LOGITS = 2**22  # logits of a model held for the KL

Clock = Callable[[], float]


@attrs.frozen(eq=False)
class _Bench:
    """The setting in which every candidate is measured."""

    config: Config
    prompts: tuple[tuple[int, ...], ...]
    tokens: int  # new ones of a timed rollout
    launch: dict[str, Any]  # keywords of `Decoding`
    clock: Clock

    def sample(self, policy: g.Policy, params: Tree, prompts: int, tokens: int) -> tuple[g.Rollout, float]:
        """A rollout that ignores end tokens, and its seconds."""
        rollout = self.config.rollout
        started = self.clock()
        drawn = g.generate(
            policy,
            params,
            self.prompts[:prompts],
            key=stream_key(mx.random.key(self.config.run.seed), QUANTIZATION_TRIAL),
            num_generations=rollout.num_generations,
            max_new_tokens=tokens,
            sampler=g.Sampler(temperature=rollout.temperature),
            decoding=g.Decoding(max_batch=rollout.max_batch, **self.launch),
        )
        mx.eval(drawn.tokens_bt, drawn.logp_bt)
        return drawn, self.clock() - started

    def rate(self, policy: g.Policy, params: Tree) -> float:
        """Tokens/s of full-length completions, from separate timings of prefill and decoding step."""
        count = len(self.prompts)
        rows, full = count * self.config.rollout.num_generations, self.config.rollout.max_new_tokens
        _, short = self.sample(policy, params, count, 1)
        _, long = self.sample(policy, params, count, 1 + self.tokens)
        step = max(long - short, long / 10) / self.tokens  # a tenth: a single delay must not look like speed
        return rows * full / max(short + full * step, 1e-9)


def resolve_quantization(
    config: Config,
    loaded: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    machine: Platform,
    *,
    clock: Clock = time.perf_counter,
) -> tuple[Config, Trial]:
    """The config with the chosen format in place of "auto", and the measurements behind it.

    Args:
        config: checked, with rollout.quantization = "auto".
        loaded: the model, with its weights.
        prompts: token ids of the run's first prompts.
        machine: where it runs.
        clock: seconds; all measurements end within twenty seconds if full precision takes less.
    """
    if is_quantized(loaded.module):
        trial = Trial((), "none", "the model's weights are quantized already, for sampler and learner alike")
    else:
        trial = _measure_all(config, loaded, tuple(tuple(prompt) for prompt in prompts), machine, clock)
    storage = config.rollout.storage if trial.choice == "none" else "packed"
    rollout = attrs.evolve(config.rollout, quantization=trial.choice, storage=storage)
    return attrs.evolve(config, rollout=rollout), trial


def _measure_all(
    config: Config, loaded: LoadedModel, prompts: tuple[tuple[int, ...], ...], machine: Platform, clock: Clock
) -> Trial:
    end = clock() + TRIAL_SECONDS
    policy = g.Policy.from_module(loaded.module, compute_dtype=loaded.compute_dtype)
    params = policy.params
    bench = _Bench(config, prompts[:1], 1, launch_keywords(usual_launch(machine)), clock)
    bench.sample(policy, params, 1, 2)  # loads and compiles the parts that all candidates share
    started = clock()
    _, probe = bench.sample(policy, params, 1, 2)
    # As many prompts as full precision decodes in a tenth of the time, if each prompt costs the same.
    count = max(1, min(len(prompts), int(TRIAL_SECONDS / 10 / max(probe, 1e-6))))
    tokens = max(1, min(_TRIAL_TOKENS, config.rollout.max_new_tokens - 1))
    bench = attrs.evolve(bench, prompts=prompts[:count], tokens=tokens)
    sampled, _ = bench.sample(policy, params, min(count, 2), tokens)
    log_pv, answers_n = _distribution(policy, params, sampled, config, None)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    rows = [
        MeasuredFormat(
            quantization="none",
            tokens_per_second=bench.rate(policy, params),
            memory=mx.get_peak_memory() - before,
            kl=0.0,
            difference=0.0,
        )
    ]
    now = clock()
    whole = longest = now - started
    for name in CANDIDATES:
        if end - now < 1.5 * longest:
            rows.append(MeasuredFormat(quantization=name, verdict="no time left to measure it"))
            continue
        patience = (end - now) / whole
        rows.append(_measure(bench, policy, name, (log_pv, answers_n), sampled, probe, patience))
        before_it, now = now, clock()
        longest = max(longest, now - before_it)
    limit = config.system.memory_limit_gb * 1e9 or read_memory().total
    # The optimizer's arrays, which are made at the first update.
    moments = 2 * getattr(mx, config.optim.moments).size * sum(leaf.size for leaf in arrays_of(params))
    room, tried = limit - before - moments, {"none"}
    trial = choose_format(rows, room, config.rollout.auto_kl_limit)
    # On a busy machine a single measurement of each is no fair comparison.
    while trial.choice not in tried and end - clock() > 4 * longest:
        tried.add(trial.choice)
        rows = _measured_again(bench, policy, trial.choice, rows)
        trial = choose_format(rows, room, config.rollout.auto_kl_limit)
    return trial


def _measure(
    bench: _Bench,
    policy: g.Policy,
    name: str,
    full: tuple[mx.array, mx.array],
    sampled: g.Rollout,
    probe: float,
    patience: float,
) -> MeasuredFormat:
    """Measures one candidate; gives up after its probe if that takes more than `patience` times `probe`."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    try:
        role = make_quantized_role(bench.config, policy, "rollout.quantization", name, "packed")
    except UserError as error:
        return MeasuredFormat(quantization=name, verdict=str(error).rpartition(": ")[2])
    params = role.transform(policy.params)
    g.materialize(params, role.policy.frozen)
    mx.reset_peak_memory()
    _, seconds = bench.sample(role.policy, params, 1, 2)
    if seconds > patience * probe:
        return MeasuredFormat(
            quantization=name, verdict=f"{seconds / probe:.0f} times as slow: not measured further"
        )
    log_pv, answers_n = full
    log_qv, _ = _distribution(role.policy, params, sampled, bench.config, answers_n)
    kl = float((mx.exp(log_qv) * (log_qv - log_pv)).sum(axis=-1).mean())
    difference = mx.take_along_axis(log_qv - log_pv, answers_n[:, None], axis=-1)
    mx.reset_peak_memory()
    rate = bench.rate(role.policy, params)
    return MeasuredFormat(
        quantization=name,
        tokens_per_second=rate,
        memory=mx.get_peak_memory() - before,
        kl=kl if math.isfinite(kl) else math.inf,
        difference=float(mx.abs(difference).mean()),
    )


def _measured_again(
    bench: _Bench, policy: g.Policy, name: str, rows: list[MeasuredFormat]
) -> list[MeasuredFormat]:
    """The rows with new timings of full precision and one candidate: the better of two, measured in turn."""
    role = make_quantized_role(bench.config, policy, "rollout.quantization", name, "packed")
    sides = {"none": (policy, policy.params), name: (role.policy, role.transform(policy.params))}
    g.materialize(sides[name][1])
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for side in ("none", name, name, "none"):
        rates[side].append(bench.rate(*sides[side]))
    return [
        attrs.evolve(row, tokens_per_second=max(rates[row.quantization]))
        if row.quantization in rates
        else row
        for row in rows
    ]


def _distribution(
    policy: g.Policy, params: Tree, sampled: g.Rollout, config: Config, known_n: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Log-probs [N,V] of all tokens after the prompts of a rollout, and the tokens [N] that it drew there."""
    rows, answers = [], []
    size = sampled.num_generations
    for number, prompt in enumerate(sampled.prompts):
        part_bt = sampled.tokens_bt[number * size : (number + 1) * size]
        whole_bl = mx.concatenate([mx.broadcast_to(mx.array([prompt]), (size, len(prompt))), part_bt], axis=1)
        hidden_btd = policy.hidden(params, whole_bl)[:, len(prompt) - 1 : -1]
        rows.append(hidden_btd.reshape(-1, hidden_btd.shape[-1]))
        answers.append(part_bt.reshape(-1))
    head = policy.head(params)
    hidden_nd, answers_n = mx.concatenate(rows), mx.concatenate(answers)
    vocabulary = head.function(head.params, hidden_nd[:1]).shape[-1]
    # Spread over all rows, because the first completion alone says little.
    count = max(1, min(hidden_nd.shape[0], _KL_LOGITS // vocabulary))
    index = mx.array(np.linspace(0, hidden_nd.shape[0] - 1, count).astype(np.int32))
    z_nv = head.function(head.params, hidden_nd[index]).astype(mx.float32) / config.rollout.temperature
    log_nv = z_nv - mx.logsumexp(z_nv, axis=-1, keepdims=True)
    answers_n = answers_n[index] if known_n is None else known_n
    mx.eval(log_nv, answers_n)
    return log_nv, answers_n
