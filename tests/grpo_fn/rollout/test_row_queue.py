"""Rows that arrive while others decode join, leave and continue, and sample the same tokens as alone."""

from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.checks import TooLong
from grpo_fn.policy.caches import prefix_cache
from grpo_fn.rollout import RowQueue, decode_queue, rollout_of
from tests.support.generating import EOS, EQUAL, RAGGED, assert_same, assert_teacher_forced, roll
from tests.support.queueing import LIMITS, MANY, assert_alone, drive, entry
from tests.support.tiny_policies import VOCAB, tiny_policy


@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mamba"])
@pytest.mark.parametrize("options", [{}, {"max_batch": 4, "check_every": 3}], ids=["", "parts"])
def test_entries_that_wait_together_are_a_rollout_bit_for_bit(name, prompts, options):
    """Rows present from the start get every number of `generate`."""
    policy, queue = tiny_policy(name), RowQueue(tiny_policy(name))
    sampling = g.Sampling(max_new_tokens=12, eos_ids=EOS, with_entropy=True)
    for number, prompt in enumerate(prompts):
        queue.add(entry(number, prompt, group=3, sampling=sampling))
    assert queue.busy
    drive(policy, queue, **options)
    done = queue.take()
    assert {row.prompt_computed for row in done.values()} == set(map(len, prompts))
    got = rollout_of(prompts, 3, [done[row] for row in range(len(done))])
    want = roll(policy, prompts, sampling=sampling, **options)
    for field in ("tokens_bt", "lengths_b", "logp_bt", "finished_b", "entropy_bt"):
        assert mx.array_equal(getattr(got, field), getattr(want, field)).item(), field
    assert queue.take() == {}


@pytest.mark.parametrize(
    ("name", "joins"),
    [
        *[(name, True) for name in ("llama", "qwen2", "phi", "smollm3", "deepseek")],
        *[(name, False) for name in ("gemma2", "gemma3", "mamba")],
    ],
)
@pytest.mark.parametrize("options", [{}, {"share_prefix": False}, {"check_every": 1}], ids=str)
def test_late_rows_join_and_draw_what_they_draw_alone(name, joins, options):
    """One prompt after another, each with its own limit, in one batch if caches can be joined."""
    policy = tiny_policy(name)
    queue = RowQueue(policy)
    samplings = [g.Sampling(max_new_tokens=limit) for limit in LIMITS]
    late = [(2 * n, lambda n=n: queue.add(entry(n, MANY[n], sampling=samplings[n]))) for n in range(1, 8)]
    queue.add(entry(0, MANY[0], sampling=samplings[0]))
    columns = drive(policy, queue, late, **{"check_every": 2, **options})
    assert (max(len(column.rows) for column in columns) > 3) is joins
    done = queue.take()
    for n, prompt in enumerate(MANY):
        assert_alone(policy, done[n], n, prompt, limit=LIMITS[n])


def test_learned_positions_are_not_exceeded():
    """Rows of such a model join no others, and those that begin together have one limit."""
    policy, fed = tiny_policy(), []
    policy = attrs.evolve(policy, positions=40)
    queue = RowQueue(policy)
    for n, limit in enumerate([40, 30, 30]):
        queue.add(entry(n, [n + 1], sampling=g.Sampling(max_new_tokens=limit)))
    late = [(9, lambda: queue.add(entry(3, [5], sampling=g.Sampling(max_new_tokens=30))))]
    for column in drive(policy, queue, late, check_every=4):
        fed.append(column.rows)
    assert {rows: fed.count(rows) for rows in set(fed)} == {(0,): 40, (1, 2): 30, (3,): 30}


@pytest.mark.parametrize("options", [{}, {"share_prefix": False}], ids=str)
def test_groups_join_groups(options):
    """Late groups of several sizes, with shared and copied prompts; unused columns leave the caches."""
    policy, widths = tiny_policy(), []
    queue, want = RowQueue(policy), {}

    def add(number, prompt, size, limit):
        first, sampling = 10 * number, g.Sampling(max_new_tokens=limit)
        queue.add(entry(number, prompt, group=size, first=first, sampling=sampling))
        alone = roll(policy, [prompt], generations=size, limit=limit, prompt_numbers=[number])
        want.update(enumerate(alone.completions(), first))

    add(0, RAGGED[0], 3, 9)
    late = [(4 * n, lambda n=n: add(n, RAGGED[n % 3], 1 + n % 4, 12 + n % 5)) for n in range(1, 16)]
    original = prefix_cache.PrefixCache.update_and_fetch

    def watched(self, keys, values):
        found = original(self, keys, values)
        widths.append(found[0].shape[2])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache.PrefixCache, "update_and_fetch", watched)
        drive(policy, queue, late, check_every=2, **options)
    assert {row: ended.tokens for row, ended in queue.take().items()} == want
    assert max(widths, default=0) < 35, "columns of rows that have left"


