"""Checks, on a few tokens before training, whether a policy computes the same log-probs for
sampling and learning.

    rollout of a few tokens,                       forward pass of each row alone;
    later the learner's batches
           log-probs  ──── the same, or a slower path ────  log-probs

A model's structure determines which fast paths are possible. The log-probs that are computed here
determine which of these paths are used.
"""

from collections.abc import Callable, Collection, Sequence

import attrs
import mlx.core as mx

from grpo_fn.algorithm import LossSpec
from grpo_fn.completions import Rollout
from grpo_fn.learner import (
    Batch,
    adamw,
    init_state,
    make_batch,
    make_grad_step,
    make_logprob_step,
    split_batch,
)
from grpo_fn.policy import Policy, is_quantized
from grpo_fn.rollout import Sampling, generate
from grpo_fn.trees import Tree, arrays_of, named_leaves, on_host

LONG, SHORT = 24, 9  # most tokens of the two prompts
SAMPLING = Sampling(num_generations=2, max_new_tokens=4)
# The largest difference in a row's mean log-prob that rounding can explain, nats per token.
EXACT = 5e-3  # for models that compute in float32
ROUNDED = 0.1  # for models with 16 bits or packed weights

# The fast paths in the order in which they are dropped, and their names in the notice.
DECODING_PATHS = {
    "supports_compiled_decode": "without compiled decoding steps",
    "shares_prefix": "with a copy of the prompt for each completion",
    "takes_ragged": "with prompts of the same length in a batch",
    "joins_weights": "with the weights in the form that is trained",
    "plain_forward": "and the learner uses caches, like decoding",
}
PATHS = (*DECODING_PATHS, "share_prompts", "compile")


@attrs.frozen(eq=False)
class CheckedPolicy:
    """A policy whose sampler and learner agree, and the paths that were dropped."""

    policy: Policy  # without the dropped paths
    given_up: tuple[str, ...] = ()  # of PATHS
    notices: tuple[str, ...] = ()  # one line per dropped path


def check_policy(
    policy: Policy,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    *,
    learns: bool = True,
    share_prompts: bool = False,
    compile: bool = True,
) -> CheckedPolicy:
    """Returns the policy on the fastest path for which its sampler and its learner have the same
    log-probs.

    The check uses a few tokens of two of the prompts, and takes some seconds for a large model.

    Args:
        policy: the model.
        params: its parameters.
        prompts: token ids, at least one prompt.
        learns: whether the policy is trained; False for a sampler with its own weights. If True,
            the learner's log-probs and gradient are checked too, and checkpointed blocks are
            compared with plain ones.
        share_prompts: whether `split_batch` will share prompts.
        compile: whether the learner's steps will be compiled.

    Raises:
        ValueError: log-probs differ even on the slowest path, they or the gradient are not finite,
            or the model raises an error.
    """
    limit = EXACT if _is_exact(policy, params) else ROUNDED
    found, rollout = _check_decoding(policy, params, few_prompts(prompts, policy.positions), limit)
    if not learns:
        return found
    given_up = list(found.given_up)
    notices = list(found.notices)

    def fault_of_learner(share: bool) -> str:
        return _fault_of(lambda: _learner_fault(found.policy, params, rollout, share, limit))

    if share_prompts and (fault := fault_of_learner(True)):
        share_prompts = False
        given_up.append("share_prompts")
        notices.append(f"the learner computes each row's prompt separately: with sharing, {fault}")
    if not share_prompts and (fault := fault_of_learner(False)):
        raise ValueError(f"this model cannot be trained here: {fault}")
    if compile:
        pieces = _pieces(rollout, share_prompts)[:1]  # traced; nothing is computed
        if fault := _fault_of(lambda: _gradient(found.policy, params, pieces, compile=True)):
            given_up.append("compile")
            notices.append(f"the learner's steps are not compiled: {fault}")
    return CheckedPolicy(found.policy, tuple(given_up), tuple(notices))


def without_paths(policy: Policy, given_up: Collection[str]) -> Policy:
    """Returns the policy without the given paths, which are some of `PATHS`."""
    off = {name: False for name in DECODING_PATHS if name in given_up and name != "plain_forward"}
    if "shares_prefix" in off:
        off["supports_compiled_decode"] = False
    over_caches = policy.split.over_caches or "plain_forward" in given_up
    return attrs.evolve(policy, split=attrs.evolve(policy.split, over_caches=over_caches), **off)


def offers_path(policy: Policy, path: str) -> bool:
    """Returns whether the policy uses this path, one of `DECODING_PATHS`."""
    return not policy.split.over_caches if path == "plain_forward" else bool(getattr(policy, path))


def few_prompts(prompts: Sequence[Sequence[int]], positions: int | None = None) -> list[list[int]]:
    """Returns the first tokens of the longest and the shortest prompt, with different lengths if
    possible.

    `positions` is the maximum number of positions for a prompt and its completion; None means no
    limit.
    """
    longest, shortest = max(prompts, key=len), min(prompts, key=len)
    most = LONG if positions is None else max(min(LONG, positions - SAMPLING.max_new_tokens), 1)
    long = list(longest[:most])
    return [long, list(shortest[: min(SHORT, max(len(long) - 1, 1))])]


def completion_logprobs(
    policy: Policy, params: Tree, prompt: Sequence[int], completion: Sequence[int]
) -> mx.array:
    """Computes log π [T], float32, for a completion's tokens at temperature 1, by the simplest
    forward pass, without padding.
    """
    logits = policy.logits(params, mx.array([[*prompt, *completion[:-1]]], mx.int32))
    z_tv = logits[0, len(prompt) - 1 :].astype(mx.float32)
    logp_tv = z_tv - mx.logsumexp(z_tv, axis=-1, keepdims=True)
    return mx.take_along_axis(logp_tv, mx.array(list(completion), mx.int32)[:, None], axis=-1)[:, 0]


