"""`GridSteps` and lanes on a CPU: step for step what copies of the prompts give, and the same rollouts."""

import functools
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention

import grpo_fn as g
from grpo_fn.backends.cpu import blocked_weights as blocking
from grpo_fn.backends.cpu import grid_cache, grid_steps
from grpo_fn.backends.cpu.grid_steps import GridSteps
from grpo_fn.rollout.decode_step import CacheSteps, shared_steps
from grpo_fn.rollout.lanes import divided, grid_lanes
from grpo_fn.rollout.prefill import prefill_once
from tests.support.generating import EOS, EQUAL, RAGGED, assert_same, assert_teacher_forced, roll
from tests.support.tiny_policies import tiny_module, tiny_policy, token_rows, worst_difference

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="wants a CPU")

FOUR = [*RAGGED, [4, 4, 4]]


@pytest.fixture(autouse=True)
def _small(monkeypatch, request):
    """Room for four own tokens at a time, so that it is outgrown; prompts apart, or in each row."""
    monkeypatch.setattr(grid_steps, "ROOM", 4)
    monkeypatch.setattr(grid_cache, "ROOM", 4)
    monkeypatch.setattr(grid_cache, "SHORT", getattr(request, "param", 0))


apart_and_in_each_row = pytest.mark.parametrize("_small", [0, 64], ids=["shared", "short"], indirect=True)


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
            ours.keep_rows(kept)
            theirs.keep_rows(kept)
            tokens_bt = tokens_bt[mx.array(kept)]
        difference = mx.abs(ours(tokens_bt[:, n]) - theirs(tokens_bt[:, n])).max().item()
        assert difference < 1e-4, f"step {n}"


@apart_and_in_each_row
@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "nanochat", "cohere"])
def test_steps_are_those_of_a_cache_that_grows(name, prompts):
    """Past the room that was asked for, too."""
    ours, theirs = both_steps(tiny_policy(name), prompts, 2, room=9)
    assert_step_for_step(ours, theirs, token_rows(2 * len(prompts), 15))


@apart_and_in_each_row
@pytest.mark.parametrize("scale", [0.07, 0.9])
@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_attention_has_the_scale_of_the_model(scale, prompts):
    """Some models (gemma, granite) have another one than D^−½: in lanes, over one prompt, over copies."""
    module = tiny_module()
    for layer in module.layers:
        layer.self_attn.scale = scale
    policy = g.Policy.from_module(module)
    assert_step_for_step(*both_steps(policy, prompts, 2, room=9), token_rows(2 * len(prompts), 6))
    options = {"generations": 4, "limit": 6}
    copies = roll(policy, prompts, share_prefix=False, **options)
    assert_same(copies, roll(policy, prompts, lanes=2, **options))
    assert_same(copies, roll(policy, prompts, share_prefix=True, **options))
    assert_teacher_forced(policy, copies)
    usual = roll(tiny_policy(), prompts, share_prefix=False, **options)
    assert not mx.array_equal(usual.logp_bt, copies.logp_bt), "the scale matters"


@apart_and_in_each_row
@pytest.mark.parametrize("drawn", [3, 4, 9])
def test_steps_may_begin_as_if_zeros_had_been_fed(drawn):
    ours, theirs = both_steps(tiny_policy(), RAGGED, 2, room=16, drawn=drawn)
    assert_step_for_step(ours, theirs, token_rows(6, 5))


@apart_and_in_each_row
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
    assert ours.rows_to_keep([bool(flag) for flag in alive]) == kept


def test_each_shape_is_traced_once_in_each_lane():
    """A second rollout of the same shapes traces nothing, nor do prompts that are longer below the cut."""
    policy = tiny_policy()
    options = {"generations": 4, "limit": 8, "lanes": 2}
    roll(policy, EQUAL, **options)
    traces = policy.compiled_programs["grid_steps"].traces
    assert traces == 2 * 2, "two lanes, two rooms"
    roll(policy, EQUAL, **options, seed=1)
    roll(policy, [[*prompt, 8] for prompt in EQUAL], **options)
    assert policy.compiled_programs["grid_steps"].traces == traces


@apart_and_in_each_row
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


SEVEN = {"generations": 7, "limit": 13, "eos_ids": EOS}


@functools.cache
def of_copied_prompts(prompts):
    """Seven completions of each of these prompts as the model itself draws them, from copies."""
    policy = tiny_policy()
    copies = roll(policy, [list(prompt) for prompt in prompts], share_prefix=False, **SEVEN)
    assert_teacher_forced(policy, copies)
    assert len(set(copies.lengths_b.tolist())) > 3, "rows leave at different steps"
    return copies


@apart_and_in_each_row
@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        (EQUAL, {}),
        ([[5, 6, 7]], {}),
        (RAGGED, {"pipelined": True}),
        (RAGGED, {"compact": False}),
        (RAGGED, {"max_batch": 7}),
        (EQUAL, {"max_batch": 7}),
        (RAGGED, {"check_every": 3}),
        (RAGGED, {"lanes": 3}),
        ([[5, 6, 7]], {"lanes": 3}),
    ],
    ids=str,
)
def test_lanes_draw_as_with_copied_prompts(prompts, options):
    """Tokens, ends and log-probs, with buffers that are outgrown and rows that leave."""
    policy = tiny_policy()
    drawn = roll(policy, prompts, **SEVEN, **{"check_every": 1, "lanes": 2} | options)
    assert policy.compiled_programs["grid_steps"].traces > 0
    assert_same(drawn, of_copied_prompts(tuple(map(tuple, prompts))))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "nanochat", "cohere"])
