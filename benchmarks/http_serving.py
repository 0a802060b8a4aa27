"""How fast are streams over HTTP from `grpo serve`, compared with one batch of the engine?

All requests arrive at once, each with a different prompt, with completions of a fixed length at
temperature 1. The clients run in a separate process. *Processor time* is the time of the server's
process with its engine; on a CPU that others use, it is the more reliable figure. The time to the
first token is given as the median and the maximum over the streams. *A shared system prompt* has
2,000 characters: cold, if no conversation has used it before, and warm. If the model is a folder,
`mlx_lm.server` receives the same texts.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import click

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.record import Figure, sample_figure
from benchmarks.harness.shapes import make_prompts
from runners.engines.engine import Request, Weights
from runners.inference.inference_model import InferenceModel, load_inference
from runners.machine.startup import prepare
from runners.serve.app import Server
from runners.serve.chat import ServedModel
from runners.serve.service import Service

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LEAST = 0.9  # of the engine's own rate
Asked = list[tuple[str, dict[str, Any]]]


@attrs.frozen(kw_only=True)
class Case:
    """Sizes."""

    streams: int
    prompt: int = 64
    system: int = 2000  # characters
    new: int
    repeats: int


@attrs.frozen(kw_only=True)
class Round:
    """The results of requests."""

    seconds: float
    tokens: int
    first: Sequence[float] = (0.0,)  # seconds to the first token
    processor: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@contextmanager
def clients(port: int) -> Iterator[Callable[[Asked], Round]]:
    """A function that sends requests from another process, and waits for their streams."""
    command = [sys.executable, "-m", "benchmarks.harness.http_clients", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        writes, reads = process.stdin, process.stdout

        def send(asked: Asked) -> Round:
            writes.write(f"{json.dumps(asked)}\n")
            writes.flush()
            return Round(**json.loads(reads.readline()))

        yield send
        writes.close()


def batch(model: InferenceModel, prompts: Sequence[Sequence[int]], new: int) -> Round:
    """The same rows as a batch of the engine."""
    engine = model.engine
    sampling = g.Sampling(max_new_tokens=new)
    began = time.perf_counter()
    worked = time.process_time()
    for number, prompt in enumerate(prompts):
        engine.submit(Request(prompt=tuple(prompt), seeds=((0, number),)), sampling)
    engine.collect(len(prompts))
    seconds = time.perf_counter() - began
    return Round(seconds=seconds, tokens=new * len(prompts), processor=time.process_time() - worked)


@contextmanager
def ours(model: InferenceModel) -> Iterator[Callable[[Asked], Round]]:
    """A function that sends requests to our server, and decodes them in this thread."""
    served = ServedModel(
        name="model",
        tokenizer=model.tokenizer,
        decoder=model.decoder,
        eos_ids=frozenset(model.eos_ids),
        vocabulary=model.policy.vocabulary,
        length=8192,
        sampling=g.Sampling(),
    )
    service = Service(model.engine, served)
    server = Server(service, public=service.open(records=False))
    with server, clients(int(server.url.rpartition(":")[2])) as send:

        def decode(asked: Asked) -> Round:
            found: list[Round] = []

            def call() -> None:
                found.append(send(asked))
                service.wake()

            worked = time.process_time()
            thread = threading.Thread(target=call)
            thread.start()
            service.run(lambda: bool(found))
            thread.join()
            return attrs.evolve(found[0], processor=time.process_time() - worked)

        yield decode


@contextmanager
def theirs(folder: Path) -> Iterator[Callable[[Asked], Round]]:
    """A function that sends requests to `mlx_lm.server`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.2)
            with clients(port) as send:
                yield send
        finally:
            process.terminate()


