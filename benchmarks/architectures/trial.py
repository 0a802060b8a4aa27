"""Tests one architecture from end to end, compared with plain calls of mlx-lm's own model, one row
at a time.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
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
GRADIENTS = ("gradient", "lora", "packed", "checkpointed")
STEPS = ("load", "check", "equal", "ragged", "shared", "stop", *GRADIENTS, "reloaded")


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


def row_logprobs(model: nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> mx.array:
    """log π [T] of a completion, from one call over the row, with the caches that mlx-lm decodes
    with.

    It and its gradient are computed on the CPU, because a GPU's faults would affect both sides of a
    comparison.
    """
    from mlx_lm.models.cache import make_prompt_cache

    with mx.stream(mx.cpu):
        tokens = mx.array([[*prompt, *completion]])
        z = model(tokens, cache=make_prompt_cache(model))[0, len(prompt) - 1 : -1].astype(mx.float32)
        logp = z - mx.logsumexp(z, axis=-1, keepdims=True)
        return mx.take_along_axis(logp, mx.array(list(completion))[:, None], axis=-1)[:, 0]


@attrs.define
class Trial:
    """The steps of an architecture; each returns (worst difference, note) or raises."""

    name: str
    plain: nn.Module  # as created by mlx-lm
    policy: g.Policy
    given_up: Sequence[str] = ()  # paths that `check_policy` found to be wrong

    @classmethod
    def of(cls, name: str) -> Trial:
        """Both sides of the comparison."""
        return cls(name, small_model(name), g.Policy.from_module(small_model(name)))

    def load(self) -> tuple[float, str]:
        logits = self.policy.logits(self.policy.params, mx.array([PROMPTS["equal"][0]]))
        if not mx.isfinite(logits).all().item():
            raise Wrong("logits are not finite")
        return 0.0, ""

    def check(self) -> tuple[float, str]:
        of = self.policy
        prompts = [list(range(3, 27)), PROMPTS["ragged"][0]]
        found = g.check_policy(of, of.params, prompts, share_prompts=can_share(of.module))
        self.policy = found.policy
        self.given_up = found.given_up
        return 0.0, "; ".join(found.notices)

    def equal(self) -> tuple[float, str]:
        return self._rolled("equal", share_prefix=False), ""

    def ragged(self) -> tuple[float, str]:
        note = "" if self.policy.takes_ragged else SLOWER
        return self._rolled("ragged", share_prefix=False), note

    def shared(self) -> tuple[float, str]:
        return self._rolled("ragged", share_prefix=True), ""

    def stop(self) -> tuple[float, str]:
        def find_stop(tokens: Sequence[int], start: int) -> int | None:
            return 3 if len(tokens) >= 3 else None

        note = "" if self.policy.takes_ragged else SLOWER
        return self._rolled("ragged", find_stop, (3, 17), check_every=2), note

    def _rolled(self, kind: str, find_stop: Any = None, ends: Sequence[int] = (), **options: Any) -> float:
        """The largest |Δ log p| of a rollout from the plain model's, nats."""
        sampling = g.Sampling(num_generations=GENERATIONS, max_new_tokens=NEW_TOKENS, eos_ids=ends)
        rollout = g.generate(
            self.policy,
            self.policy.params,
            PROMPTS[kind],
            sampling,
            key=mx.random.key(1),
            find_stop=find_stop,
            decoding=g.Decoding(**options),
        )
        worst = 0.0
        for row, completion in enumerate(rollout.completions()):
            want = row_logprobs(self.plain, rollout.prompts[row // GENERATIONS], completion)
            got = rollout.logp_bt[row, : len(completion)]
            worst = max(worst, _finite(mx.abs(got - want).max().item()))
        return worst

    def gradient(self) -> tuple[float, str]:
        return self._differs(self.policy, self.plain), ""

    def lora(self) -> tuple[float, str]:
        return self._adapted(packed=False), ""

    def packed(self) -> tuple[float, str]:
        return self._adapted(packed=True), ""

    def _adapted(self, packed: bool) -> float:
        ours, plain = (_with_adapters(small_model(self.name), packed) for _ in range(2))
        return self._differs(without_paths(g.Policy.from_module(ours), self.given_up), plain)

    def checkpointed(self) -> tuple[float, str]:
        ours = small_model(self.name)
        checkpoint_layers(ours)
        of = without_paths(g.Policy.from_module(ours), self.given_up)
        return self._differs(of, self.plain, may_share=False), ""

    def _differs(self, of: g.Policy, plain: nn.Module, may_share: bool = True) -> float:
        sampling = g.Sampling(num_generations=GENERATIONS, max_new_tokens=NEW_TOKENS)
        rollout = g.generate(of, of.params, PROMPTS["ragged"], sampling, key=mx.random.key(2))
        share = may_share and can_share(of.module) and "share_prompts" not in self.given_up
        return _worst_gradient(of, plain, rollout, share, traced="compile" not in self.given_up)

    def reloaded(self) -> tuple[float, str]:
        """The largest difference of logits after mlx-lm has read the written weights again."""
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        of = self.policy
        tokens = mx.array([PROMPTS["ragged"][0]])
        want = of.logits(of.params, tokens)
        with tempfile.TemporaryDirectory() as folder:
            weights = named_leaves(of.params) | named_leaves(of.frozen)
            path = Path(folder)
            mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
            (path / "config.json").write_text(json.dumps(small_config(self.name)))
            model, _ = load_model(path)
            difference = mx.abs(model(tokens, cache=make_prompt_cache(model)) - want).max().item()
        return _finite(difference), ""


def run_steps(name: str) -> Iterator[Outcome]:
    """The outcome of each step. If the model cannot even be created, the first step has the fault."""
    trial: Trial | None = None
    for step in STEPS:
        try:
            trial = trial or Trial.of(name)
            worst, note = getattr(trial, step)()
            limit = GRADIENT if step in GRADIENTS else LOGP
            fault = "" if worst <= limit else f"off by {worst:.2g}"
            yield Outcome(step, fault, worst, note)
        except Exception as error:
            text = " ".join(str(error).split())
            is_told = isinstance(error, UserError | Wrong | ImportError)
            if not is_told:
                where = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(where.filename).name}:{where.lineno}"
                text = f"{type(error).__name__}: {text} ({place})"
            yield Outcome(step, text)
            if is_told or step in ("load", "check"):
                return


def main(name: str, seconds: str = "300", memory: str = "3e9") -> None:
    """Prints each outcome as a line of JSON; the process ends if it exceeds a limit."""
    signal.setitimer(signal.ITIMER_PROF, float(seconds))
    limit_memory(int(float(memory)))
    for outcome in run_steps(name):
        print(json.dumps(attrs.asdict(outcome)), flush=True)


def _finite(value: Any) -> float:
    return float(np.nan_to_num(value, nan=np.inf))


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
        size = max(_norm(want), 1e-3 * scale)
        worst = max(worst, _finite(_norm(ours[name] - want) / size))
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


if __name__ == "__main__":
    main(*sys.argv[1:])
