"""Builds the reward for a table [judge.NAME]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from runners.config.sections import JUDGE_PREFIX, JudgeConfig
from runners.errors import UserError
from runners.judges.answer_cache import AnswerCache
from runners.judges.endpoint import Endpoint
from runners.judges.judge import EndpointJudge
from runners.judges.keys import take_key


@attrs.frozen(eq=False)
class CalledJudge:
    """A judge, and how the scorer has to call it."""

    name: str  # in logs
    function: Callable[..., Any]
    grouped: bool  # whether it takes `group_size`
    check: Callable[[], None]  # raises UserError if it cannot judge: no server, no weights, no key


def build_judge(name: str, settings: JudgeConfig) -> CalledJudge:
    """The judge of a table that `load_config` has checked. Nothing is asked or loaded yet."""
    if settings.kind == "classifier":
        from runners.judges.classifier import ClassifierJudge

        classifier = ClassifierJudge(name, settings)
        return CalledJudge(JUDGE_PREFIX + name, classifier, False, classifier.load)
    key = take_key(settings.api_key_env) if settings.api_key_env else ""
    endpoint = Endpoint(
        url=settings.url,
        variable=settings.api_key_env,
        key=key or "",
        concurrency=settings.concurrency,
        timeout=settings.timeout,
        batch_timeout=settings.batch_timeout,
        retries=settings.retries,
    )
    judge = EndpointJudge(name, settings, endpoint, AnswerCache() if settings.cache else None)

    def check() -> None:
        if key is None:
            raise UserError(
                f"judge.{name}.api_key_env: the environment has nothing in {settings.api_key_env}, "
                "want the key there"
            )
        endpoint.check(name)

    return CalledJudge(JUDGE_PREFIX + name, judge, settings.kind == "ranking", check)
