"""Runs whose environment rewards turns, from `get_turn_rewards` to the advantages in completions.jsonl."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from runners.config.loading import load_config
from runners.environments.instances import get_turn_rewards
from runners.environments.tool_calls import CallReader, ToolCall
from runners.errors import ConfigError, UserError
from tests.support.resuming import lines_of
from tests.support.tiny_runs import ran, small

SOURCE = '''"""An environment that rewards turns."""


class Walk:
    """A walk on a line."""

    def reset(self, **row):
        """Begin at the start."""
        self.place, self.rewards = 0, []

    def step(self, text: str) -> str:
        """
        Go on or back.

        Args:
            text: Its length says which.
        """
        ahead = sum(map(ord, text)) % 3 - 1
        self.place += ahead
        self.rewards.append(None if ahead == 0 else float(ahead))
        return f"at {self.place}"

    def get_turn_rewards(self):
        """How far each turn went; none where it stayed."""
        return self.rewards


class Talks(Walk):
    """Too many rewards in some rows."""

    def get_turn_rewards(self):
        """One more than there are turns."""
        return [*self.rewards, 0.0, 1.0] if self.place > 0 else self.rewards


def length(completions, **_):
    return [float(len(completion[0]["content"])) for completion in completions]
'''


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs two batch steps of an environment in which each turn of the model is a call."""
    monkeypatch.setattr(
        CallReader, "read", lambda self, text: (text, [ToolCall("step", {"text": text[-3:]})])
    )
    (tmp_path / "walk.py").write_text(SOURCE)

    def make(
        factory="walk.py:Walk",
        functions=("walk.py:length",),
        aggregate="sum_then_normalize",
        quantization="none",
        **loss,
    ):
        coarse = {"quantization": quantization, "group_size": 0 if quantization == "none" else 32}
        text = small(
            data={"nudge": ""},
            env={"factory": factory, "max_turns": 3, "workers": 1},
            rollout={
                "max_new_tokens": 40,
                "temperature": 2.0,
                "stop": list("e1=37"),
                "num_generations": 4,
                **coarse,
            },
            reward={"functions": list(functions), "aggregate": aggregate},
            loss={**({"scale": "none"} if aggregate == "sum_then_normalize" else {}), **loss},
        )
        found = ran(tmp_path, text=text, overwrite=True)
        return lines_of(found.result.folder / "completions.jsonl"), found.log, found.notes

    return make


def rewards_of(record, *, outcome):
    """The reward of each turn of a record; NaN if it has none."""
    turns = [message for message in record["messages"] if message["role"] == "assistant"]
    own = [np.nan if value is None else value for value in record["extra"]["turn_rewards"] or []]
    found = np.array([*own, *[np.nan] * (len(turns) - len(own))])
    if outcome:
        found[-1] = np.nan_to_num(found[-1]) + record["rewards"]["length"]
    if "length_penalty" in record:
        found[-1] = np.nan_to_num(found[-1]) + record["length_penalty"]
    return found


def groups(records):
    """The records in groups of four completions."""
    return [records[start : start + 4] for start in range(0, len(records), 4)]


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("buffer", [0, 39])
@pytest.mark.parametrize("outcome", [True, False])
def test_rewards_of_turns_are_normalised_together(run, outcome, buffer, discount):
    """Process supervision: A = Σ over this and later turns of (r − mean of the group). Rewards of the whole
    completion and a length penalty belong to its last turn."""
    functions, overlong = ("walk.py:length",) if outcome else (), {"buffer": buffer}
    records, logged, _ = run(functions=functions, overlong=overlong, discount=discount)
    assert any(record.get("length_penalty") for record in records) == bool(buffer)
    for group in groups(records):
        rewards = [rewards_of(record, outcome=outcome) for record in group]
        mean = np.nanmean(np.concatenate(rewards))
        for record, row in zip(group, rewards, strict=True):
            z = np.nan_to_num(row - mean)
            want = [sum(discount ** (k - s) * z[k] for k in range(s, len(z))) for s in range(len(z))]
            np.testing.assert_allclose(record["turn_advantages"], want, rtol=1e-4, atol=1e-4)
            assert record["advantage"] == pytest.approx(np.mean(want), abs=1e-4)
            assert record["reward"] == pytest.approx(np.nansum(row), abs=1e-4)
            assert record["rewards"]["Walk_turns"] == sum(filter(None, record["extra"]["turn_rewards"]))
    assert all("rewards/Walk_turns/mean" in line for line in logged if "loss" in line)


