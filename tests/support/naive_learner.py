"""The learner's gradient written plainly: row by row, without padding, gathering or chunks."""

from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.trees import map_arrays
from tests.support.tiny_policies import lora_policy, tiny_advantages, tiny_module, tiny_policy, tiny_rollout

TEMPERATURE, L_MAX = 0.8, 9
SPECS = {
    "grpo": g.LossSpec(),
    "token_mean": g.LossSpec(epsilon_high=0.28, aggregation="token_mean", correction="token_truncate"),
    "constant": g.LossSpec(aggregation="constant", beta=0.1, entropy_coef=0.02),
    "gspo": g.preset("gspo"),
    "sum": g.LossSpec(aggregation="sum", correction="token_truncate"),
}


def make_state(policy, *, ref=False, optimizer=None) -> Any:
    """A policy's first state; with `ref`, its reference has other weights."""
    reference = map_arrays(lambda a: a * 0.95, policy.params) if ref else None
    return g.init_state(policy.params, optimizer or g.adamw(1e-2), key=mx.random.key(0), ref_params=reference)


def make_batch(
    *, old=True, prompts=(4, 2), generations=3, width=7, seed=0, zeros=False, by_token=False
) -> Any:
    """A batch whose π_old is off by the clip range and more; `by_token`: advantages differ by token."""
    rollout = tiny_rollout(prompts, generations, width, seed=seed)
    adv_pg = tiny_advantages(rollout, seed=seed, zeros=zeros)
    if by_token:
        factors = np.random.default_rng(seed).normal(size=(*adv_pg.shape, width)).astype(np.float32)
        adv_pg = adv_pg[..., None] * mx.array(factors)
    batch = g.make_batch(rollout, adv_pg)
    return attrs.evolve(batch, old_logp_bt=batch.rollout_logp_bt) if old else batch


def mean_gradient(state) -> Any:
    """Σ of gradients over Σ of denominators, as the update uses it."""
    return map_arrays(lambda a: a / (state.accum_weight.item() or 1.0), state.accum_grads)


def near_policy(batch, policy, *, seed=0) -> Any:
    """The batch with old and rollout log-probs within ±0.4 of the policy's own."""
    logp_bt = g.make_logprob_step(policy, temperature=TEMPERATURE, compile=False)(policy.params, batch)
    rng = np.random.default_rng(seed)
    drift = [mx.array(rng.uniform(-0.4, 0.4, logp_bt.shape), mx.float32) for _ in range(2)]
    return attrs.evolve(batch, old_logp_bt=logp_bt + drift[0], rollout_logp_bt=logp_bt + drift[1])


def row_logprobs(module, batch, row) -> Any:
    """(log π, entropy) of one row's completion, by the model called on that row alone, unpadded."""
    start, count = batch.prompt_lengths_b[row].item(), int(batch.mask_bt[row].sum().item())
    tokens = batch.tokens_bl[row : row + 1, : start + count]
    z = module(tokens)[0].astype(mx.float32) / TEMPERATURE
    logp = (z - mx.logsumexp(z, axis=-1, keepdims=True))[start - 1 : start + count - 1]
    chosen = mx.take_along_axis(logp, batch.targets_bt[row, :count, None], axis=-1)[:, 0]
    return chosen, -(mx.exp(logp) * logp).sum(axis=-1)


def naive_loss(module, ref_module, batch, spec):
    """The complete loss written plainly, row by row."""
    rows, total, tokens = batch.mask_bt.shape[0], mx.array(0.0), 0
    for row in range(rows):
        logp, entropy = row_logprobs(module, batch, row)
        count, a = len(logp), batch.advantages_b[row]
        a = a[:count] if a.ndim else a
        tokens += count
        old = mx.stop_gradient(logp) if batch.old_logp_bt is None else batch.old_logp_bt[row, :count]
        log_ratio = logp - old
        if spec.level == "sequence":
            log_ratio = mx.broadcast_to(log_ratio.mean(), log_ratio.shape)
        r = mx.exp(log_ratio)
        clipped = mx.minimum(mx.maximum(r, 1 - spec.epsilon_low), 1 + spec.upper_epsilon)
        term = -mx.minimum(r * a, clipped * a)
        if spec.correction == "token_truncate":
            term = term * mx.minimum(mx.exp(old - batch.rollout_logp_bt[row, :count]), spec.correction_cap)
        if spec.beta:
            y = mx.stop_gradient(row_logprobs(ref_module, batch, row)[0]) - logp
            term = term + spec.beta * (mx.exp(y) - y - 1)
        term = term - spec.entropy_coef * entropy
        total = total + (term.mean() if spec.aggregation == "sequence_mean" else term.sum())
    shares = {"sequence_mean": rows, "token_mean": tokens, "constant": rows * L_MAX, "sum": 1}
    return total / shares[spec.aggregation]


def policy_of(name) -> Any:
    """A tiny policy; "lora" is a llama with adapters."""
    return lora_policy() if name == "lora" else tiny_policy(name)


def gradient_of(loss, name, params):
    """(loss, gradient) of a loss of a module with this name, by plain differentiation."""
    module = lora_policy().module if name == "lora" else tiny_module(name)

    def loss_of(params):
        module.update(params)
        return loss(module)

    return mx.value_and_grad(loss_of)(params)


def naive_gradient(name, params, batch, spec, ref_params=None):
    """(loss, gradient) of `naive_loss`."""
    reference = tiny_module(name) if ref_params is not None else None
    if reference is not None:
        reference.update(ref_params)
    return gradient_of(lambda module: naive_loss(module, reference, batch, spec), name, params)


def accumulated(policy, batch, spec=SPECS["grpo"], *, params=None, **options) -> Any:
    """(state, statistics) after one grad step from a first state; `options` of `make_grad_step`."""
    first = policy.params if params is None else params
    state = g.init_state(first, g.adamw(1e-3), key=mx.random.key(0))
    state, stats = g.make_grad_step(policy, spec, **{"compile": False, **options})(state, batch)
    mx.eval(state.accum_grads)
    return state, stats


def grad_step_of(policy, spec, **options) -> Any:
    return g.make_grad_step(policy, spec, temperature=TEMPERATURE, max_completion_length=L_MAX, **options)
