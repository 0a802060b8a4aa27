"""`KernelSteps` on any machine: a kernel in NumPy, which writes through, stands in for CUDA's."""

from functools import cache, partial
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.backends import substituted
from grpo_fn.backends.cuda.decoding import kernel_steps
from grpo_fn.backends.cuda.decoding.attention_source import warps_of_row
from grpo_fn.backends.cuda.decoding.kernel_steps import KernelSteps
from grpo_fn.backends.cuda.decoding.prefix_attention import append_and_attend
from grpo_fn.rollout import Entry, RowQueue
from grpo_fn.rollout.begin import prefilled
from grpo_fn.rollout.decode_step import CacheSteps, result_of
from grpo_fn.rollout.row_queue import Start
from tests.support.generating import EOS, EQUAL, RAGGED, assert_same, assert_teacher_forced, roll
from tests.support.queueing import LIMITS, MANY, drive, entry
from tests.support.tiny_policies import tiny_policy, token_rows


def attention(*given: Any) -> np.ndarray:
    """The definition, row by row and head by head, float64 [B,H,1,D], of `append_and_attend`'s arguments."""
    *arrays, prompt_of, lengths, used, scale = given
    q, new_k, new_v, prompt_k, prompt_v, own_k, own_v = (
        np.array(a.astype(mx.float32), np.float64) for a in arrays
    )
    out = np.zeros(q.shape)
    repeats = q.shape[1] // own_k.shape[1]
    for row, p in enumerate(prompt_of):
        for head in range(q.shape[1]):
            h = head // repeats
            k, v = (
                np.concatenate([prompt[p, h, : lengths[p]], own[row, h, : used[row]], new[row, h]])
                for prompt, own, new in ((prompt_k, own_k, new_k), (prompt_v, own_v, new_v))
            )
            scores = k @ q[row, head, 0] * scale
            weights = np.exp(scores - scores.max())
            out[row, head, 0] = weights / weights.sum() @ v
    return out


class InPlaceKernel:
    """Replaces `append_and_attend` and writes in place; notes (rows, room, most own tokens) per call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def __call__(self, *given: Any) -> mx.array:
        """As `append_and_attend`."""
        *arrays, prompt_of_b, lengths_p, own_length_b, scale = given
        _, new_keys, new_values, _, _, own_keys, own_values = arrays
        rows, _, room, _ = own_keys.shape
        used = own_length_b.tolist()
        assert prompt_of_b.shape == (rows,) == own_length_b.shape and 0 <= min(used) <= max(used) < room
        self.calls.append((rows, room, max(used)))
        found = attention(*arrays, prompt_of_b.tolist(), lengths_p.tolist(), used, scale)
        for buffer, new in ((own_keys, new_keys), (own_values, new_values)):
            held = np.array(buffer, copy=False)  # a view of the array's own memory
            assert held.flags.c_contiguous, "MLX would hand a kernel a copy of it"
            held[np.arange(rows), :, used] = np.array(new)[:, :, 0]
        return mx.array(found.astype(np.float32))


LAYERS = 2


@pytest.fixture
def kernel(monkeypatch):
    """The stand-in; steps are not compiled, and buffers begin with room for four tokens."""
    monkeypatch.setattr(kernel_steps, "FIRST_ROOM", 4)
    monkeypatch.setattr(kernel_steps, "_ROOM_STEP", 3)
    monkeypatch.setattr("grpo_fn.policy.policy.compiled", partial(g.compiled, enabled=False))
    stand_in = InPlaceKernel()
    monkeypatch.setattr(kernel_steps, "append_and_attend", stand_in)
    untried = kernel_steps.PROGRAM._replace(takes=lambda module, caches: False)
    with substituted(kernel_steps=untried):
        yield stand_in


def with_kernel(name="llama"):
    """A tiny policy that takes the kernel."""
    return attrs.evolve(tiny_policy(name), supports_compiled_decode=True)


def both_steps(policy, prompts, generations, *, room):
    """The kernel's steps after these prompts, and those of `PrefixCache`."""
    sampling = g.Sampling(num_generations=generations, max_new_tokens=room)
    policies = policy, attrs.evolve(policy, supports_compiled_decode=False)
    rows = list(range(generations))
    starts = [
        Start(Entry(rows=(), prompt=prompt, keys=(), sampling=sampling), rows, None, 0) for prompt in prompts
    ]
    ours, theirs = (result_of(prefilled(each, policy.module, starts, True))[1] for each in policies)
    assert isinstance(ours, KernelSteps) and isinstance(theirs, CacheSteps)
    return ours, theirs


def assert_step_for_step(ours, theirs, tokens_bt):
    """Fed the same tokens, both give the same logits."""
    for n in range(tokens_bt.shape[1]):
        difference = mx.abs(ours(tokens_bt[:, n]) - theirs(tokens_bt[:, n])).max().item()
        assert difference < 1e-4, f"step {n}"


