"""Batched generation: one prefill per prompt, forked to G completions, decoded together.

    prompts ─prefill→ caches [P] ─fork→ caches [P·G] ─decode, drop finished rows→ tokens and log-probs

Everything is explicit: caches go in and come out, keys are counted, nothing global is read or written. A
completion depends only on its key, its prompt and the model (to the rounding of batched products).
"""

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import find
from grpo_fn.checks import check_positions, check_token_ids
from grpo_fn.completions import Rollout
from grpo_fn.images import PromptImages
from grpo_fn.policy.caches import kv_caches as cache_rows
from grpo_fn.policy.caches.kv_caches import Caches
from grpo_fn.policy.caches.prefix_cache import fork, keep_prefix_rows, sharing_pays
from grpo_fn.policy.image_forward import takes_images
from grpo_fn.policy.policy import Policy
from grpo_fn.prng import completion_keys
from grpo_fn.process_check import check_process
from grpo_fn.rollout.decode_loop import Columns, Decoding, decode_rows
from grpo_fn.rollout.decode_step import (
    CacheSteps,
    Extender,
    Prefill,
    RowBatch,
    Steps,
    prefill,
    prefill_once,
    result_of,
)
from grpo_fn.rollout.sampling import Sampling, draw_bits, seen_tokens
from grpo_fn.rollout.turns import Replies, Transcript, Turns
from grpo_fn.trees import Tree


class Interrupted(Exception):
    """Thrown into `decode`, or raised by replies: the rollout ends with what has been sampled so far."""


def generate(
    policy: Policy,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    key: mx.array,
    prompt_numbers: Sequence[int] | None = None,
    replies: Replies | None = None,
    images: Sequence[PromptImages | None] | None = None,
    decoding: Decoding | None = None,
) -> Rollout:
    """Sample G completions of each prompt, or conversations if there are `replies`.

    Args:
        policy: the model that samples.
        params: its trainable leaves.
        prompts: token ids of each prompt, at least one token each.
        sampling: G, the distribution, and what ends a completion.
        key: PRNG key; completion g of prompt p draws from (key, p, g) at its n-th token.
        prompt_numbers: p of each prompt, if these are a part of more prompts; None: 0, 1, 2, …
        replies: answers turns that have ended with the tokens that follow them; None: no turn is answered.
            The n-th sampled token of a conversation draws as above. Conversations are decoded with a copy of
            the prompt for each row.
        images: those of each prompt, None if it has none; None: no prompt has any. Such completions are
            decoded over one copy of each prompt, and without a backend's compiled steps.
        decoding: how to decode, for speed and memory; None: `Decoding()`. The same numbers, to rounding.

    Raises:
        ValueError: there is no prompt, one is empty, a token id is outside of the model's embedding, a prompt
            and `max_new_tokens` need more positions than the model has learned (`TooLong`), there is not one
            of `prompt_numbers` for each prompt, `find_stop` gives more tokens than there are,
            replies are not those asked for, or images do not fit the prompts, the policy's module
            (`use_multimodal_rope`) or replies.
    """
    more: dict[str, Any] = {"prompt_numbers": prompt_numbers, "replies": replies, "images": images}
    return result_of(decode(policy, params, prompts, sampling, key=key, decoding=decoding, **more))


