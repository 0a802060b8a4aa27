"""From rollout to learner: layout, inactive rows, minibatches and micro-batches keep rows and counts."""

from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grpo_fn as g
from grpo_fn.compile import round_up
from grpo_fn.learner import deal, halve_batch, pieces_of_rank, take_rows
from grpo_fn.learner.batch_rows import AXES
from tests.support.tiny_policies import tiny_advantages, tiny_rollout

GRPO = g.LossSpec()
prompt_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def make(prompts=(4, 2), generations=3, width=7, *, seed=0, zeros=False, holes=False):
    """A batch of a random rollout; with `holes`, some counted tokens are masked out and other columns set."""
    rollout = tiny_rollout(prompts, generations, width, seed=seed)
    batch = g.make_batch(rollout, tiny_advantages(rollout, seed=seed, zeros=zeros))
    if not holes:
        return batch
    rng = np.random.default_rng(seed + 1)
    shape = batch.mask_bt.shape
    mask_bt = batch.mask_bt & (mx.array(rng.random(shape)) < 0.6)
    return attrs.evolve(
        batch,
        mask_bt=mask_bt,
        num_tokens=mask_bt.sum().astype(mx.float32),
        old_logp_bt=mx.array(rng.normal(size=shape), mx.float32),
        ref_logp_bt=mx.array(rng.normal(size=shape), mx.float32),
        keep_bt=mx.array(rng.random(shape)) < 0.5,
    )


def rows_of(batch):
    """Prompt, completion, mask and values of each row's counted tokens, sorted."""
    columns = [batch.targets_bt, batch.rollout_logp_bt, batch.old_logp_bt, batch.ref_logp_bt, batch.keep_bt]
    columns: Any = [None if column is None else np.array(column) for column in columns]
    mask, tokens = np.array(batch.mask_bt), np.array(batch.tokens_bl)
    lengths, advantages = np.array(batch.prompt_lengths_b), np.array(batch.advantages_b)
    index = None if batch.prompt_index_b is None else np.array(batch.prompt_index_b)
    out = []
    for row in range(mask.shape[0]):
        counted = np.flatnonzero(mask[row])
        if not len(counted):
            continue
        end = counted[-1] + 1
        place = row if index is None else index[row]
        prompt = tokens[place, : lengths[place]].tolist()
        completion = columns[0][row, :end].tolist()
        if index is None:
            assert tokens[row, lengths[row] : lengths[row] + end].tolist() == completion
        values = [None if c is None else c[row][counted].tolist() for c in columns[1:]]
        out.append((prompt, completion, counted.tolist(), float(advantages[row]), values))
    return sorted(out, key=repr)


@given(
    prompts=prompt_lengths, generations=st.integers(1, 4), width=st.integers(1, 8), seed=st.integers(0, 999)
)
def test_a_row_is_prompt_completion_padding(prompts, generations, width, seed):
    """Row p·G+g holds prompt p, completion p·G+g and zeros; the mask counts each completion's tokens."""
    rollout = tiny_rollout(prompts, generations, width, seed=seed)
    batch = g.make_batch(rollout, tiny_advantages(rollout, seed=seed))
    lengths = np.array(rollout.lengths_b)
    for row, completion in enumerate(rollout.completions()):
        prompt = list(rollout.prompts[row // generations])
        padding = [0] * (max(prompts) + width - len(prompt) - len(completion))
        assert batch.tokens_bl[row].tolist() == prompt + completion + padding
        assert batch.prompt_lengths_b[row].item() == len(prompt)
        assert batch.mask_bt[row].tolist() == [t < lengths[row] for t in range(width)]
    assert batch.advantages_b.tolist() == tiny_advantages(rollout, seed=seed).reshape(-1).tolist()
    assert batch.num_sequences.item() == len(lengths) and batch.num_tokens.item() == lengths.sum()
    assert batch.old_logp_bt is None and batch.ref_logp_bt is None and batch.keep_bt is None
    assert bool((batch.rollout_logp_bt == rollout.logp_bt).all())


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.99])
def test_truncated_completions_take_no_place_among_the_most_uncertain(quantile):
    """The quantile is one of the counted tokens, even if masked ones are more uncertain."""
    rollout = tiny_rollout(width=9, entropy=True)
    finished_b = mx.array([True, False, True, True, False, True])
    entropy_bt = rollout.entropy_bt + mx.where(finished_b, 0.0, 10.0)[:, None]
    rollout = attrs.evolve(rollout, finished_b=finished_b, entropy_bt=entropy_bt)
    batch = g.make_batch(
        rollout, tiny_advantages(rollout), mask_truncated=True, top_entropy_quantile=quantile
    )
    mask, entropy = np.array(batch.mask_bt), np.array(entropy_bt)
    assert not mask[[1, 4]].any()
    kept = max(1, round(quantile * mask.sum()))
    least = np.sort(entropy[mask])[-kept]
    assert (np.array(batch.keep_bt) == (mask & (entropy >= least))).all()
    assert np.array(batch.keep_bt).sum() == kept


