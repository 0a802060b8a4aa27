"""Asks an API like OpenAI's: parallel requests with time limits and retries, and reasons for faults."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from runners.config.judge_checks import is_local
from runners.config.sections import JudgeConfig
from runners.errors import Failure, UserError, error_line, one_line, show

if TYPE_CHECKING:
    from httpx2 import AsyncClient

_LARGEST = 1 << 20  # bytes of an answer
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # another try may succeed
_HOPELESS = {401, 403, 404, 405}  # the same for every request
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds before another try
_taken_keys: dict[str, str] = {}


@attrs.frozen
class Reply:
    """An answer, with its time and tokens."""

    text: str
    tokens_in: int
    tokens_out: int
    seconds: float  # of the try that was answered


@attrs.frozen
class _Fault:
    """Why a try has no reply."""

    failure: Failure
    wait: float | None = None  # seconds that the server asks to wait before another try; None: no other
    hopeless: bool = False  # every other request fails as well


@attrs.frozen
class Endpoint:
    """The API of a judge."""

    settings: JudgeConfig
    key: str = attrs.field(repr=False, default="")

    def check(self, name: str) -> None:
        """Raises UserError if judge `name`'s server does not answer, or the key is missing or refused."""
        import httpx2

        variable = self.settings.api_key_env
        if variable and not self.key:
            raise UserError(
                f"judge.{name}.api_key_env: environment variable {variable} is not set; it must hold the "
                "API key"
            )
        try:
            with httpx2.Client(trust_env=not is_local(self._url), timeout=10.0) as client:
                status = client.get(f"{self._url}/models", headers=self._headers).status_code
        except httpx2.HTTPError as error:
            line = self._safe(error_line(error))
            raise UserError(f"judge.{name}.url: {self._url} does not answer: {line}") from None
        if status in (401, 403):
            refused = f"the key in ${variable} is refused" if variable else "it expects a key (api_key_env)"
            raise UserError(f"judge.{name}: {self._url} answers HTTP {status}: {refused}")

    async def ask(self, bodies: Sequence[Mapping[str, Any]]) -> tuple[list[Reply | Failure], int]:
        """The reply to each request body, or why there is none; and how many requests were sent.

        At most `concurrency` run at a time. After as many failures in a row, or after one that affects every
        request, such as a wrong key, the others are not sent. Requests later than `batch_timeout` are
        cancelled.
        """
        import httpx2

        if not bodies:
            return [], 0
        settings, room = self.settings, asyncio.Semaphore(self.settings.concurrency)
        sent = failed_in_a_row = 0
        given_up: Failure | None = None  # why the remaining requests are not sent

        async def one(client: AsyncClient, body: Mapping[str, Any]) -> Reply | Failure:
            nonlocal sent, failed_in_a_row, given_up
            async with room:
                if given_up:
                    return given_up
                for number in range(settings.retries + 1):
                    sent += 1
                    found = await self._once(client, body)
                    if isinstance(found, Reply):
                        failed_in_a_row = 0
                        return found
                    if found.wait is None or number == settings.retries or given_up:
                        break
                    pause = min(_FIRST_WAIT * 2**number, _LONGEST_WAIT) * random.uniform(0.5, 1)
                    await asyncio.sleep(max(found.wait, pause))
                failed_in_a_row += 1
                if found.hopeless or failed_in_a_row >= settings.concurrency:
                    given_up = found.failure
                return found.failure

        limits = httpx2.Limits(max_connections=settings.concurrency)
        proxies = not is_local(self._url)
        async with httpx2.AsyncClient(
            limits=limits, trust_env=proxies, timeout=None, headers=self._headers
        ) as client:
            tasks = [asyncio.create_task(one(client, body)) for body in bodies]
            _, late = await asyncio.wait(tasks, timeout=settings.batch_timeout or None)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        over = Failure(f"got no answer within the {settings.batch_timeout:g} s of a batch step")
        return [over if task in late else task.result() for task in tasks], sent

    async def _once(self, client: AsyncClient, body: Mapping[str, Any]) -> Reply | _Fault:
        """One try."""
        import httpx2

        started, limit, content = time.perf_counter(), self.settings.timeout, b""
        try:
            async with (
                asyncio.timeout(limit),
                client.stream("POST", f"{self._url}/chat/completions", json=dict(body)) as response,
            ):
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > _LARGEST:
                        return _Fault(Failure(f"got an answer of more than {_LARGEST:,} bytes"))
        except TimeoutError:
            return _Fault(Failure(f"got no answer in {limit:g} s"), wait=0.0)
        except httpx2.HTTPError as error:
            line = self._safe(error_line(error))
            return _Fault(Failure(f"got no answer from {self._url}: {line}"), wait=0.0)
        status = response.status_code
        if status == 200:
            return _reply(content, time.perf_counter() - started)
        text = content.decode("utf-8", "replace")
        try:
            error = json.loads(text)["error"]
            text = error["message"] if isinstance(error, dict) else error
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # not an error in OpenAI's form: the text itself is shown
        shown = show(self._safe(" ".join(str(text).split())))
        wait = _seconds(response.headers.get("retry-after", "")) if status in _PASSING else None
        return _Fault(Failure(f"got HTTP {status} from {self._url}: {shown}"), wait, status in _HOPELESS)

    @property
    def _url(self) -> str:
        return self.settings.url.rstrip("/")

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def _safe(self, text: str) -> str:
        """A text of the server or the client without the key."""
        return one_line(text.replace(self.key, f"${self.settings.api_key_env}") if self.key else text, {})


def take_key(variable: str) -> str:
    """The key in a variable of the environment, from which it is removed, so that processes started later do
    not get it; later calls return it from memory. Empty if there is none."""
    if found := os.environ.pop(variable, "").strip():
        _taken_keys[variable] = found
    return _taken_keys.get(variable, "")


def _seconds(retry_after: str) -> float:
    """The seconds that a server asks for, within bounds; 0 for none, or a date."""
    try:
        return min(max(0.0, float(retry_after)), _LONGEST_WAIT)  # NaN: 0
    except ValueError:
        return 0.0


def _reply(content: bytes, seconds: float) -> Reply | _Fault:
    try:
        answer = json.loads(content)
        choice = answer["choices"][0]
        text = choice["message"].get("content")
        usage = answer.get("usage") or {}
        tokens = [max(int(usage.get(name) or 0), 0) for name in ("prompt_tokens", "completion_tokens")]
        str(text).encode()  # a lone surrogate is a ValueError
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        shown = show(content[:200].decode("utf-8", "replace"))
        return _Fault(Failure("got an answer that is not of the API's form", shown))
    if not isinstance(text, str) or not text.strip():
        cut = choice.get("finish_reason") == "length"
        return _Fault(Failure(f"got an empty answer{': max_tokens is too few for it' if cut else ''}"))
    return Reply(text, tokens[0], tokens[1], seconds)
