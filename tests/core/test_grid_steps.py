"""`GridSteps` and lanes on a CPU: step for step what copies of the prompts give, and the same rollouts."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn import blocking, grid_steps
from grpo_fn.decode_step import CacheSteps, shared_steps
from grpo_fn.grid_steps import GridSteps
from grpo_fn.lanes import divided, grid_lanes
from grpo_fn.prefill import prefill_once
from tests.generating import EOS, EQUAL, RAGGED, assert_same, assert_teacher_forced, roll
from tests.tiny_policies import tiny_policy, token_rows

FOUR = [*RAGGED, [4, 4, 4]]


@pytest.fixture(autouse=True, params=[0, 64], ids=["shared", "short"])
def _small(monkeypatch, request):
    """Room for four own tokens at a time, so that it is outgrown; prompts apart, and in each row."""
    monkeypatch.setattr(grid_steps, "ROOM", 4)
    monkeypatch.setattr(grid_steps, "SHORT", request.param)


def both_steps(policy, prompts, generations, **options):
    """Steps in a grid after these prompts, and those of `PrefixCache`."""
    made = []
    for lanes in (1, 0):
        _, caches = prefill_once(policy, policy.module, prompts)
        shared = policy, policy.module, caches, [len(prompt) for prompt in prompts], generations
        made.append(
            grid_lanes(*shared, lanes, **options)[0][0] if lanes else shared_steps(*shared, **options)
        )
    ours, theirs = made
    assert isinstance(ours, GridSteps) and isinstance(theirs, CacheSteps)
    return ours, theirs


def assert_step_for_step(ours, theirs, tokens_bt, keep=None):
    """Fed the same tokens, both give the same logits; before step n both keep the rows `keep[n]`."""
    for n in range(tokens_bt.shape[1]):
        kept = (keep or {}).get(n)
        if kept is not None:
            ours.keep(kept)
            theirs.keep(kept)
            tokens_bt = tokens_bt[mx.array(kept)]
        difference = mx.abs(ours(tokens_bt[:, n]) - theirs(tokens_bt[:, n])).max().item()
        assert difference < 1e-4, f"step {n}"


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "nanochat", "cohere"])
def test_steps_are_those_of_a_cache_that_grows(name, prompts):
    """Past the room that was asked for, too."""
    ours, theirs = both_steps(tiny_policy(name), prompts, 2, room=9)
    assert_step_for_step(ours, theirs, token_rows(2 * len(prompts), 20))


@pytest.mark.parametrize("drawn", [3, 4, 9])
def test_steps_may_begin_as_if_zeros_had_been_fed(drawn):
    ours, theirs = both_steps(tiny_policy(), RAGGED, 2, room=16, drawn=drawn)
    assert_step_for_step(ours, theirs, token_rows(6, 5))


@pytest.mark.parametrize("when", [1, 4, 6])
def test_rows_that_are_kept_go_on_as_they_were(when):
    """Half of each prompt's, then half of the prompts; before, at and after a growth."""
    ours, theirs = both_steps(tiny_policy(), FOUR, 4, room=12)
    first = [row for row in range(16) if row % 4 in (1, 3)]  # of each prompt two
    assert_step_for_step(ours, theirs, token_rows(16, 12), {when: first, 9: [2, 3, 6, 7]})


