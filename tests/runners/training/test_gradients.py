"""Running out of memory in the learner: smaller micro-batches, the same sums, and a line that says so."""

import json

import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.learner import halve_batch
from runners.errors import UserError, is_out_of_memory
from runners.training.gradients import Gradients
from tests.support.closeness import assert_same_gradients
from tests.support.naive_learner import SPECS, grad_step_of, make_batch, make_state, near_policy
from tests.support.tiny_policies import same_tree, tiny_policy

METAL = RuntimeError("[metal::malloc] Attempting to allocate 17179869184 bytes which is greater than ...")


class Steps:
    """A learner's steps that run out of memory at some of their calls, after the state has been rebound."""

    def __init__(self, policy, fails=(), error=METAL):
        self.real = grad_step_of(policy, SPECS["grpo"], compile=False)
        self.real_logprobs = g.make_logprob_step(policy, compile=False)
        self.fails, self.error = set(fails), error
        self.calls = []  # tokens of the largest micro-batch of each

    def _count(self, pieces):
        self.calls.append(max(piece.tokens_bl.size for piece in pieces))
        if len(self.calls) - 1 in self.fails:
            raise self.error

    def grad_step(self, state, pieces):
        self._count(pieces)
        return self.real(state, pieces)

    def logprob_step(self, params, piece):
        self._count([piece])
        return self.real_logprobs(params, piece)


class Holder:
    """What a loop is to `Gradients`."""

    def __init__(self, state):
        self.state = state


@pytest.fixture(name="policy")
def _policy():
    return tiny_policy("llama-untied")


def pieces_of(policy, seed, tokens=200):
    batch = near_policy(make_batch(prompts=(4, 2, 7), seed=seed), policy)
    return g.split_batch(batch, max_tokens=tokens)


def gathered(policy, fails=(), error=METAL, start=None, steps=3):
    """Several batch steps through `Gradients`: the holder, the fakes, the object, the notes and the stats."""
    fakes, notes = Steps(policy, fails, error), []
    gradients = Gradients(fakes.grad_step, fakes.logprob_step, 200, notes.append)
    holder = Holder(start or make_state(policy))
    stats = [gradients.add(holder, pieces_of(policy, seed)) for seed in range(steps)]
    return holder, fakes, gradients, notes, stats


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_the_step_is_taken_again_in_halves(policy, fails):
    """Whichever of an update's batch steps fails, sums, weight and count are those of an untroubled run."""
    want, *_, want_stats = gathered(policy)
    got, fakes, gradients, notes, stats = gathered(policy, [fails])
    assert_same_gradients(got.state.accum_grads, want.state.accum_grads)
    assert got.state.accum_weight.item() == want.state.accum_weight.item()
    assert got.state.step.item() == 3
    for one, other in zip(stats, want_stats, strict=True):
        assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-5, abs=1e-7)
    # The steps before it are computed again as they were, itself in smaller micro-batches.
    assert len(fakes.calls) == 3 + 1 + fails
    whole = [max(piece.tokens_bl.size for piece in pieces_of(policy, seed)) for seed in range(3)]
    assert fakes.calls[: fails + 1] == whole[: fails + 1]
    assert fakes.calls[fails + 1 : 2 * fails + 1] == whole[:fails]
    assert fakes.calls[2 * fails + 1] < whole[fails]
    (note,) = notes
    assert "out of memory ([metal::malloc] Attempting" in note and "system.micro_batch_tokens is" in note
    assert gradients.max_tokens == whole[fails] // 2


def test_a_later_batch_step_repeats_the_halves(policy):
    """A second failure in the same update takes the halved pieces of the first again, not the large ones."""
    want, *_ = gathered(policy)
    got, fakes, gradients, notes, _ = gathered(policy, [0, 3])
    assert_same_gradients(got.state.accum_grads, want.state.accum_grads)
    assert fakes.calls[4] == fakes.calls[1] < fakes.calls[0]
    assert len(notes) == 2 and gradients.max_tokens <= fakes.calls[0] // 4


def test_what_a_checkpoint_had_gathered_is_kept(policy):
    """An update that was under way when the run was saved: its sums are part of the new ones."""
    first, *_ = gathered(policy, steps=2)
    want, *_ = gathered(policy, start=first.state, steps=2)
    got, *_ = gathered(policy, [1], start=first.state, steps=2)
    assert_same_gradients(got.state.accum_grads, want.state.accum_grads)
    assert got.state.accum_weight.item() == want.state.accum_weight.item() > first.state.accum_weight.item()
    assert got.state.step.item() == 4


def test_after_the_update_nothing_is_repeated(policy):
    """What `applied` closed is not computed again."""
    fakes, notes = Steps(policy, [2]), []
    gradients = Gradients(fakes.grad_step, fakes.logprob_step, 200, notes.append)
    holder = Holder(make_state(policy))
    gradients.add(holder, pieces_of(policy, 0))
    holder.state = make_state(policy)
    gradients.applied()
    gradients.add(holder, pieces_of(policy, 1))
    gradients.add(holder, pieces_of(policy, 2))
    assert len(fakes.calls) == 5 and len(notes) == 1
    want = Holder(make_state(policy))
    plain = Gradients(Steps(policy).grad_step, fakes.logprob_step, 200, notes.append)
    for seed in (1, 2):
        plain.add(want, pieces_of(policy, seed))
    assert_same_gradients(holder.state.accum_grads, want.state.accum_grads)