SEVEN = {"generations": 7, "limit": 20, "eos_ids": EOS, "check_every": 1}


@cache
def of_copied_prompts(prompts):
    """Seven completions of each of these prompts as the model itself draws them, from copies."""
    policy = tiny_policy()
    copies = roll(policy, [list(prompt) for prompt in prompts], share_prefix=False, **SEVEN)
    assert_teacher_forced(policy, copies)
    return copies


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("options", [{}, {"pipelined": True}, {"max_batch": 7}, {"check_every": 3}], ids=str)
def test_it_draws_as_with_copied_prompts(prompts, options, kernel):
    """Tokens, ends and log-probs, with buffers that are outgrown."""
    policy = with_kernel()
    drawn = roll(policy, prompts, share_prefix=True, **SEVEN | options)
    assert {room for _, room, _ in kernel.calls} == {4, 8, 16, 21}
    assert_same(drawn, of_copied_prompts(tuple(map(tuple, prompts))))


@pytest.mark.parametrize("name", ["qwen3", "nanochat", "cohere"])
def test_other_architectures_draw_as_with_copied_prompts(name, kernel):
    """Norms of queries and keys, a head of keys for each query, scaled logits."""
    policy = with_kernel(name)
    options = {"generations": 4, "limit": 10, "eos_ids": EOS, "check_every": 1}
    drawn = roll(policy, share_prefix=True, **options)
    calls = len(kernel.calls)
    assert_same(drawn, roll(policy, share_prefix=False, **options))
    assert len(kernel.calls) == calls > 0, "copied prompts do without"


def test_buffers_grow_by_doubling_and_to_what_is_needed(kernel):
    """Four, eight, sixteen, then the length asked for, rounded up; past it, just enough. Nothing is lost."""
    ours, theirs = both_steps(with_kernel(), RAGGED, 2, room=17)
    assert_step_for_step(ours, theirs, token_rows(6, 20))
    rooms = [4] * 4 + [8] * 4 + [16] * 8 + [18] * 2 + [21] * 2
    assert kernel.calls == [(6, room, n) for n, room in enumerate(rooms) for _ in range(LAYERS)]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("options", [{}, {"pipelined": True}, {"max_batch": 6}], ids=str)
def test_late_rows_take_free_places(group, options, kernel, monkeypatch):
    """They join the program's rows: places of rows that have ended first, then new ones, some at a time."""
    monkeypatch.setattr(kernel_steps, "_PLACES", 2)
    policy = with_kernel()
    queue = RowQueue(policy)

    def add(number):
        sampling = g.Sampling(max_new_tokens=LIMITS[number])
        queue.add(entry(number, MANY[number], group=group, sampling=sampling))

    add(0)
    late = [(2 * n, lambda n=n: add(n)) for n in range(1, 8)]
    columns = drive(policy, queue, late, share_prefix=True, check_every=2, **options)
    done = queue.take()
    for n, prompt in enumerate(MANY):
        alone = roll(tiny_policy(), [prompt], prompt_numbers=[n], generations=group, limit=LIMITS[n])
        for i, (tokens, logp) in enumerate(zip(alone.completions(), alone.logp_bt.tolist(), strict=True)):
            row = done[n * group + i]
            assert row.tokens == tokens, f"prompt {n}"
            assert np.abs(np.array(row.logp) - logp).max() < 1e-4
    widths = [len(column.rows) for column in columns]
    assert 2 * group <= max(widths) and len(set(widths)) < 7, "few programs"
    assert {rows for rows, *_ in kernel.calls} == set(widths), "one batch"


@pytest.mark.parametrize("group", [1, 3])
def test_any_number_of_requests_is_decoded_by_few_programs(group, kernel):
    """Rows of nobody fill them up to one of few sizes, their prompts too; each has what it has alone."""
    policy = with_kernel()
    sizes = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}
    prompts = set()
    shapes = []

    def watched(step, params, caches, lengths, groups, room):
        prompts.add(len(lengths))
        return KernelSteps(step, params, caches, lengths, groups, room)

    program = kernel_steps.PROGRAM._replace(steps=watched, takes=lambda module, caches: False)
    with substituted(kernel_steps=program):
        for count in range(1, 9):
            queue = RowQueue(policy)
            sampling = g.Sampling(max_new_tokens=5)
            for n in range(count):
                queue.add(entry(n, MANY[n], group=group, sampling=sampling))
            columns = drive(policy, queue, share_prefix=True, few_sizes=True)
            shapes += [len(column.rows) for column in columns]
            done = queue.take()
            assert sorted(done) == list(range(count * group))
            for n in range(count):
                alone = roll(tiny_policy(), [MANY[n]], prompt_numbers=[n], generations=group, limit=5)
                rows = [done[n * group + i].tokens for i in range(group)]
                assert rows == alone.completions(), f"prompt {n} of {count}"
    assert {*shapes} <= sizes and prompts <= sizes
    assert len({*shapes}) < 8 and {rows for rows, *_ in kernel.calls} == {*shapes}


