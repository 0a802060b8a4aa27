"""Whether few-bit rollouts break deep models: weights of whole completions against weights of single tokens.

Narrow llama models of 20 and 32 blocks, random or trained on a small task, take 200 GRPO updates from what
rounded weights sample. *Product* weighs a completion by exp Σ_t (log π − log μ), unclamped; *ours* is the
preset `grpo` with `correction = "token_truncate"`. A completion answers at every position of a given text:
all of it is drawn in one forward. *float16 overflows* is the share of updates whose product form has no
finite gradient in float16.

**What it shows.** No gradient of either form is non-finite, at either depth. With bfloat16 and 8 bits both
learn. At 4 bits ours goes on learning, and the product form gets worse: its weights vanish for nearly all
completions. The product over a completion is the problem, not the 4 bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import attrs
import click
import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.record import Figure
from grpo_fn.compile import Compiled, compiled
from grpo_fn.policy.quantized_role import quantized_role
from grpo_fn.prng import fold_in_rows
from grpo_fn.rollout import draw, draw_bits
from grpo_fn.trees import Tree, map_arrays, named_leaves

KINDS = ("random", "trained")
ROLLOUTS = ("bf16", "affine-8", "affine-4")
FORMS = ("product", "ours")
SPEC = g.preset("grpo", correction="token_truncate")
SYMBOLS = 16  # of the task: at each position, the sum of the last two symbols modulo this
ARITHMETIC = ("float16", "bfloat16", "float32")  # that the product form's weight may be computed in
EPSILON = 0.2  # of the product form's clip


@attrs.frozen
class Size:
    """How large the experiment is."""

    layers: tuple[int, ...] = (20, 32)
    width: int = 64
    prompts: int = 2
    generations: int = 8
    tokens: int = 64  # of every completion
    updates: int = 200
    lessons: int = 120  # supervised steps of a trained model
    learning_rate: float = 3e-4


QUICK = Size(layers=(2, 3), prompts=2, generations=2, tokens=8, updates=4, lessons=3)


class Told(NamedTuple):
    """What one update tells, as arrays; `weights_b` is the log of each completion's product form."""

    reward: mx.array  # mean
    difference: mx.array  # mean |Δ log p| a token
    kl: mx.array
    weights_b: mx.array
    overflows: dict[str, mx.array]  # dtype -> whether the product form's gradient is not finite in it


@attrs.frozen
class Outcome:
    """What the updates came to."""

    skipped: tuple[bool, ...]  # by update: the gradient was not finite
    rewards: tuple[float, ...]
    differences: tuple[float, ...]  # mean |Δ log p| a token, nats
    divergences: tuple[float, ...]  # KL(μ ‖ π), nats a token
    largest: float  # |log weight| of a whole completion
    overflows: dict[str, float]  # dtype -> share of updates whose product form has no finite gradient in it


def make_policy(layers: int, kind: str, size: Size) -> g.Policy:
    """A llama of that depth whose blocks have weights of variance 1/inputs, and logits of deviation 3.

    In a model that is to be trained, what a block adds to the residual stream is scaled by 1/√(2·layers).
    """
    from mlx_lm.models import llama

    width = size.width
    module = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=width,
            num_hidden_layers=layers,
            intermediate_size=2 * width,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=width // 2,
            rms_norm_eps=1e-5,
            vocab_size=SYMBOLS,
            tie_word_embeddings=False,
        )
    )
    rng = np.random.default_rng(layers)
    leaves = []
    for name, leaf in named_leaves(module.parameters()).items():
        if leaf.ndim == 2:
            scale = {"embed": 1.0, "lm_head": 3 / math.sqrt(width)}
            std = next((s for part, s in scale.items() if part in name), 1 / math.sqrt(leaf.shape[1]))
            if kind == "trained" and ("o_proj" in name or "down_proj" in name):
                std /= math.sqrt(2 * layers)
            if kind == "trained" and "lm_head" in name:
                std /= 3
            leaf = mx.array(std * rng.normal(size=leaf.shape), mx.float32)
        leaves.append((name, leaf))
    module.update(tree_unflatten(leaves))
    mx.eval(module.parameters())
    return g.Policy.from_module(module)


def right_answers(text_pt: mx.array) -> mx.array:
    """At each position the sum of the last two symbols, [P,T]."""
    before_pt = mx.pad(text_pt[:, :-1], [(0, 0), (1, 0)])
    return (text_pt + before_pt) % SYMBOLS


