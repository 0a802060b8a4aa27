"""A judge behind an API as a reward: questions, cache, requests, verdicts, and numbers for the log."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from runners.config.conditions import JUDGE_METRICS
from runners.config.sections import JudgeConfig
from runners.errors import Failure
from runners.judges.answer_cache import AnswerCache, question_digest
from runners.judges.endpoint import Endpoint, Reply, take_key
from runners.judges.questions import judge_columns, messages_for
from runners.judges.verdicts import presentation_order, read_ranking, read_score

Verdict = float | Failure
_SAME = 0.5  # the reward of a group whose completions are all equal: there is nothing to rank


@attrs.frozen
class Exchange:
    """A judge's question about some completions, and its answer."""

    rows: tuple[int, ...]  # the completions
    messages: tuple[dict[str, str], ...]
    answer: str | None  # None: no answer
    verdicts: tuple[Verdict, ...]  # of these completions


@attrs.frozen(eq=False)
class _Question:
    rows: tuple[int, ...]  # completions that the answer is about
    body: dict[str, Any]  # of the request
    digest: str
    read: Callable[[str], Sequence[Verdict]]  # an answer's verdict on each of the rows


@attrs.define(eq=False, slots=False)
class Judge:
    """Called like an async reward, with the arguments of `__signature__`; returns numbers or Failures.

    `exchanges` is None in a run; if it is a list, every exchange of a call is appended.
    """

    name: str
    settings: JudgeConfig
    endpoint: Endpoint
    cache: AnswerCache | None
    exchanges: list[Exchange] | None = None
    total_cost: float = 0.0
    __signature__: inspect.Signature = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.grouped = self.settings.kind == "ranking"
        names = ["completions", "prompts", "log_metric", *judge_columns(self.settings)]
        kind = inspect.Parameter.KEYWORD_ONLY
        # The scorer passes the arguments in a reward's signature, and refuses a run without such a column.
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    async def __call__(
        self,
        *,
        completions: Sequence[Sequence[Mapping[str, str]]],
        prompts: Sequence[Sequence[Mapping[str, Any]]],
        log_metric: Callable[[str, float], None],
        group_size: int = 1,
        **columns: Sequence[Any],
    ) -> list[Verdict]:
        """The verdict on each of B completions; the `group_size` ones of a prompt follow one another."""
        texts = [completion[0]["content"] for completion in completions]
        verdicts: list[Verdict] = [_SAME] * len(texts)
        questions = self._questions(texts, prompts, columns, group_size)
        first = {question.digest: question for question in reversed(questions)}
        answers: dict[str, str | Failure] = {**(self.cache.find(first) if self.cache else {})}
        missing = [digest for digest in first if digest not in answers]
        found, sent = await self.endpoint.ask([first[digest].body for digest in missing])
        replies = dict(zip(missing, found, strict=True))
        answers |= {key: each.text if isinstance(each, Reply) else each for key, each in replies.items()}
        usable: dict[str, str] = {}
        for question in questions:
            answer, rows = answers[question.digest], question.rows
            failed = isinstance(answer, Failure)
            ruled = [answer] * len(rows) if failed else question.read(answer)
            if not failed and question.digest in replies and not any(isinstance(v, Failure) for v in ruled):
                usable[question.digest] = answer
            for row, verdict in zip(rows, ruled, strict=True):
                verdicts[row] = verdict
            if self.exchanges is not None:
                messages = tuple(question.body["messages"])
                self.exchanges.append(Exchange(rows, messages, None if failed else answer, tuple(ruled)))
        if self.cache is not None:
            self.cache.keep(usable)
        asked = sum(len(question.rows) for question in questions)
        numbers = {
            "requests": sent,
            "cached": asked - sum(len(first[digest].rows) for digest in missing),
            "failed": sum(isinstance(verdict, Failure) for verdict in verdicts),
            **self._numbers([each for each in found if isinstance(each, Reply)]),
        }
        for part, value in numbers.items():
            log_metric(f"judge/{self.name}/{part}", value)
        return verdicts

    def check(self) -> None:
        """Raises UserError if it cannot judge: no server, no key."""
        self.endpoint.check(self.name)

    def take_notices(self) -> list[str]:
        """Lines on faults besides the verdicts, each once."""
        if self.cache is None:
            return []
        notices, self.cache.notices = self.cache.notices, []
        return notices

    def _questions(
        self,
        texts: Sequence[str],
        prompts: Sequence[Sequence[Mapping[str, Any]]],
        columns: Mapping[str, Sequence[Any]],
        group_size: int,
    ) -> list[_Question]:
        settings, size = self.settings, group_size if self.grouped else 1
        questions = []
        for start in range(0, len(texts), size):
            group = texts[start : start + size]
            shown, read = group, self._read_score
            if self.grouped:
                shown = presentation_order(group, settings.criteria)
                if len(shown) == 1:
                    continue
                read = functools.partial(_read_ranks, [shown.index(text) for text in group])
            values = {name: entries[start] for name, entries in columns.items()}
            body = {
                "messages": messages_for(settings, prompts[start], shown, values),
                "temperature": settings.temperature,
                "max_tokens": settings.max_tokens,
                "model": settings.model or None,
                **json.loads(settings.extra or "{}"),
            }
            # null in `extra` removes a key, for a server that refuses it.
            body = {name: value for name, value in body.items() if value is not None}
            rows = tuple(range(start, start + size))
            questions.append(_Question(rows, body, question_digest(settings.url, body), read))
        return questions

    def _read_score(self, answer: str) -> list[Verdict]:
        return [read_score(answer, self.settings.scale, self.settings.pattern)]

    def _numbers(self, replies: Sequence[Reply]) -> dict[str, float]:
        """Seconds, tokens and cost of the replies."""
        tokens_in = sum(reply.tokens_in for reply in replies)
        tokens_out = sum(reply.tokens_out for reply in replies)
        numbers: dict[str, float] = {"tokens_in": tokens_in, "tokens_out": tokens_out}
        if seconds := [reply.seconds for reply in replies]:
            numbers |= {"latency": math.fsum(seconds) / len(seconds), "slowest": max(seconds)}
        if self.settings.price_in or self.settings.price_out:
            cost = (tokens_in * self.settings.price_in + tokens_out * self.settings.price_out) / 1e6
            self.total_cost += cost
            numbers |= {"cost": cost, "total_cost": self.total_cost}
        return numbers


def _read_ranks(places: Sequence[int], answer: str) -> Sequence[Verdict]:
    """The rewards of completions from a ranking of texts; `places`: which of the texts, from 0, each is."""
    ranked = read_ranking(answer, max(places) + 1)
    return [ranked if isinstance(ranked, Failure) else ranked[place] for place in places]


def build_judge(name: str, settings: JudgeConfig) -> Judge:
    """The judge of a table that `load_config` has checked. Nothing is asked yet."""
    endpoint = Endpoint(settings, take_key(settings.api_key_env) if settings.api_key_env else "")
    return Judge(name, settings, endpoint, AnswerCache() if settings.cache else None)


def combined(name: str, values: Sequence[float]) -> float | None:
    """One number for an update from those of its batch steps; None if the name is not a judge's."""
    group, _, rest = name.partition("/")
    rule = JUDGE_METRICS.get(rest.rpartition("/")[2]) if group == "judge" and "/" in rest else None
    return None if rule is None or not values else float(rule(values))
