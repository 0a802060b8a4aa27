"""Batched generation: one prefill per prompt, forked to G completions, decoded together.

    prompts ─prefill→ caches [P] ─fork→ caches [P·G] ─decode, drop finished rows→ completions

Everything is explicit: caches are passed in and out, random keys are numbered, and there is no
global state. A completion depends only on its key, its prompt and the model (up to the rounding of
batched products).
"""

from collections.abc import Sequence
from contextlib import suppress

import mlx.core as mx

from grpo_fn.completions import Rollout, rollout_of
from grpo_fn.images import PromptImages
from grpo_fn.policy.policy import Policy
from grpo_fn.prng import completion_keys
from grpo_fn.process_check import check_process
from grpo_fn.rollout.decode_loop import Columns, Decoding, decode_queue
from grpo_fn.rollout.decode_step import result_of
from grpo_fn.rollout.row_queue import Entry, RowQueue, check_prompts
from grpo_fn.rollout.sampling import FindStop, Sampling
from grpo_fn.rollout.turns import Replies, Turns
from grpo_fn.trees import Tree, on_host


class Interrupted(Exception):
    """Ends a rollout with the tokens sampled so far; thrown into `decode`, or raised by replies."""


def generate(
    policy: Policy,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    key: mx.array,
    prompt_numbers: Sequence[int] | None = None,
    find_stop: FindStop | None = None,
    replies: Replies | None = None,
    images: Sequence[PromptImages | None] | None = None,
    decoding: Decoding | None = None,
) -> Rollout:
    """Samples G completions per prompt, or conversations if there are `replies`.

    Args:
        policy: the model that samples.
        params: its trainable leaves.
        prompts: token ids of each prompt, at least one token each.
        sampling: G, the distribution, and how a completion ends.
        key: PRNG key; the n-th token of completion g of prompt p depends on (key, p, g).
        prompt_numbers: the number p of each prompt, if the prompts are part of a larger set; None
            means 0, 1, 2, …
        find_stop: finds `sampling.stop`, or another end, in a completion's tokens; None means that
            completions end only at end tokens and the length limit.
        replies: returns the tokens that follow a finished turn; with None, turns have no replies.
            The random numbers of a conversation continue over its turns. Conversations are decoded
            with a copy of the prompt for each row.
        images: for each prompt, its images or None; a single None means that no prompt has images.
            Completions of prompts with images are decoded with one copy of each prompt, and without
            a backend's compiled steps.
        decoding: settings for speed and memory; None means `Decoding()`. Results are the same up to
            rounding.

    Raises:
        ValueError: there is no prompt, one is empty, a token id is outside the model's embedding, a
            prompt and `max_new_tokens` need more positions than the model has learned (`TooLong`),
            `prompt_numbers` does not have one entry per prompt, nothing finds `sampling.stop`,
            `find_stop` returns more tokens than there are, replies belong to unexpected rows, or
            images do not fit the prompts, the policy's module (`use_multimodal_rope`) or replies.
    """
    return result_of(
        decode(
            policy,
            params,
            prompts,
            sampling,
            key=key,
            prompt_numbers=prompt_numbers,
            find_stop=find_stop,
            replies=replies,
            images=images,
            decoding=decoding,
        )
    )


def decode(
    policy: Policy,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    key: mx.array,
    prompt_numbers: Sequence[int] | None = None,
    find_stop: FindStop | None = None,
    replies: Replies | None = None,
    images: Sequence[PromptImages | None] | None = None,
    decoding: Decoding | None = None,
) -> Columns[Rollout]:
    """Runs `generate` step by step: yields each step's tokens, and returns the rollout.

    Between the steps, the policy's module contains the parameters. If `Interrupted` is thrown into
    the generator, it returns the tokens sampled up to the last check for finished rows.
    """
    check_process()
    check_prompts(policy, prompts, sampling.max_new_tokens)
    numbers = range(len(prompts)) if prompt_numbers is None else prompt_numbers
    for name, given in (("prompt_numbers", numbers), ("images", images)):
        if given is not None and len(given) != len(prompts):
            raise ValueError(f"{name}: expected {len(prompts)}, one per prompt, found {len(given)}")
    if images is not None and not any(each is not None for each in images):
        images = None
    decoding = decoding or Decoding()
    queue = RowQueue(policy) if replies is None else Turns(policy, replies, decoding.turns_together)
    group = sampling.num_generations
    rows = range(len(prompts) * group)
    keys_b2 = completion_keys(
        key,
        mx.array([numbers[row // group] for row in rows]),
        mx.array([sampling.first_generation + row % group for row in rows]),
    )
    keys = [(first, second) for first, second in on_host(keys_b2)]
    for p, prompt in enumerate(prompts):
        mine = slice(p * group, (p + 1) * group)
        queue.add(
            Entry(
                rows=tuple(rows[mine]),
                prompt=prompt,
                keys=tuple(keys[mine]),
                sampling=sampling,
                find_stop=find_stop,
                images=None if images is None else images[p],
                keep=replies is not None,
            )
        )
    with suppress(Interrupted):
        yield from decode_queue(policy, params, queue, decoding)
    return rollout_of(
        prompts,
        group,
        queue.completions(len(rows)),
        vocabulary=policy.vocabulary,
        images=images,
        sampled=[talk.sampled for talk in queue.talks] if isinstance(queue, Turns) else None,
    )
