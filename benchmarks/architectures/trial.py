"""Tests one architecture from end to end, compared with plain calls of mlx-lm's own model, one row
at a time.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

import grpo_fn as g
from benchmarks.architectures.small_models import small_config, small_model
from grpo_fn.learner import can_share, split_batch
from grpo_fn.policy import checkpoint_layers
from grpo_fn.policy_check import without_paths
from grpo_fn.trees import Tree, named_leaves
from runners.errors import UserError
from runners.machine.bounded_process import limit_memory

PROMPTS = {
    "equal": [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]],
    "ragged": [[3, 4, 5, 6, 7, 8, 9, 10, 11], [7], [9, 8, 2, 5, 1]],
}
GENERATIONS, NEW_TOKENS = 2, 6
LOGP, GRADIENT = 1e-3, 5e-3  # the largest differences: nats, and a share of a leaf's norm
SLOWER = "equal lengths only"
STEPS = (
    "load",
    "check",
    "equal",
    "ragged",
    "shared",
    "stop",
    "gradient",
    "lora",
    "packed",
    "checkpointed",
    "reloaded",
)


@attrs.frozen
class Outcome:
    """The outcome of one step."""

    step: str
    fault: str = ""  # "": it is right
    worst: float = 0.0  # the largest difference found
    note: str = ""  # what about it is worth a word: "equal lengths only"

    @property
    def is_wrong(self) -> bool:
        """Whether it computed something different from mlx-lm."""
        return self.fault.startswith(("off by", "Wrong"))


class Wrong(Exception):
    """A step computed something different from mlx-lm's own model."""


def plain_model(name: str) -> nn.Module:
    """The small model as created by mlx-lm."""
    return small_model(name)