def bodies(prompts: Sequence[Any], new: int, **more: Any) -> Asked:
    """Streaming requests with ids, texts or chats."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    usage |= {"max_tokens": new, "temperature": 1.0, **more}
    return [
        (CHAT, {"messages": prompt, **usage})
        if isinstance(prompt, list) and isinstance(prompt[0], dict)
        else (TEXT, {"prompt": prompt, **usage})
        for prompt in prompts
    ]


def first_tokens(title: str, found: Round) -> list[Figure]:
    """The time to the first token."""
    return [
        Figure(f"{title}: first token, median", 1e3 * statistics.median(found.first), "ms"),
        Figure(f"{title}: first token, longest", 1e3 * max(found.first), "ms"),
    ]


def rates(model: InferenceModel, title: str, case: Case) -> list[Figure]:
    """Compares streams of ids with the engine's batch, in pairs."""
    vocabulary = model.policy.vocabulary or len(model.tokenizer)
    prompts = make_prompts(case.streams, case.prompt, vocabulary)
    asked = bodies(prompts, case.new, ignore_eos=True)
    pairs = []
    with ours(model) as send:
        for _ in range(1 + case.repeats):  # the first one compiles
            pairs.append((batch(model, prompts, case.new), send(asked)))
    ratios = [over.rate / own.rate for own, over in pairs[1:]]
    processor = [own.processor / over.processor for own, over in pairs[1:]]
    own, over = pairs[-1]
    return [
        Figure(f"{title}: engine's batch", own.rate, "tok/s"),
        Figure(f"{title}: over HTTP", over.rate, "tok/s"),
        sample_figure(f"{title}: over HTTP / engine's batch", ratios, "×", at_least=LEAST),
        sample_figure(f"{title}: the same, processor time", processor, "×"),
        *first_tokens(title, over),
    ]


def shared_system(model: InferenceModel, name: str, case: Case) -> list[Figure]:
    """Measures chats with a shared system prompt, cold and warm."""
    words = "You are a helpful assistant who answers briefly and counts with care. "
    system = {"role": "system", "content": words * (case.system // len(words))}
    chats = [[system, {"role": "user", "content": f"What is {n} + {n}?"}] for n in range(case.streams + 1)]
    parts = {"cold": chats[:1], "warm": chats[1:2], f"warm, {case.streams} at once": chats[1:]}
    figures = []
    model.engine.load(Weights(model.policy, {}, 0))
    with ours(model) as send:
        for part, asked in parts.items():
            title = f"{name}, shared system prompt, {part}"
            found = send(bodies(asked, 4, ignore_eos=True))
            worked = 1e3 * found.processor / len(asked)
            figures += first_tokens(title, found)
            figures.append(Figure(f"{title}: processor time", worked, "ms a call"))
    return figures


def beside(model: InferenceModel, folder: Path, case: Case) -> list[Figure]:
    """Sends the same texts to both servers."""
    numbers = range(case.streams)
    texts = [f"Here is a long story about number {n}, and what it did next:" for n in numbers]
    asked = bodies(texts, case.new)
    title = f"{folder.name}, {case.streams} streams of texts"
    rates: list[Figure] = []
    firsts: list[Figure] = []
    for name, server in (("ours", ours(model)), ("mlx_lm.server", theirs(folder))):
        with server as send:
            found = [send(asked) for _ in range(2)][-1]
        rates.append(Figure(f"{title}: {name}", found.rate, "tok/s"))
        firsts += first_tokens(f"{title}, {name}", found)
    return [*rates, *firsts]


@benchmark("http_serving", parts=("models",))
@click.option("--model", "models", multiple=True, default=["embedded"], show_default=True, help="Models.")
@click.option("--streams", default=32, show_default=True, help="How many.")
@click.option("--new", default=128, show_default=True, help="Number of tokens per completion.")
@click.option("--repeats", default=3, show_default=True, help="Number of rounds of each comparison.")
def main(
    quick: bool, models: Sequence[str], streams: int, new: int, repeats: int
) -> Iterator[Sequence[Figure]]:
    """Compare streams over HTTP with the engine's own batch."""
    case = Case(streams=streams, new=new, repeats=repeats)
    if quick:
        case = Case(streams=2, prompt=8, system=200, new=4, repeats=1)
    for name in models:
        model = load_inference(name, prepare())
        say(f"http_serving: {name}")
        title = Path(name).name
        figures = rates(model, f"{title}, {case.streams} streams", case)
        # --quick shows that it works, not how fast.
        yield [each.unjudged() for each in figures] if quick else figures
        yield shared_system(model, title, case)
        if Path(name).is_dir() and not quick:
            yield beside(model, Path(name), case)


if __name__ == "__main__":
    main()
