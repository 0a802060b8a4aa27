"""Rows that are decoded together, and on a CPU side by side with others: a core each.

A BLAS gives a large product to all cores, but what lies between products is one core's. Two lanes of half the
rows each have all of it done on both, with products in blocks that stay on one core.
"""

import functools
import itertools
from collections.abc import Sequence

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import find
from grpo_fn.policy.caches.kv_caches import Caches
from grpo_fn.policy.decoding.decode_programs import LANE_PROGRAM
from grpo_fn.policy.policy import Policy
from grpo_fn.rollout.decode_step import Steps

Stream = mx.Stream | mx.ThreadLocalStream
LaneSteps = tuple[Steps, list[int], Stream]  # with the places of its rows in the batch


@attrs.define(eq=False)
class Lane:
    """Rows that are decoded together, and their state."""

    steps: Steps
    logits_bv: mx.array  # of the next token
    words_nbw: mx.array  # the random bits of each draw
    rows: list[int]  # numbers of its rows in the whole
    stream: Stream
    seen_bv: mx.array | None = None  # the tokens that each row has had, where repeating them is penalized
    drawn: list[dict[str, mx.array]] = attrs.field(init=False, factory=list)  # since the last look
    alive: set[int] = attrs.field(init=False)  # of `rows`, those that have not ended
    count: int = attrs.field(init=False, default=0)  # tokens drawn of each row

    def __attrs_post_init__(self) -> None:
        self.alive = set(self.rows)

    @property
    def is_full(self) -> bool:
        """Whether no row may have another token."""
        return self.count == self.words_nbw.shape[0]

    def keep_rows(self, places: list[int]) -> None:
        """Go on with the rows at these places alone."""
        self.steps.keep_rows(places)
        index = mx.array(places)
        self.words_nbw, self.rows = self.words_nbw[:, index], [self.rows[i] for i in places]
        self.seen_bv = None if self.seen_bv is None else self.seen_bv[index]


def divided(prompts: int, num_generations: int, lanes: int) -> list[tuple[range, range]]:
    """Which prompts each lane takes, and which completions of each of them: about as many rows.

    Whole prompts where that comes out even, else a share of each prompt's completions.
    """
    if num_generations >= lanes and prompts % lanes:
        return [(range(prompts), part) for part in _cut(num_generations, lanes)]
    return [(part, range(num_generations)) for part in _cut(prompts, min(lanes, prompts))]


def can_split(policy: Policy) -> bool:
    """Whether completions can be decoded in lanes: by the policy's model and by this machine's backend."""
    return policy.takes_lanes and find(LANE_PROGRAM) is not None


def copied_prompt(longest: int) -> int | None:
    """Positions of its prompt that each row in a lane holds, for prompts up to that length.

    None: it holds none. Short prompts are copied into their rows, long ones are held once.
    """
    find_length = find("copied_length")
    return None if find_length is None else find_length(longest)


def grid_lanes(
    policy: Policy,
    model: nn.Module,
    caches: Caches,
    lengths: Sequence[int],
    num_generations: int,
    lanes: int,
    *,
    room: int,
    drawn: int = 0,
) -> list[LaneSteps]:
    """What decodes completions in lanes, over one copy of each prompt; where `can_split(policy)`.

    Args as `shared_steps`.
    """
    program, params = find(LANE_PROGRAM), model.parameters()
    step = policy.program(LANE_PROGRAM, program.forward)
    pairs = [(cache.keys, cache.values) for cache in caches]
    once = find("shared_prompts")(pairs, lengths)
    made: list[LaneSteps] = []
    for number, (prompts, part) in enumerate(divided(len(lengths), num_generations, lanes)):
        which = slice(prompts.start, prompts.stop)
        mine = [(keys[which], values[which]) for keys, values in pairs]
        held = once if len(prompts) == len(lengths) else [prompt.of_prompts(which) for prompt in once]
        steps = program.steps(step, params, mine, held, lengths[which], len(part), room, drawn=drawn)
        made.append((steps, [p * num_generations + g for p in prompts for g in part], lane_stream(number)))
    return made


def lane_stream(lane: int) -> Stream:
    """The stream of the lane of this number: the first one's is the default of the thread that asks."""
    return _further_stream(lane) if lane else mx.default_stream(mx.default_device())


@functools.cache  # MLX never gives a stream back
def _further_stream(lane: int) -> mx.ThreadLocalStream:
    return mx.new_thread_local_stream(mx.cpu)


def _cut(number: int, parts: int) -> list[range]:
    """range(number) in so many parts of about one length."""
    ends = [number * part // parts for part in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]
