"""Training from programs that own their loop: rows, masks and gradients, limits, faults, resuming."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from grpo_fn.learner import take_rows
from runners.agents.agents import Episode
from runners.agents.processes import AgentProcess, last_object
from runners.errors import ConfigError, UserError
from runners.ranks.messages import RankMessage, decode_message, encode_message
from runners.telemetry.report import Quiet
from runners.training.gathering import _packed, _unpacked
from runners.training.train import run_training
from runners.user_code.process import Outcome
from tests.support.agents import CALCULATOR, DATA, HEAD, ONE_CALL, TALKS, WIDE, agent_run, batched, collected
from tests.support.resuming import config_in, killed, outcome
from tests.support.tiny_runs import BY_LETTERS, ran, small

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")


def final_weights(run) -> bytes:
    """The weights that a run saved last."""
    return (run.result.folder / "final/model.safetensors").read_bytes()


def test_program_with_one_call_trains_as_completions_do(tmp_path):
    """Its rows, masks, advantages and gradients are those of the run without it, bit for bit."""
    plain = small(data=DATA, answer={"form": "none"}, rollout=WIDE, reward=BY_LETTERS)
    without = ran(tmp_path, text=plain)
    found = ran(tmp_path, text=agent_run(tmp_path, ONE_CALL, data=DATA, rollout=WIDE))
    assert final_weights(found) == final_weights(without)
    assert found.updates[-1]["grad_norm"] == without.updates[-1]["grad_norm"] > 0
    assert found.updates[-1]["turns/mean"] == 1


def test_calculator_as_a_program_is_the_one_as_a_tool(tmp_path):
    """A program that calls the model with a tool, and answers its calls, trains as [env] tools do."""
    tables = {
        "model": {"path": "embedded-tools"},
        "data": {**DATA, "source": "embedded-tools", "eval_split": "test", "max_samples": 40},
        "answer": {"form": "xml"},
        "reward": {"functions": ["correctness_reward_func"]},
        "rollout": {"num_generations": 8, "max_new_tokens": 28, "temperature": 1.2},
        "optim": {"learning_rate": 1e-3, "batch_size": 3, "max_steps": 2},
    }  # fmt: skip
    tools = {"tools": ["runners.environments.calculator:calculate"], "max_turns": 2}
    within = ran(tmp_path, text=small(env=tools, **tables))
    found = ran(tmp_path, text=agent_run(tmp_path, CALCULATOR, env={"max_turns": 2}, **tables))
    for one, other in zip(within.updates, found.updates, strict=True):
        for name in ("reward", "grad_norm", "turns/mean", "completions/mean_length"):
            assert one[name] == other[name], name
    assert 1 < found.updates[0]["turns/mean"] < 2
    assert final_weights(found) == final_weights(within)


def test_every_row_of_an_episode_is_learned_from(tmp_path):
    """A continued call is one row; a compaction and a branch start new rows with the episode's advantage,
    and the learner's log-probs equal the engine's."""
    run, experience = collected(tmp_path, TALKS)
    batch = batched(run, experience)
    played = experience.played
    assert [len(each.earlier) for each in played] == [2] * 8
    assert [each.counts["turns"] for each in played] == [4] * 8
    assert batch.mask_bt.shape[0] == 24
    rows = [row for row, each in enumerate(played) for _ in each.earlier]
    advantages = np.array(experience.advantages_pg).reshape(-1)
    assert np.array_equal(np.array(batch.advantages_b), advantages[[*range(8), *rows]])
    assert (advantages != 0).any()
    sampled = np.array(batch.mask_bt).sum(axis=1)
    for row, each in enumerate(played):
        own = [number for number in range(24) if [*range(8), *rows][number] == row]
        assert sampled[own].sum() == len(each.sampled)
    logp = run.learner.logprob_step(run.learner.state.params, batch)
    difference = mx.where(batch.mask_bt, mx.abs(logp - batch.rollout_logp_bt), 0.0)
    assert difference.max().item() < 1e-4
    # Ranks exchange all rows.
    sent = decode_message(encode_message(RankMessage("rollout", _packed(experience)))).value
    received = batched(run, _unpacked(sent, experience.examples))
    for name in ("tokens_bl", "mask_bt", "rollout_logp_bt", "advantages_b", "group_b"):
        assert mx.array_equal(getattr(received, name), getattr(batch, name)), name
    # Main rows of a group share their prompt's number, others are alone.
    assert len(set(np.array(batch.group_b)[8:])) == 16
    assert take_rows(batch, [0]).group_b.item() == 0


def test_turns_of_all_rows_have_their_own_rewards(tmp_path):
    """With loss.baseline = "turn", `turn_rewards` has a number for each call, in the order of the rows."""
    loss = {"baseline": "turn", "scale": "none", "discount": 0.5}
    run, experience = collected(tmp_path, TALKS, loss=loss)
    batch = batched(run, experience)
    assert experience.advantages_pg.shape == (2, 4, 4)
    turns = np.array(experience.advantages_pg).reshape(8, 4)
    mask = np.array(batch.mask_bt)
    values = np.array(batch.advantages_b)
    for episode in range(8):
        first, second = 8 + 2 * episode, 9 + 2 * episode
        own = [*values[first][mask[first]], *values[second][mask[second]], *values[episode][mask[episode]]]
        assert set(np.float32(own)) == set(turns[episode])
        assert list(dict.fromkeys(own)) == list(dict.fromkeys(turns[episode].tolist()))


BAD = """
kind = row["question"].split()[0]
if kind == "hang": import time; time.sleep(100)
if kind == "die": os.kill(os.getpid(), 9)
if kind == "exit": sys.exit("I give up")
if kind == "silent": sys.exit(0)
if kind == "fork" and os.fork() == 0: import time; time.sleep(100)
if kind == "flood":
    while True: print("x" * 100_000)
