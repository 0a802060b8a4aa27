"""An OpenEnv server in a process of its own, and a run that plays in it through its client."""

import json
import socket
import subprocess
import sys

import pytest

from runners.config.loading import load_config
from runners.environments.tool_calls import CallReader, ParsedTurn, ToolCall
from runners.training.train import run_training
from tests.support.processes.waiting import wait_until
from tests.support.services.judge_servers import answers
from tests.support.tiny_runs import Notes, small

pytest.importorskip(
    "openenv.core.env_server", reason="needs OpenEnv: pip install openenv-core", exc_type=ImportError
)

SERVER = '''
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    message: str


class Heard(Observation):
    echo: str = ""


class Echo(Environment):
    """Says what it hears, and rewards different letters; remembers how often."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.times, self.name = 0, ""

    def reset(self, seed=None, episode_id=None, name="", **kwargs):
        self.times, self.name = 0, name
        return Heard(echo=f" Hello {name}.")

    def step(self, action, timeout_s=None, **kwargs):
        self.times += 1
        return Heard(echo=f"{self.name} {self.times}: {action.message}", reward=len(set(action.message)) / 10)

    @property
    def state(self):
        return State(step_count=self.times)


app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=16)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
'''
WRAPPER = '''
from openenv.core import GenericEnvClient

MADE = []


class EchoTools:
    """The server's client, with a method for each thing that the model may do."""

    def __init__(self):
        self.client, self.reward, self.heard = GenericEnvClient(base_url="BASE").sync(), 0.0, []
        MADE.append(self)

    def reset(self, question, **row):
        """Begin."""
        self.reward, self.heard = 0.0, []
        return self.client.reset(name=question).observation["echo"]

    def say(self, message: str) -> str:
        """
        Say something.

        Args:
            message: What to say.
        """
        result = self.client.step({"message": message})
        self.reward += result.reward
        self.heard.append(result.observation["echo"])
        return result.observation["echo"]

    def get_reward(self):
        """What the server gave."""
        return self.reward
'''


@pytest.fixture
def server(tmp_path):
    """The address of a server that runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "server.py").write_text(SERVER)
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)], stderr=log)
    base = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(f"{base}/health"), process)
        yield base
    finally:
        process.terminate()
        process.wait()


@pytest.mark.filterwarnings("ignore")
def test_two_steps_of_training_in_a_server(server, tmp_path, monkeypatch):
    """Each conversation has a session of its own; what the server says and gives reaches the log."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "echo_tools.py").write_text(WRAPPER.replace("BASE", server))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+5", "answer": str(n + 5)}) + "\n" for n in range(8))
    )
    # The embedded model calls no tools: each of its turns stands for a call.
    monkeypatch.setattr(
        CallReader, "read", lambda self, text: ParsedTurn(text, (ToolCall("say", {"message": text[:40]}),))
    )
    (tmp_path / "t.toml").write_text(
        small(
            run={"name": "echo", "output_dir": str(tmp_path / "outputs")},
            data={"source": "rows.jsonl", "nudge": ""},
            reward={"functions": []},
            rollout={"num_generations": 3, "max_new_tokens": 160, "temperature": 5.0, "stop": list("e1=37")},
            env={"factory": "echo_tools.py:EchoTools", "max_turns": 3, "timeout": 60.0},
            log={"report": False},
        )
    )
    shown = Notes()
    folder = run_training(load_config("t.toml"), report=shown).folder
    log = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    updates = [line for line in log if "loss" in line]
    assert len(updates) == 2 and all(line["tools/call_frequency"] > 1 for line in updates), shown.lines
    assert all(line["tools/failure_frequency"] == 0 and line["turns/max"] == 3 for line in updates)
    assert any(line["grad_norm"] > 0 for line in updates) and log[-1]["eval/turns"] >= 1
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    played = [row for row in rows if "messages" in row]
    assert len(played) >= 12
    for row in played:
        answers = [m["content"] for m in row["messages"] if m["role"] == "tool"]
        names = {answer.split(" ")[0] for answer in answers}
        assert len(names) == 1, "an episode's calls reach its own session"
        assert [answer.split(" ")[1] for answer in answers] == ["1:", "2:"][: len(answers)]
