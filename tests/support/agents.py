"""Small programs for runs that train from programs, without a client's package."""

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx

from runners.config.loading import load_config
from runners.data.stream import drawn
from runners.machine import startup
from runners.training.rollout import Draw
from runners.training.sampler import weights_of
from runners.training.setup import SetUp
from runners.training.steps import batch_of
from tests.support.tiny_runs import LETTERS, PROBLEMS, small

DATA = {"source": str(PROBLEMS), "eval_split": "valid", "nudge": "", "system_prompt": ""}
WIDE = {"num_generations": 4, "max_new_tokens": 60, "temperature": 1.5}
CLIENTS = Path(__file__).with_name("clients")

HEAD = """import json, os, sys, urllib.request

row = json.load(sys.stdin)


def ask(path, **body):
    url = os.environ["OPENAI_BASE_URL"] + path
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps({"model": "any", **body}).encode(), headers)
    return json.load(urllib.request.urlopen(request))


def chat(messages, **body):
    return ask("/chat/completions", messages=messages, **body)["choices"][0]["message"]


def letters(text):
    return float(len(set(text)))


question = {"role": "user", "content": row["question"]}
"""
ONE_CALL = 'print(json.dumps({"reward": letters(chat([question])["content"])}))\n'
TALKS = """first = chat([question], max_tokens=6)
again = {"role": "user", "content": "Are you sure?"}
second = chat([question, {"role": "assistant", "content": first["content"]}, again], max_tokens=6)
other = chat([{"role": "user", "content": "Sum up: " + second["content"]}], max_tokens=6)
third = chat([question, again], max_tokens=6)
reward = letters(first["content"] + other["content"])
print(json.dumps({"reward": reward, "turn_rewards": [1.0, 0.0, None, 2.0]}))
"""
CALCULATOR = """import urllib.error
from runners.environments.calculator import calculate

expression = {"type": "string", "description": "What."}
parameters = {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}
function = {"name": "calculate", "description": "Compute.", "parameters": parameters}
tool = {"type": "function", "function": function}
messages = [question]
for _ in range(2):
    try:
        messages.append(chat(messages, tools=[tool]))
    except urllib.error.HTTPError:  # there is no room for a reply
        break
    for call in messages[-1].get("tool_calls") or ():
        found = calculate(**json.loads(call["function"]["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
    if messages[-1]["role"] != "tool":
        break
"""


def agent_run(folder: Path, body: str, *, env: dict | None = None, **tables: dict) -> str:
    """The text of a small run's config whose program, written to this folder, is HEAD with this body."""
    (folder / "agent.py").write_text(HEAD + body, encoding="utf-8")
    program = {"program": ["python", "agent.py"], "max_turns": 4, **(env or {})}
    plain = {"nudge": "", "system_prompt": "", "source": tables.pop("source", None)}
    data = {name: value for name, value in plain.items() if value is not None}
    tables = {"data": data, "answer": {"form": "none"}, **tables}
    return small(env=program, **tables)


def collected(folder, body, **tables):
    """The plan of a run with this program, and its first experience."""
    text = agent_run(folder, body, **{"data": DATA, "rollout": WIDE, **tables})
    (folder / "train.toml").write_text(text)
    (folder / "letters.py").write_text(LETTERS)
    config = load_config(str(folder / "train.toml")).check()
    run = SetUp(config, startup.prepare()).build()
    assert run.learner.state is not None
    sampler, params = run.learner.sampler, run.learner.state.old_params
    run.learner.engine.load(weights_of(run.learner.sampling, params, sampler))
    draw = Draw(drawn=drawn(run.order, 0, config.optim.batch_size), key=mx.random.key(3))
    return run, run.collector.collect(run.learner.engine, draw)


def batched(run, experience):
    """The learner's batch."""
    return batch_of(SimpleNamespace(config=run.config), experience)