def test_a_bound_of_rows_holds_for_late_ones():
    """They wait until others end, in their order, a large group included."""
    policy, queue = tiny_policy(), RowQueue(tiny_policy())
    queue.add(entry(0, EQUAL[0], group=2, sampling=g.Sampling(max_new_tokens=8)))
    sampling = g.Sampling(max_new_tokens=5)

    def add():
        for n, size in enumerate((1, 1, 4, 1), 1):
            queue.add(entry(n, EQUAL[1], group=size, first=10 * n, sampling=sampling))

    columns = drive(policy, queue, [(1, add)], max_batch=3, check_every=1)
    order = []
    for column in columns:
        order += [row for row in column.rows if row not in order]
        assert len(column.rows) <= (4 if 30 in column.rows else 3)
    assert order == [0, 1, 10, 20, 30, 31, 32, 33, 40]


def test_many_that_wait_join_before_the_next_check():
    """An eighth of the decoding rows joins at once; fewer wait for the check."""
    policy, queue = tiny_policy(), RowQueue(tiny_policy())
    sampling = g.Sampling(max_new_tokens=20)
    queue.add(entry(0, EQUAL[0], group=16, sampling=sampling))

    def add(*rows):
        for row in rows:
            queue.add(entry(row, EQUAL[1], sampling=sampling))

    columns = drive(policy, queue, [(2, lambda: add(16)), (11, lambda: add(17, 18, 19))], check_every=8)
    assert [len(column.rows) for column in columns[:13]] == [16] * 8 + [17] * 3 + [20] * 2


def test_different_distributions_decode_side_by_side():
    """Temperature, truncation, penalty, entropy, ends and limits differ by row."""
    policy, queue = tiny_policy(), RowQueue(tiny_policy())
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5, "with_entropy": True},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.5, "limit": 20},
        {"eos_ids": ()},
    ]
    samplings = []
    for each in options:
        limit = each.get("limit", 12)
        rest = {name: value for name, value in each.items() if name != "limit"}
        samplings.append(g.Sampling(max_new_tokens=limit, **{"eos_ids": EOS, **rest}))
    late = [(n, lambda n=n: queue.add(entry(n, MANY[n], sampling=samplings[n]))) for n in range(1, 6)]
    queue.add(entry(0, MANY[0], sampling=samplings[0]))
    drive(policy, queue, late, check_every=2)
    done = queue.take()
    for n, each in enumerate(options):
        assert_alone(policy, done[n], n, MANY[n], **{"eos_ids": EOS, **each})
        assert (done[n].entropy is not None) == ("with_entropy" in each)


def test_cancelled_rows_leave_whether_they_wait_or_decode():
    """They are never returned, and the others' tokens stay the same."""
    policy, queue = tiny_policy(), RowQueue(tiny_policy())
    sampling = g.Sampling(max_new_tokens=30)
    for n in range(3):
        queue.add(entry(n, RAGGED[n], group=2, sampling=sampling))
    queue.cancel([4])

    def cancel():
        assert len(queue.so_far(0)[0]) == 8 and len(queue.so_far(0)[1]) == 8
        queue.add(entry(3, [5], group=2, sampling=sampling))
        queue.cancel([1, 2, 3, 6, 7])

    columns = drive(policy, queue, [(9, cancel)], check_every=4)
    assert 4 not in columns[0].rows and columns[-1].rows == (0, 5)
    done = queue.take()
    assert sorted(done) == [0, 5]
    want = roll(policy, RAGGED, generations=2, limit=30).completions()
    assert [done[0].tokens, done[5].tokens] == [want[0], want[5]]
    queue.add(entry(0, RAGGED[0], sampling=sampling))
    queue.cancel([0])
    assert not queue.busy and list(decode_queue(policy, policy.params, queue)) == []


