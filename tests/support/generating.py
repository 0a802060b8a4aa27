"""Rollouts of tiny policies, and the model on each completion alone for comparison."""

from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.rollout import draw, draw_bits

EQUAL = [[1, 2, 3], [4, 5, 6]]
RAGGED = [list(range(3, 17)), [7], [9, 8, 2, 5, 1]]
EOS = (3, 17, 40)


def roll(policy, prompts=RAGGED, *, seed=0, generations=3, limit=12, sampling=None, **options) -> Any:
    """A rollout with the policy's own parameters; `options` of `Sampling`, `Decoding` and `generate`."""
    kinds = {
        kind: {name: options.pop(name) for name in attrs.fields_dict(kind) if name in options}
        for kind in (g.Sampling, g.Decoding)
    }
    drawn = {"num_generations": generations, "max_new_tokens": limit, **kinds[g.Sampling]}
    sampling = attrs.evolve(sampling or g.Sampling(), **drawn)
    key, decoding = mx.random.key(seed), g.Decoding(**kinds[g.Decoding])
    return g.generate(policy, policy.params, prompts, sampling, key=key, decoding=decoding, **options)


def sample(logits_bv, keys_b2, **options) -> Any:
    """(tokens, log-probs) of one draw a row; `options` of `Sampling`."""
    drawn = draw(logits_bv, draw_bits(keys_b2, 0, 1)[0], g.Sampling(**options))
    return drawn["tokens"], drawn["logp"]


def teacher_forced(policy, prompt, completion, sampling=None):
    """(log-probs, entropies) of a completion by one forward over prompt + completion, nothing cached."""
    logits = policy.logits(policy.params, mx.array([[*prompt, *completion]]))[0].astype(mx.float32)
    z = np.array(logits, np.float64)[len(prompt) - 1 : -1] / (sampling.temperature if sampling else 1.0)
    whole = z - np.logaddexp.reduce(z, axis=-1, keepdims=True)
    if sampling is not None and sampling.top_k:
        least = np.sort(z, axis=-1)[:, -sampling.top_k, None]
        z = np.where(z >= least, z, -np.inf)
    logp = z - np.logaddexp.reduce(z, axis=-1, keepdims=True)
    return logp[np.arange(len(completion)), completion], -(np.exp(whole) * whole).sum(-1)


def assert_teacher_forced(policy, rollout, sampling=None):
    """Every log-prob (and entropy) of the rollout is the model's own, to 1e-4; zeros after the end."""
    for row, completion in enumerate(rollout.completions()):
        logp, entropy = teacher_forced(
            policy, rollout.prompts[row // rollout.num_generations], completion, sampling
        )
        got = np.array(rollout.logp_bt[row])
        assert np.abs(got[: len(completion)] - logp).max() < 1e-4, f"row {row}"
        assert not got[len(completion) :].any() and not rollout.tokens_bt[row, len(completion) :].any().item()
        if rollout.entropy_bt is not None:
            assert np.abs(np.array(rollout.entropy_bt[row])[: len(completion)] - entropy).max() < 1e-4


def assert_same(one, other):
    """Two rollouts have the same tokens, ends and (to rounding) log-probs."""
    assert one.completions() == other.completions()
    assert one.finished_b.tolist() == other.finished_b.tolist()
    assert float(mx.abs(one.logp_bt - other.logp_bt).max()) < 1e-5