def test_pieces_cut_for_a_larger_budget_are_made_to_fit(policy):
    """Batches that wait for several updates, cut before the budget shrank, do not run into it again."""
    fakes, notes = Steps(policy, [0]), []
    gradients = Gradients(fakes.grad_step, fakes.logprob_step, 200, notes.append)
    holder, pieces = Holder(make_state(policy)), pieces_of(policy, 0)
    gradients.add(holder, pieces)
    gradients.applied()
    holder.state = make_state(policy)
    gradients.add(holder, pieces)
    assert len(notes) == 1 and len(fakes.calls) == 3
    assert fakes.calls[2] <= gradients.max_tokens == fakes.calls[0] // 2
    want, *_ = gathered(policy, steps=1)
    assert_same_gradients(holder.state.accum_grads, want.state.accum_grads)


@pytest.mark.parametrize("found", [-1, "many", 2.5, True, None, [1]])
def test_facts_that_are_none_are_refused(policy, found):
    """trainer_state.json may be anybody's."""
    *_, gradients, _, _ = gathered(policy)
    with pytest.raises(UserError, match=r"trainer_state.json: micro_batch_tokens: found .*, wanted a number"):
        gradients.restore({"micro_batch_tokens": found})


def test_old_log_probs_are_taken_again_in_halves(policy):
    """The pass before the gradient may fail as well: the halves have the log-probs of the whole."""
    fakes, notes = Steps(policy, [0]), []
    gradients = Gradients(fakes.grad_step, fakes.logprob_step, 200, notes.append)
    piece = max(g.split_batch(make_batch(), max_tokens=1000), key=lambda piece: piece.tokens_bl.size)
    one, two = gradients.with_old_logp(policy.params, [piece])
    want_bt = fakes.real_logprobs(policy.params, piece)
    together_bt = mx.concatenate([one.old_logp_bt, two.old_logp_bt])
    assert mx.allclose(together_bt, want_bt, atol=1e-5).item() and len(notes) == 1
    assert same_tree(one.targets_bt, piece.targets_bt[: one.targets_bt.shape[0]])


def test_a_step_is_halved_as_often_as_it_takes(policy):
    """Three failures in a row: three notes, an eighth of the tokens, and the sums of an untroubled run."""
    want, *_ = gathered(policy, steps=2)
    got, fakes, gradients, notes, _ = gathered(policy, [1, 2, 4], steps=2)
    assert_same_gradients(got.state.accum_grads, want.state.accum_grads)
    assert got.state.accum_weight.item() == want.state.accum_weight.item()
    assert len(notes) == 3 and gradients.max_tokens <= fakes.calls[1] // 8
    # What had gathered before is computed again as it was, and from the second failure on cut as well.
    assert fakes.calls[2] == fakes.calls[0] > fakes.calls[-2]


def test_a_single_completion_cannot_be_halved(policy):
    """The line names the keys that help then."""
    fakes = Steps(policy, [0])
    gradients = Gradients(fakes.grad_step, fakes.logprob_step, 1, print)
    with pytest.raises(
        UserError, match=r"one completion at a time .*system\.grad_checkpoint = true"
    ) as caught:
        gradients.add(Holder(make_state(policy)), pieces_of(policy, 0, tokens=1))
    assert "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are(policy):
    """A fault of the program is not taken for a full memory."""
    with pytest.raises(RuntimeError, match="shapes"):
        gathered(policy, [0], RuntimeError("[matmul] shapes do not fit"))


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (RuntimeError("[malloc] Unable to allocate 1024 bytes."), True),
        (RuntimeError("[malloc_or_wait] Unable to allocate 1024 bytes."), True),
        (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), True),
        (
            RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU)"),
            True,
        ),
        (RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (MemoryError(), True),
        (RuntimeError("[broadcast_shapes] Shapes (2) and (3) cannot be broadcast."), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_running_out_of_memory_looks_like(error, is_it):
    """The messages of MLX's backends, of CUDA, C++ and Python."""
    assert is_out_of_memory(error) is is_it


def test_the_budget_is_part_of_a_checkpoint(policy):
    """A resumed run does not run into the same wall; a smaller budget in the config wins."""
    *_, gradients, _, _ = gathered(policy, [0])
    facts = json.loads(json.dumps(gradients.facts()))
    for budget, want in ((200, gradients.max_tokens), (10, 10)):
        other = Gradients(gradients._grad_step, gradients._logprob_step, budget, print)
        other.restore(facts)
        assert other.max_tokens == want
    other.restore({})
    assert other.max_tokens == 10


def test_halving_is_exact_where_rows_are(policy):
    """A batch whose rows are halved twice still has every row once."""
    pieces = pieces_of(policy, 0, tokens=1000)
    halves = [half for piece in pieces for whole in halve_batch(piece) for half in halve_batch(whole)]
    counts = [sum(float(getattr(part, name)) for part in halves) for name in ("num_sequences", "num_tokens")]
    assert counts == [sum(float(getattr(p, n)) for p in pieces) for n in ("num_sequences", "num_tokens")]
    assert sum(part.mask_bt.sum().item() for part in halves) == counts[1]