def _check_decoding(
    policy: Policy, params: Tree, prompts: list[list[int]], limit: float
) -> tuple[CheckedPolicy, Rollout]:
    """Returns the policy on the first path for which it decodes correctly, and a rollout with this
    policy.
    """

    def attempt(given_up: Sequence[str]) -> tuple[str, Rollout | None]:
        drawn: list[Rollout] = []
        plainer = without_paths(policy, given_up)

        def difference() -> str:
            """Returns a message about the difference between a rollout and the forward pass over
            its rows.
            """
            drawn.append(generate(plainer, params, prompts, SAMPLING, key=mx.random.key(0)))
            for row, completion in enumerate(drawn[0].completions()):
                prompt = prompts[row // SAMPLING.num_generations]
                want_t = completion_logprobs(plainer, params, prompt, completion)
                if fault := _difference(drawn[0].logp_bt[row, : len(completion)], want_t, limit):
                    return fault
            return ""

        return _fault_of(difference), drawn[0] if drawn else None

    first, rollout = attempt(())
    fault = first
    given_up = ()
    notices = ()
    for path, words in DECODING_PATHS.items() if first else ():
        if not offers_path(without_paths(policy, given_up), path):
            continue
        given_up = (*given_up, path)
        fault, rollout = attempt(given_up)
        if not fault:
            if len(given_up) > 1:  # the paths that were dropped before may not be at fault
                remains, alone = attempt((path,))
                given_up, rollout = (given_up, rollout) if remains else ((path,), alone)
            notices = (f"this model is decoded {words}: otherwise, {first}",)
            break
    if fault or rollout is None:
        raise ValueError(
            f"sampling and training log-probs differ even on the slowest path: {fault}"
        )
    return CheckedPolicy(without_paths(policy, given_up), given_up, notices), rollout


def _learner_fault(
    policy: Policy, params: Tree, rollout: Rollout, share: bool, limit: float
) -> str:
    """Returns the fault in the learner's log-probs or gradient for the rollout, with or without
    shared prompts.
    """
    logprobs = make_logprob_step(policy, compile=False)
    pieces = _pieces(rollout, share)
    for number, piece in enumerate(pieces):
        got_bt = logprobs(params, piece)
        for row, length in enumerate(on_host(piece.mask_bt.sum(axis=1))):
            fault = _difference(got_bt[row, :length], piece.rollout_logp_bt[row, :length], limit)
            if length and fault:
                return f"{fault} (micro-batch {number})"
    gradient = _gradient(policy, params, pieces)
    bad = [name for name, leaf in gradient.items() if not mx.isfinite(leaf).all().item()]
    if bad:
        return f"the gradient of {bad[0]} is not finite (of {len(bad)} leaves)"
    if any(hasattr(type(part), "recomputes") for part in policy.module.modules()):
        # Blocks are not recomputed if there are caches.
        plain = _gradient(without_paths(policy, ["plain_forward"]), params, pieces)
        size = mx.stack([mx.square(leaf).sum() for leaf in plain.values()]).sum()
        apart = mx.stack(
            [mx.square(gradient[name] - leaf).sum() for name, leaf in plain.items()]
        ).sum()
        if not (apart <= (2 * limit) ** 2 * size).item():  # both may be 0
            off = float(mx.sqrt(apart / size))
            return f"checkpointed blocks compute a different gradient, off by {off:.2g} of its norm"
    return ""


def _pieces(rollout: Rollout, share: bool) -> list[Batch]:
    # The sum is not 0: two completions may be the same.
    batch = make_batch(rollout, mx.array([[-1.0, 2.0]] * len(rollout.prompts)))
    return split_batch(batch, max_tokens=10 * LONG, bucketed=False, share_prompts=share)


def _gradient(
    policy: Policy, params: Tree, pieces: list[Batch], *, compile: bool = False
) -> dict[str, mx.array]:
    spec = LossSpec(surrogate="none", aggregation="constant")
    grad_step = make_grad_step(
        policy, spec, max_completion_length=SAMPLING.max_new_tokens, compile=compile
    )
    state = init_state(params, adamw(1e-3), key=mx.random.key(0))
    return named_leaves(grad_step(state, pieces)[0].accum_grads)


def _fault_of(compare: Callable[[], object]) -> str:
    """Returns the fault that a comparison finds, or the error that the model raises, or ""."""
    try:
        found = compare()
        return found if isinstance(found, str) else ""
    except Exception as error:  # a model may fail in any way
        text = " ".join(str(error).split())
        short = any(
            sign in text.lower() for sign in ("alloc", "out of memory", "insufficient memory")
        )
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and short):
            raise  # this says nothing about the model
        return f"it fails with {type(error).__name__}: {text[:300]}"


def _difference(got_t: mx.array, want_t: mx.array, limit: float) -> str:
    """Returns a message about the difference in a row's log-probs, or "" if rounding can explain
    the difference.
    """
    apart = float(mx.abs(got_t - want_t).mean())
    if not mx.isfinite(mx.stack([got_t, want_t])).all().item():
        return "log-probs are not finite"
    return f"log-probs of a row are off by {apart:.2g} nats per token" if apart > limit else ""


def _is_exact(policy: Policy, params: Tree) -> bool:
    """Returns whether everything is computed in float32."""
    if policy.compute_dtype is not None:
        return policy.compute_dtype == mx.float32 and not is_quantized(policy.module)
    return all(leaf.dtype == mx.float32 for leaf in arrays_of((params, policy.frozen)))