def test_other_architectures_draw_as_with_copied_prompts(name):
    policy = tiny_policy(name)
    options = {"generations": 4, "limit": 10, "eos_ids": EOS, "check_every": 1}
    drawn = roll(policy, lanes=2, **options)
    assert policy.compiled_programs["grid_steps"].traces > 0
    assert_same(drawn, roll(policy, share_prefix=False, **options))


def test_a_repetition_penalty_counts_in_each_lane():
    policy, sampler = tiny_policy(), g.Sampler(repetition_penalty=1.5)
    options = {"generations": 4, "limit": 10, "eos_ids": EOS, "check_every": 1, "sampler": sampler}
    assert_same(roll(policy, lanes=2, **options), roll(policy, share_prefix=False, **options))


def test_wide_heads_take_a_row_at_a_time():
    """Of 512 positions and 576 columns even one row is more than a BLAS keeps on a core."""
    keys, values = (mx.random.normal((1, 1, 512, 576), key=mx.random.key(n)) for n in (1, 2))
    queries = mx.random.normal((1, 1, 3, 2, 576), key=mx.random.key(3))
    prompts = grid_cache.SharedPrompts.of(keys, values)
    scores = prompts.scores(queries)
    assert worst_difference(scores, queries @ keys[:, :, None].swapaxes(-1, -2)) < 1e-3
    assert worst_difference(prompts.mixed(scores), scores @ values[:, :, None]) < 1e-4


@pytest.mark.parametrize("lanes", [1, 2])
def test_any_thread_may_generate(lanes):
    """Streams belong to a thread: the main one first, then two that come and go."""
    policy = tiny_policy()
    found = [roll(policy, EQUAL, lanes=lanes)]

    def work():
        found.append(roll(policy, EQUAL, lanes=lanes))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(found) == 3, "one failed"
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_lanes_that_share_all_prompts_hold_them_once(monkeypatch):
    """An odd number of prompts: each lane takes half of every prompt's completions."""
    monkeypatch.setattr(grid_cache, "SHORT", 0)
    policy = tiny_policy()
    held = {}
    for prompts in ([[5, 6, 7]] * 3, [[5, 6, 7]] * 4):
        _, caches = prefill_once(policy, policy.module, prompts)
        lanes = grid_lanes(policy, policy.module, caches, [3] * len(prompts), 4, 2, room=8)
        keys = {id(prompt.keys): prompt.keys.nbytes for steps, *_ in lanes for prompt in steps._prompts}
        held[len(prompts)] = sum(keys.values())
    assert held[3] * 4 == held[4] * 3 > 0


class _Late(llama.Attention):
    """Attention that favours late positions, with scores of its own as a mask."""

    peeks = False  # whether it looks into its cache as well

    def __call__(self, x, mask=None, cache=None):
        rows, length, _ = x.shape

        def heads(layer, number):
            return layer(x).reshape(rows, length, number, -1).swapaxes(1, 2)

        queries = heads(self.q_proj, self.n_heads)
        keys, values = (heads(layer, self.n_kv_heads) for layer in (self.k_proj, self.v_proj))
        if cache is not None:
            assert not self.peeks or cache.keys is None or cache.step
            keys, values = cache.update_and_fetch(keys, values)
        seen = keys.shape[2]
        back = mx.arange(seen) - mx.arange(seen - length, seen)[:, None]
        own = mx.where(back <= 0, 0.7 * back, -1e9)
        out = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=own)
        return self.o_proj(out.swapaxes(1, 2).reshape(rows, length, -1))


def test_a_mask_of_the_model_s_own_is_not_lost():
    """A cache that attends by itself would not see it: such a model copies its prompts."""
    module = tiny_module()
    for layer in module.layers:
        layer.self_attn.__class__ = _Late
    policy = g.Policy.from_module(module)
    assert not policy.shares_prefix and not policy.takes_lanes
    assert_teacher_forced(policy, roll(policy, EQUAL, lanes=2))


class _Twice(nn.Linear):
    """A layer that is an `nn.Linear` by descent alone."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def test_a_layer_with_a_call_of_its_own_keeps_it():
    module = tiny_module("llama-untied")
    module.lm_head.__class__ = _Twice
    policy = g.Policy.from_module(module)
    assert policy.takes_lanes
    assert_teacher_forced(policy, roll(policy, lanes=2))


def test_a_model_that_fails_in_another_way_is_asked_no_more():
    """A cache that it does not know has no `keys`: AttributeError, before anything is refused."""

    class Peeking(_Late):
        peeks = True

    module = tiny_module()
    for layer in module.layers:
        layer.self_attn.__class__ = Peeking
    policy = g.Policy.for_inference(module)
    assert not policy.shares_prefix and not policy.takes_lanes


@pytest.mark.parametrize("name", ["gemma3", "mamba", "deepseek"])
def test_what_cannot_share_a_prefix_decodes_in_one_lane(name):
    policy = tiny_policy(name)
    assert_same(roll(policy, lanes=2), roll(policy))
    assert "grid_steps" not in policy.compiled_programs


def test_large_weights_decode_in_one_lane(monkeypatch):
    monkeypatch.setattr(blocking, "MOST_BYTES", 10)
    policy = tiny_policy()
    assert not policy.takes_lanes
    assert_same(roll(policy, lanes=2), roll(policy))
    assert "grid_steps" not in policy.compiled_programs


@apart_and_in_each_row
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
