"""An engine in a separate process, with JSON through a pipe; weights and model come from files."""

import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import attrs

import grpo_fn as g
from grpo_fn.checks import TooLong
from grpo_fn.trees import from_names, named_leaves
from runners.engines.engine import Request, Row, Ticket, Token, Weights, never
from runners.engines.local import LocalEngine
from runners.files.tensor_files import load_arrays, save_arrays
from runners.tokenization.text import TextDecoder
from tests.support.tiny_states import load


class PipeEngine:
    """The engine, as a run sees it."""

    def __init__(self, model: Path | str) -> None:
        """With the model of this folder."""
        self.version = self.rows = 0
        self._folder = tempfile.TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        self._pipe, there = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(there, str(model)), daemon=True)
        self._process.start()

    def load(self, weights):
        if weights is None:
            self._ask("load", None, 0, 0)
            return
        file = f"{self._folder.name}/{weights.version}.safetensors"
        save_arrays(Path(file), named_leaves(weights.params), {})
        self.rows = self._ask("load", file, weights.version, weights.rows)
        self.version = weights.version

    def submit(self, request, sampling):
        drawn_from = attrs.asdict(sampling) | {"eos_ids": sorted(sampling.eos_ids)}
        return Ticket(self._ask("submit", attrs.asdict(request), drawn_from))

    def collect(self, least=1, *, should_stop=never):
        found = {}
        while True:
            rows, left, self.rows = self._ask("collect")
            found |= {Ticket(ticket): tuple(map(row_of, group)) for ticket, group in rows}
            if not left or len(found) >= least or should_stop():
                return found

    def tokens(self, ticket, *, should_stop=never):
        while not should_stop() and (token := self._ask("next", ticket)):
            yield Token(*token)
        self._ask("close", ticket)

    def peek(self, ticket, start=0):
        return [Token(*token) for token in self._ask("peek", ticket, start)]

    def cancel(self, ticket):
        self._ask("cancel", ticket)

    def close(self):
        """End the process; whether it held nothing of any request."""
        free = self._ask("is_free")
        self._pipe.close()
        self._process.join()
        self._folder.cleanup()
        return free

    def _ask(self, name, *arguments):
        """The answer of the process. Raises its fault."""
        self._pipe.send_bytes(json.dumps([name, *arguments]).encode())
        fault, answer = json.loads(self._pipe.recv_bytes())
        if fault:
            raise {"ValueError": ValueError, "TooLong": TooLong}.get(fault, RuntimeError)(answer)
        return answer


def row_of(values) -> Row:
    """From JSON."""
    tokens, logp, finish, versions, entropy = values
    drawn = None if entropy is None else tuple(entropy)
    return Row(tuple(tokens), tuple(logp), finish, tuple(map(tuple, versions)), drawn)


class Server:
    """The other end of the pipe."""

    def __init__(self, model: str) -> None:
        loaded = load(model)
        self.policy = g.Policy.from_module(loaded.module, compute_dtype=loaded.compute_dtype)
        self.engine = LocalEngine(TextDecoder(loaded.tokenizer))
        self.streams = {}

    def load(self, file, version, rows):
        found = file and Weights(self.policy, from_names(load_arrays(Path(file))[0]), version, rows)
        self.engine.load(found)
        return self.engine.rows

    def submit(self, request, sampling):
        request["prompt"] = tuple(request["prompt"])
        request["seeds"] = tuple(map(tuple, request["seeds"]))
        return self.engine.submit(Request(**request), g.Sampling(**sampling))

    def collect(self):
        """What has ended within a moment; whether there may be more; the rows that are decoded together."""
        end = time.monotonic() + 0.02
        rows = self.engine.collect(should_stop=lambda: time.monotonic() > end)
        return list(rows.items()), bool(rows) or time.monotonic() > end, self.engine.rows

    def next(self, ticket):
        stream = self.streams.setdefault(ticket, self.engine.tokens(ticket))
        return next(stream, None)

    def close(self, ticket):
        self.streams.pop(ticket).close()

    def is_free(self):
        return not (self.streams or self.engine._jobs or self.engine._kept)


def serve(pipe: Connection, model: str) -> None:
    """Answer until the pipe is closed."""
    server = Server(model)
    while True:
        try:
            name, *arguments = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            method = getattr(server, name, None) or getattr(server.engine, name)
            answer = [None, method(*arguments)]
        except Exception as error:
            answer = [type(error).__name__, str(error)]
        pipe.send_bytes(json.dumps(answer, default=attrs.astuple).encode())
