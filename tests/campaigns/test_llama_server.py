"""A real model behind llama.cpp's server answers as `grpo eval` measured it, greedily.

`GRPO_REAL_MODEL=FOLDER python -m pytest tests/campaigns/test_llama_server.py`, with llama-cpp-python[server].
"""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from runners.evaluation.comparison import wilson
from tests.support.commands import grpo

MODEL = os.environ.get("GRPO_REAL_MODEL", "")
pytestmark = pytest.mark.skipif(not MODEL, reason="wants GRPO_REAL_MODEL, the folder of a real model")
COUNT, LENGTH = 48, 16


def reply(port, question, patience=120):
    """The server's reply; it may still be loading. By default it penalizes repetition."""
    asked = {"messages": [{"role": "user", "content": question}], "max_tokens": LENGTH}
    asked |= {"temperature": 0, "top_k": 1, "repeat_penalty": 1.0}
    url, kind = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    for _ in range(patience):
        try:
            request = urllib.request.Request(url, json.dumps(asked).encode(), kind)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]
        except OSError:
            time.sleep(1)
    raise AssertionError("the server does not answer")


def served(file, questions, folder):
    """The server's replies to questions, for a GGUF file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--model {file} --port {port} --n_ctx 512 --n_threads 2"
    command = [sys.executable, "-m", "llama_cpp.server", *options.split()]
    with open(folder / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            return [reply(port, question) for question in questions]
        finally:
            server.terminate()


@pytest.mark.parametrize(("kind", "same"), [("f16", 0.95), ("q8_0", 0.7), ("q4_1", 0.7), ("q4_0", 0.7)])
def test_the_score_is_reproduced(tmp_path, monkeypatch, kind, same):
    """Sums of small numbers: exact match within the 95 % interval, and at least this share of equal texts.

    Packed types are compared with the same packed weights here; llama.cpp rounds activations to 8 bits too.
    """
    pytest.importorskip("llama_cpp.server.app", reason="llama-cpp-python[server] is not installed")
    pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    pairs = [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(COUNT)]
    asked = "What is {} + {}? Answer with the number only."
    rows = [{"question": asked.format(a, b), "answer": str(a + b)} for a, b in pairs]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    grpo("export", MODEL, "--gguf", "m.gguf", "--type", kind)
    if kind != "f16":
        grpo("convert", "m.gguf", "--out", "packed")
    keys = ("answer.form=last_number", "data.system_prompt=")
    settings = [word for key in keys for word in ("--set", key)]
    data = ("--data", "sums.jsonl", "--samples", "0", "--max-tokens", LENGTH)
    grpo("eval", MODEL if kind == "f16" else "packed", *data, *settings, "--out", "replies.jsonl")
    ours = [json.loads(line) for line in (tmp_path / "replies.jsonl").read_text().splitlines()]
    theirs = served("m.gguf", [row["question"] for row in rows], tmp_path)
    numbers = [(re.findall(r"\d+", text) or [""])[-1] for text in theirs]
    found = [number == row["answer"] for number, row in zip(numbers, rows, strict=True)]
    mine = sum(line["correct"] for line in ours)
    interval = wilson(mine, COUNT)
    equal = sum(a.strip() == line["completion"].strip() for a, line in zip(theirs, ours, strict=True))
    print(f"{kind}: {sum(found)} of {COUNT}, here {mine}, {interval}; {equal} texts are the same")
    assert interval.low <= sum(found) / COUNT <= interval.high and equal >= same * COUNT
