"""How far few-bit samplers of models with experts are from the learner, with its own experts and with theirs.

Completions are drawn from the rounded weights of small random models with 8 or 32 experts in 6 layers, 2 of
them a token. *Own*: the learner's routers choose. *Replayed*: it takes the sampler's experts
(`loss.router_replay`). *Mismatch* is the mean |Δ log p|, *sample size* the effective one of the weights π/μ,
*same experts* the share of tokens and layers at which both choose alike. Means over three models.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx

import grpo_fn as g
from benchmarks.architectures.small_models import small_model
from benchmarks.architectures.small_settings import VOCABULARY
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.record import Figure
from grpo_fn.learner import chosen_experts
from grpo_fn.policy import quantized_role
from grpo_fn.trees import on_host

EXPERTS = (8, 32)
MODES = ("affine-8", "affine-4", "affine-3")
LAYERS, GROUP_SIZE = 6, 32
SEEDS, PROMPTS, GENERATIONS, TOKENS = 3, 8, 4, 24


def apart(experts: int, mode: str, seed: int, prompts: int) -> dict[str, float]:
    """Of one model: share of tokens and layers with the same experts, mismatch and sample size both ways."""
    policy = g.Policy.from_module(
        small_model("qwen3_moe", seed=seed, num_experts=experts, num_hidden_layers=LAYERS)
    )
    role = quantized_role(policy, mode, group_size=GROUP_SIZE)
    low = role.transform(policy.params)
    key = mx.random.key(seed)
    starts = on_host(mx.random.randint(0, VOCABULARY, (prompts, 4), key=key))
    rollout = g.generate(
        role.policy,
        low,
        starts,
        g.Sampling(num_generations=GENERATIONS, max_new_tokens=TOKENS, eos_ids=()),
        key=key,
    )
    batch = g.make_batch(rollout, mx.zeros((prompts, GENERATIONS)))
    theirs = chosen_experts(role.policy, low, batch)
    ours = chosen_experts(policy, policy.params, batch)
    same = (mx.sort(theirs, axis=-1) == mx.sort(ours, axis=-1)).all(axis=-1)
    step = g.make_logprob_step(policy)
    found = {"same experts": 100 * float(same.astype(mx.float32).mean())}
    for words, each in (("own", batch), ("replayed", attrs.evolve(batch, experts_blnk=theirs))):
        difference = step(policy.params, each) - batch.rollout_logp_bt
        weights = mx.exp(difference)
        found[f"mismatch, {words}"] = float(mx.abs(difference).mean())
        found[f"sample size, {words}"] = 100 * float(mx.square(weights.mean()) / mx.square(weights).mean())
    return found


def figures_of(experts: int, mode: str, found: Sequence[dict[str, float]]) -> list[Figure]:
    """Means over the models, with their range."""
    figures = []
    for name in found[0]:
        values = [each[name] for each in found]
        unit = "nats" if name.startswith("mismatch") else "%"
        figures.append(
            Figure(
                name=f"{experts} experts: {mode}: {name}",
                value=sum(values) / len(values),
                unit=unit,
                low=min(values),
                high=max(values),
                samples=len(values),
            )
        )
    return figures


@benchmark("router_replay")
def main(quick: bool) -> Sequence[Figure]:
    """Few-bit samplers of models with experts against the learner, with its own experts and with theirs."""
    figures: list[Figure] = []
    for experts in EXPERTS[:1] if quick else EXPERTS:
        for mode in MODES[1:2] if quick else MODES:
            seeds = range(1 if quick else SEEDS)
            found = [apart(experts, mode, seed, 1 if quick else PROMPTS) for seed in seeds]
            figures += figures_of(experts, mode, found)
            say(f"router_replay: {experts} experts, {mode}: {found[0]['mismatch, own']:.3f} nats")
    return figures


if __name__ == "__main__":
    main()
