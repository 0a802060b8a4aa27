"""Rollouts of several ranks (as threads) equal those of one rank."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from runners.config.loading import load_config
from runners.data.stream import drawn
from runners.environments.tool_calls import CallReader, ToolCall
from runners.errors import RewardError
from runners.machine import startup
from runners.quickstart import DATA
from runners.ranks.ranks import Ranks
from runners.training.rollout import Draw
from runners.training.sampler import weights_of
from runners.training.setup import SetUp
from tests.support.ranks.rank_threads import as_run_ranks, on_ranks
from tests.support.tiny_runs import small

PROMPTS, SIZE = 5, 3
ECHO = '''"""An environment that adds to its prompt, and fails now and then."""

SIZE, resets = 3, {}


class Echo:
    """Repeats what it hears."""

    many = False  # whether the prompts of some groups differ

    def reset(self, question, **row):
        """Begin: the n-th instance of a group may be told its number."""
        number = resets[question] = resets.get(question, 0) + 1
        self.name, self.heard = question[:3], ""
        if question.startswith(("Ida has", "A garden")):
            raise ValueError("no flowers, no cards")
        differs = self.many and question.startswith("There")
        return f" ({self.name} {(number - 1) % SIZE})" if differs else f" ({self.name})"

    def say(self, message: str) -> str:
        """
        Say something.

        Args:
            message: What.
        """
        self.heard += message
        return f"{self.name}: {message}"

    def get_reward(self):
        """Different letters."""
        return float(len(set(self.heard)))


class Turns(Echo):
    """With a reward for each turn but the last, now and then none."""

    def get_turn_rewards(self):
        """The numbers of different letters so far."""
        numbers = [len(set(self.heard[: 3 * (n + 1)])) for n in range(len(self.heard) // 3)]
        return [None if number == 2 else number for number in numbers]


class Many(Echo):
    """The same, with prompts of their own."""

    many = True
'''


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a config with this environment; each turn of the model is a call of its tool."""
    monkeypatch.setattr(
        CallReader, "read", lambda self, text: (text, [ToolCall("say", {"message": text[-3:]})])
    )
    (tmp_path / "echo.py").write_text(ECHO)
    path = tmp_path / "train.toml"

    def make(factory: str) -> Path:
        for split in ("train", "valid"):  # a few rows: all are made into prompts
            rows = (DATA["embedded"] / "train.jsonl").read_text().splitlines(keepends=True)
            (tmp_path / f"{split}.jsonl").write_text("".join(rows[:PROMPTS]))
        path.write_text(
            small(
                data={"source": str(tmp_path), "nudge": ""},
                env={"max_turns": 3, "workers": 1, "factory": factory},
                rollout={
                    "num_generations": SIZE, "max_new_tokens": 28, "temperature": 2.0, "launch": "eval",
                    "stop": list("e1=37"), "max_batch": 64,
                },
                reward={"functions": ["correctness_reward_func"]},
                optim={"batch_size": PROMPTS},
            )
        )  # fmt: skip
        return path

    return make


def collected(path: Path, ranks: Ranks) -> tuple[dict[str, Any], np.ndarray]:
    """The first batch step on a rank: all values that are not rounded, and the log-probs."""
    run = SetUp(load_config(str(path)).check(), startup.prepare(), ranks=ranks).build()
    assert run.learner.state is not None
    engine, old_params = run.learner.engine, run.learner.state.old_params
    engine.load(weights_of(run.learner.sampling, old_params, run.learner.sampler))
    draw = Draw(drawn=drawn(run.order, 0, PROMPTS), key=mx.random.key(3))
    found = run.collector.collect(engine, draw)
    rollout, played = found.rollout, found.played
    assert played is not None
    facts = {
        "prompts": rollout.prompts,
        "added": rollout.prompts != tuple(example.tokens for example in found.examples),
        "completions": rollout.completions(),
        "sampled": rollout.sampled(),
        "finished": np.array(rollout.finished_b).tolist(),
        "texts": found.texts,
        "rewards": np.nan_to_num(found.values_kb, nan=-1).tolist(),
        "advantages": np.array(found.advantages_pg).tolist(),
        "examples": [example.messages for example in found.examples],
        "tokens": found.sampled_tokens,
        "problems": found.problems,
        "messages": [each.messages for each in played],
        "counts": [each.counts for each in played],
        "faults": [each.fault for each in played],
        "sampled_tokens": [each.sampled for each in played],
    }
    return facts, np.array(rollout.logp_bt)


@pytest.mark.parametrize(
    ("factory", "numbers"), [("echo.py:Echo", [3]), ("echo.py:Many", [6]), ("echo.py:Turns", [2])]
)
def test_conversations_of_ranks_are_those_of_one(write, factory, numbers):
    """Every rank has the prompts, tokens, messages, counts, faults and rewards of one rank, in order.

    With six ranks, one has no prompt. With `Many`, the prompts within some groups differ.
    """
    path = write(factory)
    want, want_bt = collected(path, Ranks())
    assert sum(counts["calls"] for counts in want["counts"]) > 0
    assert (np.ndim(want["advantages"]) == 3) == (factory == "echo.py:Turns")
    assert any(want["faults"]) and not all(want["faults"]) and want["added"]
    for number in numbers:
        for found, logp_bt in on_ranks(number, lambda own: collected(path, as_run_ranks(own))):
            assert found == want
            np.testing.assert_allclose(logp_bt, want_bt, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("on_error", "together"), [("skip", True), ("raise", False)])
def test_a_failed_reward_says_whether_all_ranks_raise_it(tmp_path, on_error, together):
    """If all ranks raise it, they save before they end; with "raise", others may be waiting."""
    (tmp_path / "fails.py").write_text("def fails(completions, **_):\n    raise OSError('not now')\n")
    path = tmp_path / "train.toml"
    path.write_text(small(reward={"functions": [f"{tmp_path}/fails.py:fails"], "on_error": on_error}))

    def raised(own: Any) -> bool:
        with pytest.raises(RewardError, match="not now") as caught:
            collected(path, as_run_ranks(own))
        return caught.value.on_all_ranks

    assert list(on_ranks(2, raised)) == [together] * 2