def test_rows_without_a_gradient_are_left_out():
    """Rows with A = 0 or without a counted token are left out; the denominators count them."""
    batch = make(zeros=True)  # group 0 and row 3 have A = 0
    batch = attrs.evolve(batch, mask_bt=batch.mask_bt & (mx.arange(6)[:, None] != 5))
    kept = g.drop_inactive(batch, GRPO)
    assert kept.advantages_b.tolist() == batch.advantages_b[4:5].tolist()
    assert kept.tokens_bl.tolist() == batch.tokens_bl[4:5].tolist()
    empty = g.drop_inactive(attrs.evolve(batch, advantages_b=mx.zeros(6)), GRPO)
    assert empty.mask_bt.shape[0] == 0
    for part in (kept, *g.split_batch(empty, max_tokens=100)):
        assert part.num_sequences.item() == 6 and part.num_tokens.item() == batch.num_tokens.item()


@pytest.mark.parametrize("spec", [g.LossSpec(beta=0.1), g.LossSpec(entropy_coef=0.01)])
def test_rows_without_advantage_stay_where_another_term_acts(spec):
    """A KL term or an entropy bonus acts on A = 0 too; only wholly masked rows go."""
    batch = make(zeros=True)
    assert g.drop_inactive(batch, spec) is batch
    masked = attrs.evolve(batch, mask_bt=batch.mask_bt & (mx.arange(6)[:, None] != 0))
    assert g.drop_inactive(masked, spec).tokens_bl.tolist() == batch.tokens_bl[1:].tolist()


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6])
def test_minibatches_are_the_rows_in_order_with_counts_of_their_own(number):
    """Consecutive parts, equal to within a row; each has its own counts."""
    batch = make(holes=True)
    parts = g.minibatches(batch, number)
    assert len(parts) == number
    for name in ("tokens_bl", "mask_bt", "advantages_b", "old_logp_bt", "keep_bt", "rollout_logp_bt"):
        joined = mx.concatenate([getattr(part, name) for part in parts])
        assert joined.tolist() == getattr(batch, name).tolist()
    sizes = [part.mask_bt.shape[0] for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert [part.num_sequences.item() for part in parts] == sizes
    assert [part.num_tokens.item() for part in parts] == [part.mask_bt.sum().item() for part in parts]


split_options = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 120), "bucketed": st.booleans(), "share_prompts": st.booleans()}
)


@given(
    prompts=prompt_lengths,
    generations=st.integers(1, 5),
    width=st.integers(1, 20),
    seed=st.integers(0, 999),
    holes=st.booleans(),
    zeros=st.booleans(),
    options=split_options,
)
def test_a_split_conserves_rows_and_counts(prompts, generations, width, seed, holes, zeros, options):
    """Each counted token is in one part with its prefix and values; the counts add up."""
    batch = g.drop_inactive(make(prompts, generations, width, seed=seed, holes=holes, zeros=zeros), GRPO)
    parts = g.split_batch(batch, **options)
    assert sorted((row for part in parts for row in rows_of(part)), key=repr) == rows_of(batch)
    assert sum(part.num_sequences.item() for part in parts) == batch.num_sequences.item()
    assert sum(part.num_tokens.item() for part in parts) == batch.num_tokens.item()
    assert all(float(part.num_sequences) >= 1 for part in parts)


@given(
    prompts=prompt_lengths,
    generations=st.integers(1, 12),
    width=st.integers(1, 40),
    seed=st.integers(0, 999),
    share=st.booleans(),
    number=st.integers(1, 100_000),
)
def test_bucketed_sizes_are_rungs_of_the_ladder(prompts, generations, width, seed, share, number):
    """A size is at most an eighth larger than needed; padding rows count nothing and name a real prompt."""
    assert number <= round_up(number) <= 1.125 * number and round_up(number + 1) >= round_up(number)
    batch = make(prompts, generations, width, seed=seed)
    for part in g.split_batch(batch, max_tokens=300, share_prompts=share):
        sizes = (*part.tokens_bl.shape, *part.mask_bt.shape)
        assert all(round_up(size) == size for size in sizes)
        padded = np.array(part.mask_bt.any(axis=1)) == 0
        assert (np.array(part.advantages_b)[padded] == 0).all()
        assert float(part.prompt_lengths_b.min()) >= 1
        if part.prompt_index_b is not None:
            assert float(part.prompt_index_b.max()) < part.tokens_bl.shape[0]