def draw_text(rng: np.random.Generator, prompts: int, tokens: int) -> mx.array:
    """Random symbols, int32 [P,T]."""
    return mx.array(rng.integers(0, SYMBOLS, (prompts, tokens)), mx.int32)


def completion_logp(policy: g.Policy, params: Tree, text_pt: mx.array, tokens_bt: mx.array) -> mx.array:
    """log-probs [B,T] of B = P·G completions, those of a text beside each other."""
    hidden_ptd = policy.hidden(params, text_pt)
    hidden_btd = mx.repeat(hidden_ptd, tokens_bt.shape[0] // text_pt.shape[0], axis=0)
    return g.token_logprobs(hidden_btd, policy.head(params), tokens_bt)


def make_rollout(policy: g.Policy, generations: int) -> Compiled:
    """(params, text, key) → (tokens [B,T], the sampler's log-probs [B,T])."""

    def rollout(params: Tree, text_pt: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
        z_nv = mx.repeat(policy.logits(params, text_pt), generations, axis=0).reshape(-1, SYMBOLS)
        rows = z_nv.shape[0]
        keys_n2 = fold_in_rows(mx.broadcast_to(key[None], (rows, 2)), mx.arange(rows))
        drawn = draw(z_nv, draw_bits(keys_n2, 0, 1)[0], g.Sampling())
        shape = (-1, text_pt.shape[1])
        return drawn["tokens"].reshape(shape), drawn["logp"].reshape(shape)

    return compiled(rollout)


def product_loss(log_weights_b: mx.array, advantages_b: mx.array) -> mx.array:
    """−mean of min(w·A, clip(w)·A) with w = exp Σ_t (log π − log μ), in the dtype of its argument."""
    weights_b = mx.exp(log_weights_b)
    advantages_b = advantages_b.astype(weights_b.dtype)
    clipped_b = mx.clip(weights_b, 1 - EPSILON, 1 + EPSILON)
    return -mx.minimum(weights_b * advantages_b, clipped_b * advantages_b).mean()


def make_gradient(policy: g.Policy, form: str) -> Compiled:
    """(params, text, tokens, the sampler's log-probs) → (gradient, what it tells)."""

    def gradient(
        params: Tree, text_pt: mx.array, tokens_bt: mx.array, rollout_bt: mx.array
    ) -> tuple[Tree, Told]:
        answers_bt = mx.repeat(right_answers(text_pt), tokens_bt.shape[0] // text_pt.shape[0], axis=0)
        rewards_b = (tokens_bt == answers_bt).astype(mx.float32).mean(axis=1)
        advantages_b = g.group_advantages(rewards_b.reshape(text_pt.shape[0], -1)).reshape(-1)

        def loss(params: Tree) -> tuple[mx.array, Told]:
            logp_bt = completion_logp(policy, params, text_pt, tokens_bt)
            weights_b = (logp_bt - rollout_bt).sum(axis=1)
            value, stats = g.policy_loss(
                logp_bt, advantages_b, mx.ones_like(logp_bt), SPEC, rollout_logp_bt=rollout_bt
            )
            if form == "product":
                value = product_loss(weights_b, advantages_b)
            weights_b = mx.stop_gradient(weights_b)
            overflows = {str(name): _overflows(weights_b, advantages_b, name) for name in ARITHMETIC}
            told = Told(rewards_b.mean(), stats.logp_diff_mean, stats.sampling_kl_k3, weights_b, overflows)
            return value, told

        (_, told), grads = mx.value_and_grad(loss)(params)
        return grads, told

    return compiled(gradient)


def _overflows(log_weights_b: mx.array, advantages_b: mx.array, dtype: str) -> mx.array:
    grad_b = mx.grad(product_loss)(log_weights_b.astype(getattr(mx, dtype)), advantages_b)
    return mx.logical_not(mx.isfinite(grad_b).all())


def lessons(policy: g.Policy, size: Size, seed: int) -> Tree:
    """The parameters after a short supervised run on the task."""
    optimizer = g.adamw(g.warmup_schedule("linear", 2e-3, size.lessons, 0.1))
    update = g.make_update_step(optimizer, max_grad_norm=1.0)
    state = g.init_state(policy.params, optimizer, key=mx.random.key(seed))
    rng = np.random.default_rng(seed)

    def loss(params: Tree, text_pt: mx.array) -> mx.array:
        return -completion_logp(policy, params, text_pt, right_answers(text_pt)).mean()

    gradient = compiled(lambda params, text_pt: mx.value_and_grad(loss)(params, text_pt))
    for _ in range(size.lessons):
        _, grads = gradient(state.params, draw_text(rng, 8 * size.prompts, size.tokens // 2))
        state, _ = update(attrs.evolve(state, accum_grads=grads, accum_weight=mx.array(1.0)))
        g.materialize(state)
    return state.params


def rounded(policy: g.Policy, rollout: str) -> tuple[g.Policy, Callable[[Tree], Tree]]:
    """The sampler and its weights. bf16 is of the weights alone: its products are slow on a CPU."""
    if rollout == "bf16":
        return policy, lambda params: map_arrays(lambda a: a.astype(mx.bfloat16).astype(a.dtype), params)
    role = quantized_role(policy, rollout)
    return role.policy, role.transform


def train(policy: g.Policy, params: Tree, rollout: str, form: str, size: Size) -> Outcome:
    """GRPO with this sampler and this importance weight."""
    sampler, transform = rounded(policy, rollout)
    draw, gradient = make_rollout(sampler, size.generations), make_gradient(policy, form)
    optimizer = g.adamw(size.learning_rate)
    update = g.make_update_step(optimizer, max_grad_norm=1.0)
    state = g.sync_old(g.init_state(params, optimizer, key=mx.random.key(0)), transform)
    rng = np.random.default_rng(0)
    told: list[Told] = []
    skipped = []
    for number in range(size.updates):
        text_pt = draw_text(rng, size.prompts, size.tokens)
        key = g.fold_in(state.key, number)
        grads, said = gradient(state.params, text_pt, *draw(state.old_params, text_pt, key))
        state, stats = update(attrs.evolve(state, accum_grads=grads, accum_weight=mx.array(1.0)))
        state = g.sync_old(state, transform)
        g.materialize(state, stats, said)
        told.append(said)
        skipped.append(bool(stats.skipped))
    largest = [float(mx.abs(said.weights_b).max()) for said in told]
    return Outcome(
        skipped=tuple(skipped),
        rewards=tuple(float(said.reward) for said in told),
        differences=tuple(float(said.difference) for said in told),
        divergences=tuple(float(said.kl) for said in told),
        largest=max(filter(math.isfinite, largest), default=0.0),
        overflows={name: _mean(float(said.overflows[name]) for said in told) for name in ARITHMETIC},
    )


def _mean(values: Iterable[float]) -> float:
    """Of the finite ones; NaN where there are none."""
    kept = [value for value in values if math.isfinite(value)]
    return sum(kept) / len(kept) if kept else math.nan


def figures_of(name: str, outcome: Outcome, form: str) -> list[Figure]:
    """The figures of one cell of the grid."""
    last = max(len(outcome.rewards) // 10, 1)
    columns = [
        Figure(
            name="non-finite updates",
            value=100 * _mean(outcome.skipped),
            unit="%",
            at_most=0.0 if form == "ours" else None,
        ),
        Figure(name="reward, first tenth", value=_mean(outcome.rewards[:last])),
        Figure(name="reward, last tenth", value=_mean(outcome.rewards[-last:])),
        Figure(name="KL", value=_mean(outcome.divergences), unit="nats"),
        Figure(name="mean |Δ log p|", value=_mean(outcome.differences), unit="nats"),
        Figure(name="largest log-weight", value=outcome.largest, unit="nats"),
        Figure(name="float16 overflows", value=100 * outcome.overflows["float16"], unit="%"),
    ]
    return [
        attrs.evolve(figure, name=f"{name}: {figure.name}")
        for figure in columns
        if math.isfinite(figure.value)
    ]


@benchmark("depth")
@click.option("--layers", type=int, multiple=True, help="Only these depths.")
def main(quick: bool, layers: Sequence[int]) -> Sequence[Figure]:
    """Few-bit rollouts of deep models: non-finite updates, reward and KL, by importance weight."""
    size = QUICK if quick else Size()
    figures: list[Figure] = []
    for depth, kind in itertools.product(layers or size.layers, KINDS):
        policy = make_policy(depth, kind, size)
        params = lessons(policy, size, depth) if kind == "trained" else policy.params
        for rollout, form in itertools.product(ROLLOUTS, FORMS):
            name = f"{depth} layers, {kind}: {rollout}, {form}"
            outcome = train(policy, params, rollout, form, size)
            figures += figures_of(name, outcome, form)
            say(f"depth: {name}: reward {outcome.rewards[0]:.2f} to {outcome.rewards[-1]:.2f}")
    return figures


if __name__ == "__main__":
    main()