def test_gigpo_compares_turns_after_one_observation(run):
    """A = A^E + A^S; the state of a turn is the environment's last message, or the prompt."""
    records, _, _ = run(baseline="turn", discount=0.9)
    shared = 0
    for group in groups(records):
        rewards = [rewards_of(record, outcome=True) for record in group]
        turns = [len(row) for row in rewards]
        states = {}
        numbers, filled = np.full((1, 4, max(turns)), -1), np.full((1, 4, max(turns)), np.nan)
        for i, (record, row) in enumerate(zip(group, rewards, strict=True)):
            said = ["", *[m["content"] for m in record["messages"] if m["role"] == "tool"]]
            numbers[0, i, : len(row)] = [states.setdefault(text, len(states)) for text in said[: len(row)]]
            filled[0, i, : len(row)] = row
        shared += sum((numbers == number).sum() > 1 for number in range(1, len(states)))
        want = g.turn_advantages(
            mx.array(filled.astype(np.float32)),
            baseline="turn",
            scale="none",
            discount=0.9,
            states_pgs=mx.array(numbers),
        )
        for record, row, n in zip(group, np.array(want)[0], turns, strict=True):
            np.testing.assert_allclose(record["turn_advantages"], row[:n], rtol=1e-4, atol=1e-4)
    assert any(record["extra"]["turn_rewards"] for record in records)
    assert shared, "a state besides the prompt's occurs more than once in a group"


def test_more_rewards_than_turns_are_dropped(run):
    """A message reports it, and other rewards of these rows are kept."""
    records, logged, lines = run(factory="walk.py:Talks", quantization="affine-4")
    quantization = [line["rollout/quantization"] for line in logged if "loss" in line]
    assert quantization[0] == "affine-4", "calibrated on turns with advantages of their own"
    assert any("get_turn_rewards: expected at most" in line for line in lines)
    without = [record for record in records if record["extra"]["turn_rewards"] is None]
    assert without and len(without) < len(records)
    for record in without:
        assert record["reward"] == record["rewards"]["length"] and record["rewards"]["Talks_turns"] is None


def test_normalised_rewards_are_refused_beside_rewards_of_turns(run):
    """With normalised rewards, the sum would not be the completion's reward."""
    with pytest.raises(UserError, match=r"aggregate: expected \"sum_then_normalize\" with get_turn_rewards"):
        run(aggregate="normalize_then_sum")


@pytest.mark.parametrize("setting", ['loss.baseline="turn"', "loss.discount=0.9"])
def test_turns_need_an_environment(setting):
    """Without an environment, a completion has only one turn."""
    with pytest.raises(ConfigError, match=r"expected \[env\]"):
        load_config("quickstart", [setting]).check()
    load_config("quickstart_tools", [setting]).check()
    with pytest.raises(ConfigError, match='expected "group" or "none"'):
        load_config("quickstart_tools", ['loss.baseline="turn"', 'loss.scale="batch"']).check()


@pytest.mark.parametrize("values", [None, 1.0, "abc"])
def test_rewards_of_turns_are_a_list(values):
    """For other values, the error names the method."""
    environment = SimpleNamespace(get_turn_rewards=lambda: values)
    with pytest.raises(TypeError, match="get_turn_rewards: expected a list of numbers, found"):
        get_turn_rewards([environment], lambda *column: None)
