"""Conversations: what it costs to extend rows by given tokens, a second turn, and environments that sleep.

- *extend*: 32 rows whose turn of 64 tokens has ended get 20 tokens each, over a prompt of 128
- *turns*: two turns of 64 tokens with 20 given ones between them, against one turn of 128
- *wait*: a rollout whose 32 rows each wait for a call that sleeps 100 ms
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import backend
from benchmarks.harness.measure import interleaved
from benchmarks.harness.record import Figure, ratio_figure
from benchmarks.harness.shapes import make_module, make_prompts, vocabulary_of
from benchmarks.rollout import rate_figure
from grpo_fn.policy import plain_caches
from grpo_fn.policy.caches.kv_caches import merged
from grpo_fn.rollout import FindStop, Respond
from grpo_fn.rollout.decode_step import CacheSteps, caches_of_row, prefill, result_of
from runners.user_code.worker import Calls, Worker

SLEEP = 0.1  # seconds of a call


@attrs.frozen(kw_only=True)
class Case:
    """Sizes."""

    model: str
    prompt: int = 128
    turn: int = 64  # tokens sampled a turn
    given: int = 20
    rows: int = 32
    repeats: int = 7


CPU_CASE = Case(model="qwen2-6x256")
GPU_CASE = Case(model="nanochat-d20", rows=32)
QUICK_CASE = Case(model="tiny", prompt=16, turn=8, given=4, rows=4, repeats=1)


def extension(case: Case, policy: g.Policy) -> list[Figure]:
    """Extending all rows in their second turn, against a forward of the same tokens by themselves.

    Targets: at most 1.3 × that of the tokens alone. For comparison also a forward that attends to as much.
    """
    vocabulary = vocabulary_of(policy.module)
    (prompt,) = make_prompts(1, case.prompt, vocabulary)
    given = make_prompts(case.rows, case.given, vocabulary)
    tokens_be = mx.array(given, mx.int32)

    with policy.sampling(policy.params) as model:
        steps = CacheSteps(model, result_of(prefill(model, [prompt] * case.rows))[1])
        for n in range(case.turn):
            mx.eval(steps(tokens_be[:, n % case.given]))
        full = plain_caches(model)
        mx.eval(model(mx.array([prompt] * case.rows, mx.int32), cache=full))
        mx.eval(model(mx.array(make_prompts(case.rows, case.turn, vocabulary), mx.int32), cache=full))

        def extended() -> Any:
            kept = [caches_of_row(steps.caches, row, 0) for row in range(case.rows)]
            caches = merged([each for each in kept if each is not None])
            return result_of(prefill(model, given, caches))[0]

        def alone() -> Any:
            return policy.split.backbone(model)(tokens_be, cache=plain_caches(model))

        def attending() -> Any:
            hidden = policy.split.backbone(model)(tokens_be, cache=full)
            mx.eval(hidden)
            for cache in full:
                cache.trim(case.given)
            return hidden

        calls = {"extend": extended, "alone": alone, "attending": attending}
        times = interleaved(calls, repeats=case.repeats * 3)
    bound = 1.3
    return [
        *(
            Figure(name=f"extend: {name}", value=1e3 * times[key].median, unit="ms")
            for key, name in (
                ("extend", "park, extend, logits"),
                ("alone", "a forward of the tokens alone"),
                ("attending", "a forward over the same context"),
            )
        ),
        ratio_figure("extend: over the tokens alone", times["extend"] / times["alone"], at_most=bound),
        ratio_figure("extend: over a forward with context", times["extend"] / times["attending"]),
    ]


def two_turns(case: Case, policy: g.Policy) -> list[Figure]:
    """Tokens sampled per second: two turns with given tokens between, against one of the same length.

    Target: at least 0.8 × that of one turn.
    """
    prompts = make_prompts(1, case.prompt, vocabulary_of(policy.module))
    given = make_prompts(case.rows, case.given, vocabulary_of(policy.module))
    sampled = 2 * case.turn

    def find_stop(tokens: Sequence[int], start: int) -> int | None:
        return case.turn if len(tokens) >= case.turn else None

    def call(new: int, find_stop: FindStop | None = None, **options: Any) -> Callable[[], Any]:
        return lambda: g.generate(
            policy,
            policy.params,
            prompts,
            g.Sampling(num_generations=case.rows, max_new_tokens=new),
            key=mx.random.key(0),
            find_stop=find_stop,
            **options,
        )

    def conversation() -> Any:
        asked: set[int] = set()

        def respond(row: int, tokens: Sequence[int]) -> Sequence[int] | None:
            if row in asked:
                return None
            asked.add(row)
            return given[row]

        return call(sampled + case.given + 1, find_stop=find_stop, replies=Respond(respond))()

    calls = {"one": call(sampled), "two": conversation}
    drawn = sum(map(sum, conversation().sampled()))
    if drawn != sampled * case.rows:
        raise RuntimeError(f"two turns drew {drawn} tokens, wanted {sampled * case.rows}")
    times = interleaved(calls, repeats=case.repeats)
    return [
        rate_figure("turns: one turn", drawn, times["one"]),
        rate_figure("turns: two turns", drawn, times["two"]),
        ratio_figure("turns: two over one", times["one"] / times["two"], at_least=0.8),
    ]


def nap(store: dict[Any, Any], seconds: float) -> None:
    """The call, in the process of user code."""
    time.sleep(seconds)


class _Sleeping:
    """Replies that take their time, each in its thread."""

    def __init__(self, rows: int) -> None:
        worker = Worker()
        worker.load("benchmarks.turns:nap", 0.0)  # its imports are not measured
        self._calls, self.waited = Calls(worker, rows), 0.0

    def begin(self, row: int, tokens: Sequence[int]) -> bool:
        """A call that sleeps."""
        self._calls.submit(row, "benchmarks.turns:nap", SLEEP, timeout=0)
        return True

    def collect(self, least: int) -> Mapping[int, Sequence[int] | None]:
        """The end of each conversation."""
        started = time.perf_counter()
        found = self._calls.collect(least)
        self.waited += time.perf_counter() - started
        return dict.fromkeys(found)


def sleeping(case: Case, policy: g.Policy) -> list[Figure]:
    """How long a rollout waits for environments that sleep 100 ms a row. Target: at most twice that."""
    waits = []
    for _ in range(max(case.repeats // 2, 1)):
        replies = _Sleeping(case.rows)
        g.generate(
            policy,
            policy.params,
            make_prompts(1, case.prompt, vocabulary_of(policy.module)),
            g.Sampling(
                num_generations=case.rows,
                max_new_tokens=case.turn,
            ),
            key=mx.random.key(0),
            find_stop=lambda tokens, start: 4 if len(tokens) >= 4 else None,
            replies=replies,
        )
        waits.append(replies.waited)
    return [
        Figure(
            name=f"wait: {case.rows} rows of {1e3 * SLEEP:.0f} ms each",
            value=1e3 * sorted(waits)[len(waits) // 2],
            unit="ms",
            at_most=2e3 * SLEEP,
        )
    ]


@benchmark("turns")
def main(quick: bool) -> Sequence[Figure]:
    """Extending rows by given tokens, a second turn, and environments that sleep."""
    case = QUICK_CASE if quick else CPU_CASE if backend() == "cpu" else GPU_CASE
    module: nn.Module = make_module(case.model)
    policy = g.Policy.from_module(module)
    figures: list[Figure] = []
    for part in (extension, two_turns, sleeping):
        say(f"turns: {part.__name__} ({case.model})")
        figures += part(case, policy)
    # --quick shows that it works, not how fast.
    return [attrs.evolve(each, at_most=None, at_least=None) for each in figures] if quick else figures


if __name__ == "__main__":
    main()
