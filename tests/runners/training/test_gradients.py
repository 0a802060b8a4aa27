"""Micro-batches become smaller if memory runs out, with the same sums; the cost of a new shape."""

import attrs
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.backends import cpu, cuda
from runners.errors import UserError, is_out_of_memory
from runners.ranks.ranks import Ranks
from runners.training.gradients import MicroBatches
from runners.training.plan import new_shape_tokens
from tests.support.closeness import assert_same_gradients
from tests.support.naive_learner import SPECS, grad_step_of, make_batch, make_state, near_policy
from tests.support.tiny_policies import same_tree, tiny_policy

TOO_MANY = RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")
METAL = RuntimeError("[metal::malloc] Attempting to allocate 17179869184 bytes which is greater than ...")


class Steps:
    """Steps of a learner that run out of memory in some calls."""

    def __init__(self, policy, fails=(), error=METAL):
        self.real = grad_step_of(policy, SPECS["grpo"], compile=False)
        self.real_logprobs = g.make_logprob_step(policy, compile=False)
        self.fails, self.error = set(fails), error
        self.calls = []  # tokens of the largest micro-batch of each call

    def _count(self, pieces):
        self.calls.append(max(piece.tokens_bl.size for piece in pieces))
        if len(self.calls) - 1 in self.fails:
            raise self.error

    def grad_step(self, state, pieces, **how):
        self._count(pieces)
        return self.real(state, pieces)

    def logprob_step(self, params, piece):
        self._count([piece])
        return self.real_logprobs(params, piece)


@pytest.fixture(name="policy")
def _policy():
    return tiny_policy("llama-untied")


def pieces_of(policy, seed, tokens=200):
    batch = near_policy(make_batch(prompts=(4, 2, 7), seed=seed), policy)
    return g.split_batch(batch, max_tokens=tokens)


def micro_batches(fakes, asked=200, note=print):
    return MicroBatches(fakes.grad_step, asked, Ranks(), note)


def gathered(policy, fails=(), error=METAL, steps=3, budget=200):
    """Gradients of some batch steps: the state, the fake steps, messages, statistics and the budget."""
    fakes, notes = Steps(policy, fails, error), []
    pieces = [pieces_of(policy, seed) for seed in range(steps)]
    found = micro_batches(fakes, note=notes.append).gradients(make_state(policy), pieces, budget)
    train, stats = found.value
    return train, fakes, notes, stats, found.micro_batch_tokens


@pytest.mark.parametrize(
    ("fails", "error", "said"),
    [
        *[(fails, METAL, "out of memory ([metal") for fails in ([0], [1], [2], [0, 1], [2, 5])],
        ([0], TOO_MANY, "too many arrays ([metal::malloc] Resource limit (499000) exceeded.)"),
    ],
)
def test_the_update_is_repeated_in_smaller_micro_batches(policy, fails, error, said):
    """The sums do not depend on which batch steps fail and how often."""
    want, untroubled, _, want_stats, _ = gathered(policy)
    got, fakes, notes, stats, budget = gathered(policy, fails, error)
    assert_same_gradients(got.accum_grads, want.accum_grads)
    assert got.accum_weight.item() == want.accum_weight.item()
    assert got.step.item() == 3
    for one, other in zip(stats, want_stats, strict=True):
        assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-5, abs=1e-7)
    assert len(notes) == len(fails) and budget <= max(untroubled.calls) // 2 ** len(fails)
    assert max(fakes.calls[-3:]) <= budget
    assert notes[0].startswith(said) and "micro_batch_tokens is" in notes[0]


def test_pieces_cut_for_a_larger_budget_are_made_to_fit(policy):
    """Micro-batches that were made before the budget shrank are split before they are computed."""
    want, *_ = gathered(policy)
    got, fakes, notes, _, budget = gathered(policy, budget=60)
    assert_same_gradients(got.accum_grads, want.accum_grads)
    assert max(fakes.calls) <= budget == 60 and not notes


def test_old_log_probs_are_computed_again_in_halves(policy):
    """The forward pass before the gradient may fail too; the halves have the same log-probs."""
    fakes, notes = Steps(policy, [0]), []
    piece = max(g.split_batch(make_batch(), max_tokens=1000), key=lambda piece: piece.tokens_bl.size)
    steps = micro_batches(fakes, 1000, notes.append)
    found = steps.logprobs(fakes.logprob_step, policy.params, [piece], 1000)
    want_bt = fakes.real_logprobs(policy.params, piece)
    got_bt = np.concatenate([np.array(found.value[number]) for number in range(2)])
    np.testing.assert_allclose(got_bt, np.array(want_bt), atol=1e-5)
    one, two = (half.targets_bt for half in found.steps[0])
    assert len(notes) == 1 and same_tree(one, piece.targets_bt[: one.shape[0]]) and two.shape[0]


def test_a_single_completion_cannot_be_halved(policy):
    """The error names the keys that reduce memory."""
    steps = micro_batches(Steps(policy, [0]), 1)
    with pytest.raises(
        UserError, match=r"one completion at a time; .*system\.grad_checkpoint = true"
    ) as caught:
        steps.gradients(make_state(policy), [pieces_of(policy, 0, tokens=1)], 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (TOO_MANY, True),
        (RuntimeError("[malloc] Unable to allocate 1024 bytes."), True),
        (RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("[broadcast_shapes] Shapes (2) and (3) cannot be broadcast."), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error, is_it):
    """The messages of MLX's backends, of CUDA, C++ and Python."""
    assert is_out_of_memory(error) is is_it


@pytest.mark.parametrize(("longest", "shrinks"), [(0.0, False), (1e-6, True), (1e6, False)])
def test_slow_micro_batches_become_smaller(policy, longest, shrinks):
    """The budget follows from the measured pace, and the sums do not change."""
    fakes, notes = Steps(policy, ()), []
    steps = attrs.evolve(micro_batches(fakes, note=notes.append), longest=longest)
    pieces = [pieces_of(policy, 0)]
    first = steps.gradients(make_state(policy), pieces, 200)
    again = steps.gradients(make_state(policy), pieces, first.micro_batch_tokens)
    assert (again.micro_batch_tokens < 200) == shrinks == bool(notes)
    assert_same_gradients(first.value[0].accum_grads, again.value[0].accum_grads)


@pytest.mark.parametrize(
    "numbers, parameters, tokens, later",
    [
        (cpu.NUMBERS, 500_000, 1_000, 1_000_000),
        (cpu.NUMBERS, 2_500_000, 1_000, 1_000_000),
        (cpu.NUMBERS, 500_000_000, 5, 1_000_000),
        (cuda.NUMBERS, 500_000_000, 9_000, 9_000),
    ],
)
def test_a_new_shape_costs_less_with_more_parameters(numbers, parameters, tokens, later, monkeypatch):
    """Below a size models compute no faster. After an epoch, a CPU accepts almost no new shape."""
    monkeypatch.setattr("runners.training.plan.number", ({"launch": 0} | numbers).__getitem__)
    assert new_shape_tokens(parameters, epoch=0) == tokens
    assert new_shape_tokens(parameters, epoch=1) == later