@pytest.mark.parametrize("options", [{}, {"temperature": 0, "repetition_penalty": 1.4}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
def test_a_kept_row_is_continued_as_if_it_had_not_ended(name, options):
    """Its tokens are not computed again, and its random numbers continue."""
    policy, queue = tiny_policy(name), RowQueue(tiny_policy(name))
    prompt, sampling = RAGGED[0], g.Sampling(max_new_tokens=10, **options)
    want = roll(policy, [prompt], generations=1, limit=10, **options).completions()[0]
    for n, (first, last) in enumerate([(0, 4), (4, 5), (5, 10)]):
        limited = attrs.evolve(sampling, max_new_tokens=last - first)
        known = {"drawn": first, "keep": True, "continues": n - 1 if n else None}
        queue.add(entry(0, [*prompt, *want[:first]], first=n, sampling=limited, **known))
        drive(policy, queue)
        (done,) = queue.take().values()
        assert done.tokens == want[first:last]
        assert done.prompt_computed == (1 if n else len(prompt))


@pytest.mark.parametrize(("name", "trims"), [("llama", True), ("gemma2", True), ("mamba", False)])
def test_a_branch_reuses_the_longest_common_beginning(name, trims):
    """If caches cannot be cut, or after `cancel`, all is computed again; tokens are equal."""
    policy, queue = tiny_policy(name), RowQueue(tiny_policy(name))
    sampling = g.Sampling(max_new_tokens=6)
    for row in range(3):
        queue.add(entry(0, RAGGED[0], first=row, sampling=sampling, keep=True))
    drive(policy, queue)
    first = queue.take()[0].tokens
    branch = [*RAGGED[0], *first[:2], (first[2] + 1) % VOCAB, 3]

    def add(row, continues, **options):
        rows = (20, 21) if row == 20 else (row,)
        added = entry(0, branch, sampling=sampling, continues=continues, **options)
        queue.add(attrs.evolve(added, rows=rows, keys=added.keys * len(rows)))

    add(10, 0)
    drive(policy, queue, [(2, lambda: add(20, 1, keep=True)), (3, lambda: add(11, 1))], check_every=1)
    queue.cancel([2])
    add(12, 2)
    drive(policy, queue)
    done = queue.take()
    want = roll(policy, [branch], generations=1, limit=6)
    computed = {10: 2, 20: 2, 21: 2} if trims else {}
    assert sorted(done) == [10, 11, 12, 20, 21]
    for row, ended in done.items():
        assert ended.tokens == want.completions()[0], row
        assert ended.prompt_computed == computed.get(row, len(branch))
        assert np.abs(np.array(ended.logp) - np.array(want.logp_bt[0])).max() < 1e-4


def test_what_does_not_fit_is_refused():
    """Before it is queued."""
    policy = tiny_policy()
    queue = RowQueue(policy)
    usual = entry(0, [1, 2])
    for change, message in [
        ({"prompt": []}, "no empty one"),
        ({"prompt": [VOCAB]}, f"token id {VOCAB}"),
        ({"keys": ()}, "a key for each row"),
        ({"rows": ()}, "a key for each row"),
        ({"rows": (1, 1), "keys": ((0, 0), (0, 1))}, "new numbers"),
        ({"sampling": g.Sampling(stop=["."])}, "a function that finds"),
    ]:
        with pytest.raises(ValueError, match=message):
            queue.add(attrs.evolve(usual, **change))
    with pytest.raises(TooLong):
        RowQueue(attrs.evolve(policy, positions=12)).add(usual)
    assert not queue.busy
    queue.add(usual)
    with pytest.raises(ValueError, match=r"found \[0\] in use"):
        queue.add(usual)


def test_rows_of_a_rollout_keep_their_meaning():
    """`rollout_of` pads the queue's rows, one for each completion."""
    policy, queue = tiny_policy(), RowQueue(tiny_policy())
    for n, prompt in enumerate(RAGGED):
        queue.add(entry(n, prompt, group=2))
    drive(policy, queue)
    done = queue.take()
    rollout = rollout_of(RAGGED, 2, [done[row] for row in range(6)], vocabulary=VOCAB)
    assert_teacher_forced(policy, rollout)
    assert_same(rollout, roll(policy, generations=2, eos_ids=EOS))
    empty = rollout_of([], 2, [])
    assert empty.tokens_bt.shape == (0, 1) and empty.lengths_b.shape == (0,)
