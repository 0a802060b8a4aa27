"""Programs for runs that train from programs: small ones, without a client's package."""

from pathlib import Path

from tests.support.tiny_runs import small

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


def agent_run(folder: Path, body: str, *, env: dict | None = None, **tables: dict) -> str:
    """The text of a small run's config whose program, written to this folder, is HEAD with this body."""
    (folder / "agent.py").write_text(HEAD + body, encoding="utf-8")
    program = {"program": ["python", "agent.py"], "max_turns": 4, **(env or {})}
    plain = {"nudge": "", "system_prompt": "", "source": tables.pop("source", None)}
    data = {name: value for name, value in plain.items() if value is not None}
    tables = {"data": data, "answer": {"form": "none"}, **tables}
    return small(env=program, **tables)