ON_CUDA = mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available()
PROMPT_OF, LENGTHS, OWN = [0, 0, 0, 1, 1, 1], [37, 20], [5, 0, 3, 5, 12, 1]
needs_cuda = pytest.mark.skipif(not ON_CUDA, reason="needs CUDA")


@pytest.mark.parametrize("items, wanted", [(6, 8), (256, 8), (640, 2), (1280, 1), (9999, 1)])
def test_warps_of_a_row(items, wanted):
    """As many as run at a time, 16 on each of 132 multiprocessors; one where there are more rows."""
    assert warps_of_row(items, 132 * 16) == wanted


@needs_cuda
@pytest.mark.parametrize(
    "width, heads, shared", [(64, 4, 2), (128, 2, 2), (128, 8, 1), (64, 7, 1), (32, 4, 4)]
)
@pytest.mark.parametrize(
    "dtype, tolerance", [(mx.float32, 1e-5), (mx.float16, 3e-3), (mx.bfloat16, 2e-2)], ids=str
)
def test_it_is_attention_and_keeps_the_new_token(dtype, tolerance, width, heads, shared):
    """Prompts of two lengths, grouped heads, spare room in the rows' buffers, three dtypes."""
    new, prompt, own = (6, shared, 1, width), (2, shared, 37, width), (6, shared, 16, width)
    shapes = [(6, heads, 1, width), new, new, prompt, prompt, own, own]
    arrays = [mx.random.normal(s, key=mx.random.key(n)).astype(dtype) for n, s in enumerate(shapes)]
    mx.eval(arrays)
    wanted = attention(*arrays, PROMPT_OF, LENGTHS, OWN, width**-0.5)
    kept = [np.array(a.astype(mx.float32)) for a in arrays]
    index, lengths = mx.array(PROMPT_OF, mx.int32), mx.array(LENGTHS, mx.int32)
    found = append_and_attend(*arrays, index, lengths, mx.array(OWN, mx.int32), width**-0.5)
    assert found.dtype == dtype
    assert np.abs(np.array(found.astype(mx.float32)) - wanted).max() < tolerance
    for before, appended, after in zip(kept[5:], kept[1:3], arrays[5:], strict=True):
        before[np.arange(6), :, OWN] = appended[:, :, 0]
        assert np.array_equal(before, np.array(after.astype(mx.float32)))


@needs_cuda
@pytest.mark.parametrize("name", ["llama", "qwen3", "nanochat"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_decoding_with_it_draws_as_with_copied_prompts(name, pipelined, monkeypatch):
    """Buffers that are outgrown twice, rows that leave; and no new program for the same shapes."""
    monkeypatch.setattr(kernel_steps, "FIRST_ROOM", 16)
    monkeypatch.setattr(kernel_steps, "_ROOM_STEP", 8)
    policy = tiny_policy(name, hidden_size=64, head_dim=32)
    assert policy.supports_compiled_decode

    def draw(seed, **options):
        return g.generate(
            policy,
            policy.params,
            [[5, 9, 11, 3], [7, 2], [4] * 9],
            g.Sampling(num_generations=4, max_new_tokens=50, eos_ids=[1, 2, 3], temperature=0.7),
            key=mx.random.key(seed),
            decoding=g.Decoding(check_every=2, **options),
        )

    with_kernel, with_copies = draw(0, pipelined=pipelined), draw(0, share_prefix=False)
    assert with_kernel.completions() == with_copies.completions()
    assert np.abs(np.array(with_kernel.logp_bt) - np.array(with_copies.logp_bt)).max() < 5e-3  # TF32 products
    traces = policy.compiled_programs["kernel_steps"].traces
    assert traces
    draw(0, pipelined=pipelined)
    assert policy.compiled_programs["kernel_steps"].traces == traces


@pytest.mark.parametrize(
    "heads, shared, width, dtypes, message",
    [
        (4, 2, 48, ("float32", "float32"), "heads of 48: expected 32, 64 or 128"),
        (9, 1, 64, ("float32", "float32"), "9 query heads share keys"),
        (2, 2, 64, ("float16", "float32"), "dtypes .*: expected one"),
    ],
)
def test_what_it_is_not_made_for_is_refused(heads, shared, width, dtypes, message):
    """Widths, groups and dtypes: before anything is launched."""
    one, other = (getattr(mx, name) for name in dtypes)
    new, own = mx.zeros((2, shared, 1, width), other), mx.zeros((2, shared, 8, width), other)
    with pytest.raises(ValueError, match=message):
        append_and_attend(
            mx.zeros((2, heads, 1, width), one), new, new, own, own, own, own, *[mx.array(0)] * 3, 1.0
        )