@pytest.mark.parametrize(
    ("alive", "kept"),
    [
        ([1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([1, 1, 1, 0, 0, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]),  # three of one prompt are no half
        ([1, 0, 0, 1, 0, 0, 0, 1], [0, 3, 4, 7]),  # two of each; the second prompt gets one that has ended
        ([0, 0, 0, 0, 0, 1, 1, 1], [4, 5, 6, 7]),
        ([0, 0, 0, 0, 0, 0, 1, 0], [6]),
    ],
)
def test_a_smaller_grid_holds_all_that_are_alive(alive, kept):
    ours, _ = both_steps(tiny_policy(), EQUAL, 4, room=4)
    assert ours.kept([bool(flag) for flag in alive]) == kept


def test_each_shape_is_traced_once_in_each_lane():
    """A second rollout of the same shapes traces nothing, nor do prompts that are longer below the cut."""
    policy = tiny_policy()
    options = {"generations": 4, "limit": 8, "lanes": 2}
    roll(policy, EQUAL, **options)
    traces = policy.grid_step.traces
    assert traces == 2 * 2, "two lanes, two rooms"
    roll(policy, EQUAL, **options, seed=1)
    roll(policy, [[*prompt, 8] for prompt in EQUAL], **options)
    assert policy.grid_step.traces == traces


def test_what_a_row_was_fed_is_written_in_place():
    """Steps within a room neither copy nor grow the buffers."""
    ours, _ = both_steps(tiny_policy(), EQUAL, 2, room=4)
    token_b = mx.zeros((4,), mx.int32)
    mx.eval(ours(token_b), ours._own)
    mx.synchronize()
    held = [_address(a) for pair in ours._own for a in pair]
    mx.eval(ours(token_b), ours._own)
    assert [_address(a) for pair in ours._own for a in pair] == held


def _address(array):
    return np.array(array, copy=False).__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("prompts", "generations", "lanes", "wanted"),
    [
        (4, 8, 2, [([0, 1], 8), ([2, 3], 8)]),
        (3, 8, 2, [([0, 1, 2], 4), ([0, 1, 2], 4)]),
        (1, 5, 2, [([0], 2), ([0], 3)]),
        (5, 1, 2, [([0, 1], 1), ([2, 3, 4], 1)]),
        (1, 1, 2, [([0], 1)]),
        (4, 8, 1, [([0, 1, 2, 3], 8)]),
    ],
)
def test_lanes_take_about_as_many_rows(prompts, generations, lanes, wanted):
    found = divided(prompts, generations, lanes)
    assert [(list(which), len(part)) for which, part in found] == wanted
    rows = [(p, n) for which, part in found for p in which for n in part]
    assert sorted(rows) == [(p, n) for p in range(prompts) for n in range(generations)]


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED, [[5, 6, 7]]], ids=["equal", "ragged", "one"])
@pytest.mark.parametrize(
    "options",
    [{}, {"pipelined": True}, {"compact": False}, {"max_batch": 7}, {"check_every": 3}, {"lanes": 3}],
    ids=str,
)
def test_lanes_draw_as_with_copied_prompts(prompts, options):
    """Tokens, ends and log-probs, with buffers that are outgrown and rows that leave."""
    policy = tiny_policy()
    options = {"generations": 7, "limit": 20, "eos_ids": EOS, "check_every": 1, "lanes": 2} | options
    drawn = roll(policy, prompts, **options)
    assert policy.grid_step.traces > 0
    assert_teacher_forced(policy, drawn)
    options.pop("lanes")
    assert_same(drawn, roll(policy, prompts, share_prefix=False, **options))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "nanochat", "cohere"])
def test_other_architectures_draw_as_with_copied_prompts(name):
    policy = tiny_policy(name)
    options = {"generations": 4, "limit": 10, "eos_ids": EOS, "check_every": 1}
    drawn = roll(policy, lanes=2, **options)
    assert policy.grid_step.traces > 0
    assert_same(drawn, roll(policy, share_prefix=False, **options))


def test_a_repetition_penalty_counts_in_each_lane():
    policy, sampler = tiny_policy(), g.Sampler(repetition_penalty=1.5)
    options = {"generations": 4, "limit": 10, "eos_ids": EOS, "check_every": 1, "sampler": sampler}
    assert_same(roll(policy, lanes=2, **options), roll(policy, share_prefix=False, **options))


@pytest.mark.parametrize("name", ["gemma3", "mamba"])
def test_what_cannot_share_a_prefix_decodes_in_one_lane(name):
    policy = tiny_policy(name)
    assert_same(roll(policy, lanes=2), roll(policy))
    assert policy.grid_step.traces == 0


def test_large_weights_decode_in_one_lane(monkeypatch):
    monkeypatch.setattr(blocking, "MOST_BYTES", 10)
    policy = tiny_policy()
    assert not policy.takes_lanes
    assert_same(roll(policy, lanes=2), roll(policy))
    assert policy.grid_step.traces == 0


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        (lambda module: module.set_dtype(mx.bfloat16), 0.1),
        (lambda module: nn.quantize(module, 32, 8, class_predicate=lambda _, layer: fits(layer)), 1e-4),
    ],
    ids=["bfloat16", "8 bits"],
)
def test_short_numbers_and_packed_weights_decode_in_lanes(change, bound):
    """They are in no blocks, but their products are one core's anyway."""
    module = tiny_policy("qwen2").module
    change(module)
    policy = g.Policy.for_inference(module)
    assert policy.takes_lanes
    ours, theirs = both_steps(policy, RAGGED, 2, room=9)
    for n in range(6):
        token_b = mx.full((6,), n, mx.int32)
        difference = mx.abs((ours(token_b) - theirs(token_b)).astype(mx.float32)).max().item()
        assert difference < bound


def fits(layer):
    return isinstance(layer, nn.Linear) and layer.weight.shape[-1] % 32 == 0