def row_logprobs(model: nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> mx.array:
    """log π [T] of a completion, from one call over the row, with the caches that mlx-lm decodes
    with.

    It and its gradient are computed on the CPU, because a GPU's faults would affect both sides of a
    comparison.
    """
    with mx.stream(mx.cpu):
        return _row_logprobs(model, prompt, completion)


def _row_logprobs(model: nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> mx.array:
    from mlx_lm.models.cache import make_prompt_cache

    tokens = mx.array([[*prompt, *completion]])
    z = model(tokens, cache=make_prompt_cache(model))[0, len(prompt) - 1 : -1].astype(mx.float32)
    logp = z - mx.logsumexp(z, axis=-1, keepdims=True)
    return mx.take_along_axis(logp, mx.array(list(completion))[:, None], axis=-1)[:, 0]


def steps_of(name: str) -> Iterator[tuple[str, Callable[[], tuple[float, str]]]]:
    """The steps in order; each returns (worst difference, note) or raises."""
    model = plain_model(name)
    held: dict[str, Any] = {}

    def policy() -> g.Policy:
        if "policy" not in held:
            held["policy"] = g.Policy.from_module(small_model(name))
        return held["policy"]

    def load() -> tuple[float, str]:
        found = policy()
        logits = found.logits(found.params, mx.array([PROMPTS["equal"][0]]))
        if not mx.isfinite(logits).all().item():
            raise Wrong("logits are not finite")
        return 0.0, ""

    def check() -> tuple[float, str]:
        of = policy()
        prompts = [list(range(3, 27)), PROMPTS["ragged"][0]]
        found = g.check_policy(of, of.params, prompts, share_prompts=can_share(of.module))
        held["policy"], held["given_up"] = found.policy, found.given_up
        return 0.0, "; ".join(found.notices)

    def rolled(kind: str, **options: Any) -> tuple[float, str]:
        note = ""
        if kind == "ragged" and not (policy().takes_ragged or options.get("share_prefix")):
            note = SLOWER
        stop = options.pop("find_stop", None)
        rollout = g.generate(
            policy(),
            policy().params,
            PROMPTS[kind],
            g.Sampling(
                num_generations=GENERATIONS,
                max_new_tokens=NEW_TOKENS,
                eos_ids=(3, 17) if stop else (),
            ),
            key=mx.random.key(1),
            find_stop=stop,
            decoding=g.Decoding(**options),
        )
        held["rollout"] = rollout
        return _worst_logp(model, rollout), note

    def shares(of: g.Policy) -> bool:
        return can_share(of.module) and "share_prompts" not in held["given_up"]

    def stopped() -> tuple[float, str]:
        return rolled(
            "ragged", find_stop=lambda tokens, start: 3 if len(tokens) >= 3 else None, check_every=2
        )

    def gradient(of: g.Policy, plain: nn.Module, share: bool) -> float:
        rollout = g.generate(
            of,
            of.params,
            PROMPTS["ragged"],
            g.Sampling(num_generations=GENERATIONS, max_new_tokens=NEW_TOKENS),
            key=mx.random.key(2),
        )
        return _worst_gradient(of, plain, rollout, share, traced="compile" not in held["given_up"])

    def full() -> tuple[float, str]:
        return gradient(policy(), model, shares(policy())), ""

    def adapted(packed: bool) -> tuple[float, str]:
        ours, plain = _with_adapters(small_model(name), packed), _with_adapters(plain_model(name), packed)
        of = g.Policy.from_module(ours)
        return gradient(without_paths(of, held["given_up"]), plain, shares(of)), ""

    def checkpointed() -> tuple[float, str]:
        ours = small_model(name)
        checkpoint_layers(ours)
        return gradient(without_paths(g.Policy.from_module(ours), held["given_up"]), model, share=False), ""

    def reloaded() -> tuple[float, str]:
        return _reloaded(name, policy()), ""

    yield "load", load
    yield "check", check
    yield "equal", lambda: rolled("equal", share_prefix=False)
    yield "ragged", lambda: rolled("ragged", share_prefix=False)
    yield "shared", lambda: rolled("ragged", share_prefix=True)
    yield "stop", stopped
    yield "gradient", full
    yield "lora", lambda: adapted(packed=False)
    yield "packed", lambda: adapted(packed=True)
    yield "checkpointed", checkpointed
    yield "reloaded", reloaded


def run_steps(name: str) -> Iterator[Outcome]:
    """The outcome of each step. If the model cannot even be created, the first step has the fault."""
    steps = steps_of(name)
    while True:
        step = "load"
        try:
            step, compute = next(steps)
            worst, note = compute()
            limit = GRADIENT if step in ("gradient", "lora", "packed", "checkpointed") else LOGP
            fault = "" if worst <= limit else f"off by {worst:.2g}"
            yield Outcome(step, fault, worst, note)
        except StopIteration:
            return
        except Exception as error:
            text = " ".join(str(error).split())
            if isinstance(error, UserError | Wrong | ImportError):
                yield Outcome(step, text)
                return
            where = traceback.extract_tb(error.__traceback__)[-1]
            yield Outcome(
                step, f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
            )
            if step in ("load", "check"):
                return


def main(name: str, seconds: str = "300", memory: str = "3e9") -> None:
    """Prints each outcome as a line of JSON; the process ends if it exceeds a limit."""
    signal.setitimer(signal.ITIMER_PROF, float(seconds))
    limit_memory(int(float(memory)))
    for outcome in run_steps(name):
        print(json.dumps(attrs.asdict(outcome)), flush=True)


def _worst_logp(model: nn.Module, rollout: g.Rollout) -> float:
    """The largest |Δ log p| between a rollout and the plain model, nats."""
    worst = 0.0
    for row, completion in enumerate(rollout.completions()):
        want = row_logprobs(model, rollout.prompts[row // rollout.num_generations], completion)
        got = rollout.logp_bt[row, : len(completion)]
        worst = max(worst, float(np.nan_to_num(mx.abs(got - want).max().item(), nan=np.inf)))
    return worst


def _worst_gradient(
    policy: g.Policy, model: nn.Module, rollout: g.Rollout, share: bool, traced: bool
) -> float:
    """The largest difference of a leaf's gradient from the plain model's, as a share of its norm."""
    advantages = np.random.default_rng(0).normal(size=(len(rollout.prompts), rollout.num_generations))
    batch = g.make_batch(rollout, mx.array(advantages, mx.float32))
    spec = g.LossSpec(surrogate="none", aggregation="constant")
    state = g.init_state(policy.params, g.adamw(1e-3), key=mx.random.key(0))
    parts = split_batch(batch, max_tokens=40, share_prompts=share)
    # Traced only, as its value would first have to go through a C++ compiler: a model may refuse that.
    g.make_grad_step(policy, spec, max_completion_length=NEW_TOKENS, compile=traced)(state, parts[:1])
    step = g.make_grad_step(policy, spec, max_completion_length=NEW_TOKENS, compile=False)
    state, _ = step(state, parts)
    ours = named_leaves(state.accum_grads)

    def loss(params: Tree) -> mx.array:
        model.update(params)
        total = mx.array(0.0)
        for row, completion in enumerate(rollout.completions()):
            p, i = divmod(row, rollout.num_generations)
            total -= float(advantages[p, i]) * row_logprobs(model, rollout.prompts[p], completion).sum()
        return total

    held = model.trainable_parameters()
    with mx.stream(mx.cpu):
        naive = named_leaves(mx.grad(loss)(held))
    model.update(held)
    scale = max(_norm(value) for value in naive.values())
    worst = 0.0
    for name, want in naive.items():
        difference, size = _norm(ours[name] - want), max(_norm(want), 1e-3 * scale)
        worst = max(worst, float(np.nan_to_num(difference / size, nan=np.inf)))
    return worst


def _norm(value: mx.array) -> float:
    return float(np.linalg.norm(np.array(value.astype(mx.float32), np.float64)))


def _with_adapters(model: Any, packed: bool) -> nn.Module:
    """The model, optionally packed to 4 bits, with nonzero LoRA adapters on every linear layer of
    its blocks.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers

    if packed:
        predicate = getattr(model, "quant_predicate", None)

        def fits(path: str, layer: Any) -> Any:
            if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % 32:
                return False
            return predicate is None or bool(predicate(path, layer))

        nn.quantize(model, group_size=32, bits=4, class_predicate=fits)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": 2, "scale": 2.0, "dropout": 0.0})
    rng = np.random.default_rng(7)
    for _, part in model.named_modules():
        if isinstance(part.get("lora_b"), mx.array):
            part.lora_b = mx.array(0.1 * rng.normal(size=part.lora_b.shape), part.lora_b.dtype)
    if not named_leaves(model.trainable_parameters()):
        raise Wrong("mlx-lm finds no layer for adapters")
    return model


def _reloaded(name: str, policy: g.Policy) -> float:
    """The largest difference of logits after the weights are written and mlx-lm has read them
    again.
    """
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    tokens = mx.array([PROMPTS["ragged"][0]])
    want = policy.logits(policy.params, tokens)
    with tempfile.TemporaryDirectory() as folder:
        weights = named_leaves(policy.params) | named_leaves(policy.frozen)
        path = Path(folder)
        mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
        (path / "config.json").write_text(json.dumps(small_config(name)))
        model, _ = load_model(path)
        difference = mx.abs(model(tokens, cache=make_prompt_cache(model)) - want).max().item()
    return float(np.nan_to_num(difference, nan=np.inf))


if __name__ == "__main__":
    main(*sys.argv[1:])