if kind == "calls":
    import urllib.error
    for _ in range(20):
        try: chat([question], max_tokens=2)
        except urllib.error.HTTPError as error: status = error.code
    assert status == 403, status
    print(json.dumps({"reward": 1})); sys.exit(0)
if kind == "after":
    pid = os.fork()
    if pid == 0:
        os.setsid(); import time; time.sleep(2); chat([question]); os._exit(0)
if kind == "nonsense": ask("/chat/completions", messages="nonsense")
if kind == "ids": ask("/completions", prompt=[10**6, -1], max_tokens=3)
if kind == "bytes":
    import socket
    address = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(os.urandom(1000))
if kind == "words": print(json.dumps({"reward": "much"})); sys.exit(0)
if kind == "deep": print("[" * 100_000); sys.exit(0)
if kind == "late": print("no JSON")
print(json.dumps({"reward": letters(chat([question], max_tokens=6)["content"])}))
if kind == "later": print("and more words")
"""
FAULTS = {
    "hang": "timed out after 6 s without a call",
    "die": "its program ended with status 137",
    "exit": "its program ended with status 1: I give up",
    "silent": "its program printed no line",
    "flood": "its program printed more than",
    "nonsense": "status 1: urllib.error.HTTPError: HTTP Error 400",
    "deep": "its program printed no line",
    "ids": "status 1: urllib.error.HTTPError: HTTP Error 400",
}
FINE = ("fork", "calls", "after", "bytes", "late", "later", "good")


def test_a_bad_episode_costs_itself_only(tmp_path):
    """Programs that hang, die, fork, flood, call too often or send nonsense: the other episodes have
    rewards, and no process remains."""
    kinds = [*FAULTS, *FINE, "words"]
    for split in ("train", "valid"):
        rows = [json.dumps({"question": f"{kind} 1 + 1"}) for kind in kinds]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    _, experience = collected(
        tmp_path, BAD,
        data={"source": str(tmp_path), "eval_split": "valid", "answer": ""},
        env={"timeout": 6.0},
        rollout={"num_generations": 2, "max_new_tokens": 12},
        optim={"batch_size": len(kinds)},
    )  # fmt: skip
    faults = {}
    for number, example in enumerate(experience.examples):
        for each in experience.played[2 * number : 2 * number + 2]:
            faults.setdefault(example.messages[-1]["content"].split()[0], []).append(each)
    for kind, fault in FAULTS.items():
        assert all(fault in each.fault for each in faults[kind]), (kind, faults[kind])
        assert not np.isfinite(experience.rewards_pg[kinds_of(experience).index(kind)]).any()
    for kind in FINE:
        assert not any(each.fault for each in faults[kind]), (kind, faults[kind])
        assert np.isfinite(experience.rewards_pg[kinds_of(experience).index(kind)]).all()
    assert [each.counts["turns"] for each in faults["calls"]] == [4, 4]
    assert 'reward "program" returned str' in " ".join(experience.problems)
    assert not leftovers(str(tmp_path / "agent.py"))


def kinds_of(experience):
    """The first word of each example's question."""
    return [example.messages[-1]["content"].split()[0] for example in experience.examples]


def leftovers(name: str) -> list[str]:
    """Processes with this name among their arguments; one that left its group may live for two seconds."""
    for _ in range(100):
        listed = subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True).stdout
        found = [line for line in listed.splitlines() if name in line]
        if not found:
            break
        time.sleep(0.1)
    return found


