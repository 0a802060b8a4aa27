"""A server in a thread, its engine in another one, and clients' requests."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from packaging.requirements import Requirement

import grpo_fn as g
from runners.engines.engine import Row, Ticket, Token
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.serve.app import Server
from runners.serve.chat import ServedModel
from runners.serve.service import Service

CPU = Platform(backend="cpu")


def served(loaded, **changes):
    """A loaded model for the wire."""
    fields = {
        "name": "tiny",
        "tokenizer": loaded.tokenizer,
        "decoder": loaded.decoder,
        "eos_ids": frozenset(loaded.eos_ids),
        "vocabulary": loaded.policy.vocabulary,
        "length": 512,
        "sampling": g.Sampling(max_new_tokens=512),
    }
    return ServedModel(**fields | changes)


def conversation(*messages):
    """Messages; texts are turns of user and assistant."""
    roles = ("user", "assistant")
    return [
        {"role": roles[n % 2], "content": each} if isinstance(each, str) else each
        for n, each in enumerate(messages)
    ]


class Recorded:
    """An engine that records its requests, and the prompt tokens that the last one computed."""

    def __init__(self, engine):
        self._engine = engine
        self.requests = []
        self.computed = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def submit(self, request, sampling):
        self.requests.append(request)
        return self._engine.submit(request, sampling)

    def peek(self, ticket, start=0):
        found = self._engine.peek(ticket, start)
        self.computed = found[0].prompt_tokens if found else self.computed
        return found


class Client:
    """A client of a server."""

    def __init__(self, server, key="none"):
        self.server = server
        self.service = server.service
        self.http = httpx2.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=120
        )

    def post(self, path, body, **options):
        """The answer's status and JSON."""
        answer = self.http.post(path, content=json.dumps(body).encode(), **options)
        return answer.status_code, answer.json()

    def chat(self, *messages, **more):
        """The answer to a chat of these messages."""
        status, answer = self.post("/v1/chat/completions", {"messages": conversation(*messages), **more})
        assert status == 200, answer
        return answer

    def stream(self, path, body):
        """The events of a stream, read to its end."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def running(service):
    """Within the block, another thread runs the service, or the trainer; its error is raised at the end."""
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(service.run, stopped.is_set)
        try:
            yield
        finally:
            stopped.set()
    done.result()


@contextmanager
def serving(engine, model, *, limits=None, key="", public=True, **options):
    """A client of a server over this engine, which another thread owns meanwhile."""
    service = Service(engine, model, limits)
    session = service.open(key, records=False)
    app = Server(service, public=session if public and not key else None, **options)
    with app as server, running(service):
        client = Client(server, key or "none")
        client.session = session
        yield client


def python_with(client):
    """An interpreter that has this client, here or below GRPO_FN_CLIENTS; skips the test if none has it."""
    wanted = Requirement(client)
    code = "import sys; from importlib import metadata; print(metadata.version(sys.argv[1]))"
    folder = os.environ.get("GRPO_FN_CLIENTS", "")
    for python in (sys.executable, *sorted(Path(folder).glob("*/bin/python") if folder else ())):
        found = subprocess.run([python, "-c", code, wanted.name], capture_output=True, text=True)
        if found.returncode == 0 and wanted.specifier.contains(found.stdout.strip()):
            return python
    pytest.skip(f"neither this environment nor one of GRPO_FN_CLIENTS has {client}")


def soon(holds, seconds=60.0):
    """Whether a condition holds within this time."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(holds())


def embedded():
    """The model in the package."""
    return load_inference("embedded", CPU)


class ScriptedEngine:
    """An engine that returns given texts, a token per `collect`; its log-probs are −1."""

    rows = version = 0

    def __init__(self, tokenizer, texts):
        self._texts = [
            (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id) for text in texts
        ]
        self._tickets = itertools.count()
        self.jobs = {}
        self.requests = []
        self.freed = []

    def load(self, weights):
        pass

    def submit(self, request, sampling):
        ticket = Ticket(next(self._tickets))
        self.requests.append(request)
        self.jobs[ticket] = [self._texts.pop(0)[: sampling.max_new_tokens], 0, None]
        return ticket

    def collect(self, least=1, *, should_stop=lambda: False):
        time.sleep(0.001)
        done = {}
        for ticket, job in list(self.jobs.items()):
            job[1] += 1
            tokens = job[0][: job[1]]
            if job[2] or len(tokens) == len(job[0]):
                del self.jobs[ticket]
                row = Row(tokens, (-1.0,) * len(tokens), job[2] or "stop", ((0, len(tokens)),))
                done[ticket] = (row,)
        return done

    def peek(self, ticket, start=0):
        tokens = self.jobs[ticket][0][: self.jobs[ticket][1]]
        return [Token(token, -1.0, 1) for token in tokens[start:]]

    def cancel(self, ticket):
        self.freed.append(ticket)
        if ticket in self.jobs:
            self.jobs[ticket][2] = "cancelled"
