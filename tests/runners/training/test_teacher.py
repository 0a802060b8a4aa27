"""Runs with a teacher, as a reward and in the loss: the KL falls; log-probs, prompts and vocabularies."""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from runners.config.loading import load_config
from runners.errors import ConfigError, UserError
from runners.machine import startup
from runners.ranks.ranks import Ranks
from runners.training.plan import plan_of
from runners.training.run_state import first_state
from runners.training.setup import SetUp
from runners.training.steps import batch_of, experience, propose
from tests.support.ranks.rank_threads import as_run_ranks, on_ranks
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, LETTERS, ran, small

TEMPERATURE = 0.9


@pytest.fixture
def write(tmp_path):
    """Writes a config with a student and a teacher."""
    (tmp_path / "letters.py").write_text(LETTERS)
    for name, options in {
        "student": dict(seed=0),
        "teacher": dict(seed=5),
        "packed": dict(seed=5, quantize={"group_size": 32, "bits": 4}),
        "other": dict(seed=5, tokenizer_size=300),
    }.items():
        make_model_folder(tmp_path / name, **options)
    path = tmp_path / "train.toml"

    def make(teacher=("teacher",), **tables) -> Path:
        keys = dict(zip(("path", "form", "weight", "task_weight", "hint"), teacher, strict=False))
        keys["path"] = keys["path"] if keys["path"] in ("", "self") else str(tmp_path / keys["path"])
        text = small(
            model={"path": str(tmp_path / "student")},
            data={"nudge": ""},
            reward=BY_LETTERS,
            rollout={"temperature": TEMPERATURE, "num_generations": 4, "max_new_tokens": 8, "launch": "eval"},
            teacher=keys,
            checkpoint={"every": 0},
            **tables,
        )
        path.write_text(text)
        return path

    return make


def logged(path: Path, **options) -> list[dict]:
    """The updates of a run, from its log."""
    return ran(path.parent, text=path.read_text(), **options).updates


@pytest.mark.parametrize(("form", "task"), [("reward", 1.0), ("loss", 0.0)])
def test_a_student_approaches_its_teacher(write, form, task):
    """The KL falls with and without the task's reward."""
    optim = {"learning_rate": 5e-3, "batch_size": 8, "max_steps": 24, "warmup_ratio": 0.0}
    path = write(("teacher", form, 1.0, task), optim=optim)
    built = SetUp(load_config(str(path)).check(), startup.prepare()).build()
    assert built.learner.grader and built.learner.grader.in_loss == (form == "loss")
    updates = logged(path)
    kl = [line["teacher/kl"] for line in updates]
    assert np.mean(kl[-4:]) < 0.85 * np.mean(kl[:4])
    assert len(kl) == 24 and all(value > 0 for value in kl if form == "loss")


def first_batch(path: Path, ranks: Ranks | None = None):
    """A run, its first experience, the batch, and the graded batch."""
    run: Any = SetUp(load_config(str(path)).check(), startup.prepare(), ranks=ranks or Ranks()).build()
    plan, state = plan_of(run, cast(Any, Silent())), first_state(run)
    plan.engine.load(plan.weights(state))
    found = experience(plan, plan.engine, propose(plan, state))
    batch = batch_of(plan, found)
    graded = run.learner.grader.graded(batch, found, plan.micro_batches, 64)
    return run, found, batch, graded.value


class Silent:
    """Replaces a diary."""

    def note(self, text):
        """Nothing."""

    def advanced(self, *_):
        """Nothing."""