def decode(
    policy: Policy,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    key: mx.array,
    prompt_numbers: Sequence[int] | None = None,
    replies: Replies | None = None,
    images: Sequence[PromptImages | None] | None = None,
    decoding: Decoding | None = None,
) -> Columns[Rollout]:
    """`generate` step by step: gives each step's tokens, and returns the rollout.

    Between the steps the policy's module holds the parameters. If `Interrupted` is thrown in, it returns what
    has been sampled up to the last check for ended rows.
    """
    check_process()
    decoding = decoding or Decoding()
    numbers = range(len(prompts)) if prompt_numbers is None else prompt_numbers
    _check(policy, prompts, numbers, sampling.max_new_tokens)
    if images is not None:
        _check_images(policy, images, len(prompts), replies)
        images = images if any(each is not None for each in images) else None
    wanted = True if images is not None else decoding.share_prefix
    share_prefix = policy.shares_prefix and replies is None and (sharing_pays() if wanted is None else wanted)
    group, penalizes = sampling.num_generations, sampling.repetition_penalty != 1
    transcript = Transcript(len(prompts) * group, sampling.with_entropy)
    together = min(len(prompts), max(decoding.max_batch // group, 1)) if decoding.max_batch else len(prompts)
    try:
        with policy.sampling(params, together * group) as model:
            for part in _parts(prompts, together, policy.takes_ragged or share_prefix):
                these = [prompts[p] for p in part]
                rows = [p * group + g for p in part for g in range(group)]
                keys_b2 = completion_keys(
                    key,
                    mx.array([numbers[row // group] for row in rows]),
                    mx.array([sampling.first_generation + row % group for row in rows]),
                )
                # All at once on the device, because a number from the host at each step would be waited for.
                bits_nbw = draw_bits(keys_b2, 0, sampling.max_new_tokens)
                shown = None if images is None else [images[p] for p in part]
                logits_pv, steps = yield from prefilled(policy, model, these, shown, sampling, share_prefix)
                turns = None
                if replies is not None and isinstance(steps, CacheSteps):
                    extender = Extender(policy, model, steps.caches)
                    of_rows = {row: prompts[row // group] for row in rows}
                    rules = decoding.turns_together, policy.vocabulary, penalizes
                    limit = sampling.max_new_tokens
                    turns = Turns(replies, extender, transcript, of_rows, bits_nbw, limit, *rules)
                index = mx.array([place // group for place in range(len(rows))])
                seen_bv = seen_tokens(these, logits_pv.shape[-1])[index] if penalizes else None
                batch = RowBatch(steps, logits_pv[index], bits_nbw, rows, seen_bv)
                yield from decode_rows([batch], transcript, sampling, decoding, turns)
    except Interrupted:
        pass
    rollout = transcript.rollout(prompts, group)
    sampled_bt = None if replies is None else rollout.sampled_bt
    kept = None if images is None else tuple(images)
    return attrs.evolve(rollout, sampled_bt=sampled_bt, vocabulary=policy.vocabulary, images=kept)


def decode_after(
    policy: Policy,
    params: Tree,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    key: mx.array,
    caches: Caches,
    held: int = 0,
    number: int = 0,
    drawn: int = 0,
    decoding: Decoding | None = None,
) -> Columns[None]:
    """One completion of a prompt whose first tokens are in the caches: gives a token at a time.

    Args:
        policy, params, sampling, decoding: as for `generate`, but for one completion.
        prompt: token ids.
        key: the n-th token draws as token `drawn` + n of completion 0 of prompt `number`.
        caches: plain ones of one row; the rest of the prompt and the tokens are appended in place.
        held: tokens of the prompt that they hold, fewer than it has.
        number: of the prompt.
        drawn: tokens of the prompt that were sampled with this key before, in earlier turns.

    Raises ValueError as `generate` does for a prompt.
    """
    check_process()
    _check(policy, [prompt], [number], sampling.max_new_tokens)
    keys_12 = completion_keys(key, mx.array([number]), mx.array([0]))
    bits_n1w = draw_bits(keys_12, drawn, sampling.max_new_tokens)
    with policy.sampling(params) as model:
        logits_1v, caches = yield from prefill(model, [prompt[held:]], caches)
        penalizes = sampling.repetition_penalty != 1
        seen_1v = seen_tokens([prompt], logits_1v.shape[-1]) if penalizes else None
        batch = RowBatch(CacheSteps(model, caches), logits_1v, bits_n1w, [0], seen_1v)
        transcript = Transcript(1, sampling.with_entropy)
        yield from decode_rows([batch], transcript, sampling, decoding or Decoding())


def prefilled(
    policy: Policy,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    images: Sequence[PromptImages | None] | None,
    sampling: Sampling,
    share_prefix: bool,
) -> Prefill[tuple[mx.array, Steps]]:
    """Logits [P,V] after the prompts, and the steps that decode from there."""
    group, lengths = sampling.num_generations, [len(prompt) for prompt in prompts]
    if not share_prefix:
        logits_pv, caches = yield from prefill(model, prompts)
        cache_rows.keep_rows(caches, [p for p in range(len(prompts)) for _ in range(group)])
        return logits_pv, CacheSteps(model, caches)
    some = images if images is not None and any(each is not None for each in images) else None
    logits_pv, caches = yield from prefill_once(policy, model, prompts, some)
    program = find("kernel_steps") if images is None and policy.supports_compiled_decode else None
    if program is not None:
        step = policy.program("kernel_steps", program.forward)
        room = sampling.max_new_tokens
        return logits_pv, program.steps(step, model.parameters(), caches, lengths, group, room)
    shifts = None if images is None else [0 if each is None else each.shift for each in images]
    return logits_pv, CacheSteps(model, fork(caches, lengths, group, shifts), keep_prefix_rows)


def _check(policy: Policy, prompts: Sequence[Sequence[int]], numbers: Sequence[int], most: int) -> None:
    if not prompts or not all(len(prompt) for prompt in prompts):
        found = [len(prompt) for prompt in prompts]
        raise ValueError(f"expected at least one prompt, and no empty one, found lengths {found}")
    check_token_ids(prompts, policy.vocabulary)
    longest = max(map(len, prompts))
    both = f"a prompt of {longest} tokens and max_new_tokens = {most}"
    check_positions(both, longest + most - 1, policy.positions)
    if len(numbers) != len(prompts):
        raise ValueError(f"prompt_numbers: expected {len(prompts)}, one a prompt, found {len(numbers)}")


def _check_images(
    policy: Policy, images: Sequence[PromptImages | None], prompts: int, replies: Replies | None
) -> None:
    if len(images) != prompts:
        raise ValueError(f"images has {len(images)} entries: expected {prompts}, one a prompt")
    if replies is not None:
        raise ValueError("images and replies do not go together: expected one of them")
    if not (policy.shares_prefix and takes_images(policy.module)):
        raise ValueError(
            "this policy takes no images: expected a module with `use_multimodal_rope`, whose completions "
            "can be decoded over one copy of their prompt"
        )


def _parts(prompts: Sequence[Sequence[int]], together: int, takes_ragged: bool) -> list[list[int]]:
    """Indices of the prompts that are decoded together."""
    # Similar lengths together, for less padding and for parts without padding.
    whole = together >= len(prompts)
    order = sorted(range(len(prompts)), key=lambda p: 0 if whole else len(prompts[p]))
    parts = [order[start : start + together] for start in range(0, len(order), together)]
    if not takes_ragged:
        equal: dict[tuple[int, int], list[int]] = {}
        for number, part in enumerate(parts):
            for p in part:
                equal.setdefault((number, len(prompts[p])), []).append(p)
        parts = list(equal.values())
    return parts