def test_the_end_of_the_run_ends_its_programs(tmp_path):
    """Even after SIGKILL, because the guard's pipe closes."""
    (tmp_path / "agent.py").write_text("import time; time.sleep(100)")
    code = (
        "import os, sys, time; from runners.agents.processes import AgentProcess; "
        "AgentProcess([sys.executable, sys.argv[1]], {}, dict(os.environ)); "
        "print('runs', flush=True); time.sleep(100)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "agent.py")], stdout=subprocess.PIPE)
    assert run.stdout is not None and run.stdout.readline() == b"runs\n"
    time.sleep(0.5)
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert not leftovers(str(tmp_path / "agent.py"))


def test_last_object_is_read_whatever_surrounds_it():
    """The last line that is an object counts; other lines, JSON or not, are ignored."""
    assert last_object('{"reward": 1}\n{"reward": 2}\n[3]\nbye\n') == {"reward": 2}
    assert last_object("bye") is None and last_object("") is None


def test_row_comes_on_standard_input(tmp_path):
    """A large row works, which would not fit into the environment."""
    row = {"question": "x" * 500_000}
    code = "import json, sys; print(json.dumps({'length': len(json.load(sys.stdin)['question'])}))"
    process = AgentProcess([sys.executable, "-c", code], row, dict(os.environ))
    while not process.has_ended:
        time.sleep(0.01)
    assert process.end().value == {"length": 500_000}


def test_own_rewards_take_transcripts_and_what_was_printed(tmp_path):
    """reward.functions replace the printed reward: they get messages, and `printed` by name."""
    (tmp_path / "own.py").write_text(
        "def own(completions, printed, **_):\n"
        "    return [len(said) + each['more'] for said, each in zip(completions, printed)]\n"
    )
    body = (
        "first = chat([question], max_tokens=4)\n"
        "again = {'role': 'user', 'content': 'again'}\n"
        "chat([question, {'role': 'assistant', 'content': first['content']}, again], max_tokens=4)\n"
        "print(json.dumps({'more': 10}))\n"
    )
    _, experience = collected(tmp_path, body, reward={"functions": ["own.py:own"]})
    assert experience.values_kb.tolist() == [[13.0] * 8]
    roles = [message["role"] for message in experience.played[0].messages]
    assert roles == ["assistant", "user", "assistant"]


def test_a_program_that_the_system_cannot_start_costs_its_episode(tmp_path, monkeypatch):
    """For example, if there are too many processes."""
    started = AgentProcess.__init__
    seen = []

    def fails_once(self, *arguments):
        seen.append(arguments)
        if len(seen) == 3:
            raise BlockingIOError("too many processes")
        started(self, *arguments)

    monkeypatch.setattr(AgentProcess, "__init__", fails_once)
    _, experience = collected(tmp_path, ONE_CALL)
    faults = [each.fault for each in experience.played]
    assert [bool(fault) for fault in faults] == [False, False, True, *[False] * 5]
    assert "could not be started" in faults[2] and "too many processes" in faults[2]


def test_time_in_which_the_model_samples_is_not_the_programs():
    """An episode times out only if it makes no call for env.timeout after its last one has ended."""
    row = SimpleNamespace(turn=object())
    session = SimpleNamespace(rows=[row], calls=1)
    program = SimpleNamespace(has_ended=False, end=lambda: Outcome())
    episode = Episode(None, session, program, started=0.0)
    assert not episode.is_over(50.0, 10.0)  # a call is under way
    row.turn = None
    assert not episode.is_over(100.0, 10.0)  # it ended in between
    assert not episode.is_over(109.0, 10.0)
    session.calls = 2
    assert not episode.is_over(112.0, 10.0)  # a short one came and went
    assert episode.is_over(123.0, 10.0) and episode.outcome.timed_out
    assert "timed out after 10 s" in episode.outcome.fault


def test_a_killed_run_resumes_exactly(tmp_path):
    """Weights, logs and completions are the same, with several rows in each episode."""
    (tmp_path / "agent.py").write_text(HEAD + TALKS)
    settings = [
        'env.program=["python", "agent.py"]', "env.timeout=300", "rollout.max_new_tokens=30",
        "reward.functions=[]", "optim.batch_size=2", "optim.max_steps=3", "eval.every=0",
        "eval.at_start=false",
    ]  # fmt: skip
    straight = run_training(config_in(tmp_path / "a", *settings), report=Quiet())
    killed(config_in(tmp_path / "b", *settings), "step", 2)
    found = run_training(config_in(tmp_path / "b", *settings), report=Quiet(), resume=True)
    assert outcome(found.folder) == outcome(straight.folder)


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"tools": ["runners.environments.calculator:calculate"]}, "env.tools: expected []"),
        ({"program": [], "taskset": "my_tasks"}, "env.taskset: expected a name such as"),
        ({"program": ["no-such-program"]}, "no such program: 'no-such-program'"),
    ],
)
def test_wrong_keys_are_named(tmp_path, env, line):
    """The error comes before anything is sampled."""
    with pytest.raises((ConfigError, UserError)) as found:
        collected(tmp_path, ONE_CALL, env=env)
    assert line.replace("'", '"') in str(found.value).replace("'", '"')


def test_groups_survive_rows_that_begin_otherwise(tmp_path):
    """One program sends its own ids, and another makes no call."""
    body = HEAD_OF_IDS + "print(json.dumps({'reward': float(number % 7)}))\n"
    run, experience = collected(tmp_path, body)
    batch = batched(run, experience)
    assert np.isfinite(np.array(batch.rollout_logp_bt)).all()
    assert np.isfinite(experience.rewards_pg).all()


HEAD_OF_IDS = """
number = sum(os.environ["OPENAI_API_KEY"].encode())
if number % 3:
    ask("/completions", prompt=[50 + number % 3, 60, 70], max_tokens=3)
"""