def naive_logprobs(module, prompt, tokens):
    """log μ of a completion, from the whole row's logits at once."""
    z = module(mx.array([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1].astype(mx.float32) / TEMPERATURE
    logp = z - mx.logsumexp(z, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(logp, mx.array(tokens)[:, None], axis=-1)[:, 0])


@pytest.mark.parametrize("name", ["teacher", "packed"])
def test_the_reward_of_a_token_is_minus_its_log_ratio(write, tmp_path, name):
    """Each row's advantages are task_weight·A − weight·(log π − log μ), also with a quantized teacher."""
    run, experience, batch, graded = first_batch(write((name, "reward", 0.5, 2.0)))
    module, _ = load_model(tmp_path / name)
    module.set_dtype(mx.float32)
    rollout = experience.rollout
    for row, tokens in enumerate(rollout.completions()):
        want = naive_logprobs(module, rollout.prompts[row // rollout.num_generations], tokens)
        drawn, adv = (np.array(x)[row, : len(tokens)] for x in (rollout.logp_bt, graded.advantages_b))
        a = batch.advantages_b[row].item()
        np.testing.assert_allclose(adv, 2.0 * a + 0.5 * (want - drawn), rtol=1e-4, atol=1e-4)
    assert not run.learner.grader.in_loss


def test_the_student_is_its_own_teacher_with_a_hint(write, tmp_path):
    """The teacher "self" is the initial student; its prompt contains the hint after the question."""
    path = write(("self", "reward", 1.0, 0.0, " It is {answer}."))
    run, experience, _, graded = first_batch(path)
    module, _ = load_model(tmp_path / "student")
    module.set_dtype(mx.float32)
    rollout, size = experience.rollout, experience.rollout.num_generations
    for row, tokens in enumerate(rollout.completions()):
        example = experience.examples[row // size]
        prompt = run.learner.grader.prompt(example)
        assert f"{example.messages[-1]['content']} It is {example.answer}." in run.collector.decoder.decode(
            list(prompt)
        )
        want = naive_logprobs(module, prompt, tokens) - np.array(rollout.logp_bt)[row, : len(tokens)]
        np.testing.assert_allclose(
            np.array(graded.advantages_b)[row, : len(tokens)], want, rtol=1e-4, atol=1e-4
        )
    for form in ("reward", "loss"):
        updates = logged(write(("self", form, 1.0, 0.0, " It is {answer}.")), overwrite=True)
        assert all(line["teacher/kl"] != 0 for line in updates)


def test_ranks_grade_as_one(write):
    """Each rank computes its part of the log-probs, and all return the complete result."""
    path = write(("teacher",))
    want = np.array(first_batch(path)[3].advantages_b)
    for found in on_ranks(2, lambda own: np.array(first_batch(path, as_run_ranks(own))[3].advantages_b)):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_a_teacher_equal_to_the_student_changes_nothing(write):
    """The KL is 0, and without other rewards the gradient is 0 up to rounding."""
    for form in ("reward", "loss"):
        (first, *_) = logged(write(("student", form, 1.0, 0.0)), overwrite=True)
        assert abs(first["teacher/kl"]) < 1e-5 and first["grad_norm"] < 1e-4


@pytest.mark.parametrize("form", ["reward", "loss"])
def test_a_teacher_may_have_fewer_rows_of_padding(write, tmp_path, form):
    """The embeddings are padded to different sizes."""
    make_model_folder(tmp_path / "student", vocab_size=400, tokenizer_size=320)
    make_model_folder(tmp_path / "teacher", seed=5, vocab_size=330, tokenizer_size=320)
    assert all(np.isfinite(line["teacher/kl"]) for line in logged(write(("teacher", form))))


def test_other_vocabularies_are_refused(write):
    """The error names the teacher's key and the student."""
    with pytest.raises(UserError, match=r"teacher\.path: expected the vocabulary of .*student"):
        logged(write(("other",)))


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (("self",), r"teacher\.hint: expected a text with \{answer\}"),
        (("teacher", "reward", 1.0, 1.0, "no place"), r"teacher\.hint: expected a text with \{answer\}"),
        (("nowhere/here",), r"teacher\.path: no such file or folder"),
    ],
)
def test_invalid_teacher_keys_are_refused(write, teacher, said):
    """The error comes before anything is loaded."""
    with pytest.raises(ConfigError, match=said):
        load_config(str(write(teacher)))