@attrs.frozen(eq=False)
class Wider(g.Batch):
    """A batch with a field that no function knows."""

    weight_b: mx.array | None = None


@pytest.mark.parametrize(
    "cut",
    [
        lambda batch: take_rows(batch, [1]),
        lambda batch: g.drop_inactive(batch, GRPO),
        lambda batch: g.minibatches(batch, 2),
        lambda batch: g.split_batch(batch, max_tokens=50),
        lambda batch: g.split_batch(batch, max_tokens=50, share_prompts=True),
        halve_batch,
        lambda batch: deal(batch, 2),
        lambda batch: pieces_of_rank([batch, batch], 0, 2) and pieces_of_rank([take_rows(batch, [])], 1, 2),
    ],
)
def test_no_field_is_forgotten(cut):
    """A field without declared axes raises an error wherever a batch is cut."""
    batch = make()
    advantages = batch.advantages_b * (mx.arange(6) > 0)
    wider = Wider(**attrs.asdict(attrs.evolve(batch, advantages_b=advantages), recurse=False))
    assert set(attrs.fields_dict(g.Batch)) < set(AXES)
    with pytest.raises(
        ValueError, match=r"Wider\.weight_b: expected its axes in `batch_rows\.AXES`, found none"
    ):
        cut(wider)


def test_joined_rollouts_are_their_rows_one_after_another():
    """Narrower rollouts are padded with zeros; groups can be selected again."""
    one = tiny_rollout((3,), width=4, entropy=True)
    other = tiny_rollout((5, 2), width=6, seed=1, entropy=True)
    joined = g.join_rollouts([one, other])
    assert joined.prompts == one.prompts + other.prompts
    assert joined.completions() == one.completions() + other.completions()
    assert not joined.tokens_bt[:3, 4:].any().item() and not joined.logp_bt[:3, 4:].any().item()
    back = g.take_groups(joined, [2, 0])
    assert back.prompts == (other.prompts[1], one.prompts[0])
    assert back.completions() == other.completions()[3:] + one.completions()
    for name in ("logp_bt", "entropy_bt"):
        assert getattr(back, name)[:3, :6].tolist() == getattr(other, name)[3:].tolist()
    assert back.finished_b.tolist() == other.finished_b.tolist()[3:] + one.finished_b.tolist()


def of(adv_pg=(2, 3), **options):
    """A batch of a rollout with advantages of this shape."""
    return g.make_batch(tiny_rollout(), mx.zeros(adv_pg), **options)


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: of(top_entropy_quantile=0.0), "top_entropy_quantile = 0.0"),
        (lambda: of(top_entropy_quantile=1.5), "top_entropy_quantile = 1.5"),
        (lambda: of(top_entropy_quantile=0.5), "requires the rollout's entropies"),
        (lambda: of((3, 2)), r"adv_pg has shape \(3, 2\), expected \(2, 3\)"),
        (lambda: of((2, 3, 6)), r"adv_pg has shape \(2, 3, 6\), expected \(2, 3, 7\)"),
        (lambda: g.minibatches(make(), 0), "number = 0: expected 1 <= number <= 6"),
        (lambda: g.minibatches(make(), 7), "number = 7: expected 1 <= number <= 6"),
        (lambda: g.split_batch(make(), max_tokens=0), "max_tokens = 0"),
        (
            lambda: g.split_batch(attrs.evolve(make(), group_b=None), max_tokens=9, share_prompts=True),
            r"share_prompts requires group_b.*make_batch",
        ),
        (lambda: g.join_rollouts([tiny_rollout(), tiny_rollout(generations=2)]), "num_generations"),
        (lambda: g.join_rollouts([tiny_rollout(), tiny_rollout(entropy=True)]), "entropies"),
    ],
)
def test_what_does_not_fit_is_refused(act, message):
    """The message names the argument, the value found and the value expected."""
    with pytest.raises(ValueError, match=message):
        act()
