"""Asks an API like OpenAI's: parallel requests with time limits and retries, and reasons for faults."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from runners.config.judge_checks import is_local
from runners.errors import Failure, UserError, error_line, one_line, show

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

_LARGEST = 1 << 20  # bytes of an answer
_MOST_TOKENS = 1 << 53  # of an answer
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # temporary faults
_HOPELESS = {401, 403, 404, 405}  # the same for every request
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds before another try
_PROBE_TIME = 10.0  # seconds


@attrs.frozen
class Reply:
    """An answer, with its time and tokens."""

    text: str
    tokens_in: int
    tokens_out: int
    seconds: float  # of the try that was answered


@attrs.define
class Tries:
    """The state of a batch of requests."""

    sent: int = 0
    failed_in_a_row: int = 0
    given_up: Failure | None = None  # why the remaining requests are not sent


@attrs.frozen
class _Fault:
    """Why a request has no answer."""

    failure: Failure
    passing: bool = False  # a temporary fault: another try may succeed
    wait: float = 0.0  # least seconds before that try
    hopeless: bool = False  # a fault that affects every request


@attrs.frozen
class Endpoint:
    """The address of an API, and its time limits and retries."""

    url: str  # without /chat/completions
    variable: str  # the variable of the key; "" for none
    key: str = attrs.field(repr=False)
    concurrency: int
    timeout: float  # seconds a try
    batch_timeout: float  # seconds of all together; 0: none
    retries: int

    def check(self, name: str) -> None:
        """Raises UserError if the server does not answer or refuses the key; `name` is the judge's."""
        import httpx2

        try:
            with httpx2.Client(trust_env=not is_local(self.url), timeout=_PROBE_TIME) as client:
                status = client.get(f"{self._base}/models", headers=self._headers).status_code
        except httpx2.HTTPError as error:
            raise UserError(
                f"judge.{name}.url: {self._base} does not answer: {self._error_line(error)}"
            ) from None
        if status in (401, 403):
            key = (
                f"the key in ${self.variable} is refused" if self.variable else "it wants a key (api_key_env)"
            )
            raise UserError(f"judge.{name}: {self._base} answers HTTP {status}: {key}")

    async def ask(self, bodies: Sequence[Mapping[str, Any]]) -> tuple[list[Reply | Failure], int]:
        """The reply to each request body, or why there is none; and how many requests were sent.

        At most `concurrency` run at a time. After as many failures in a row, or after one that affects every
        request, such as a wrong key, the others are not sent. Requests later than `batch_timeout` are
        cancelled.
        """
        import httpx2

        if not bodies:
            return [], 0
        tries, room = Tries(), asyncio.Semaphore(self.concurrency)
        limits = httpx2.Limits(max_connections=self.concurrency)
        async with httpx2.AsyncClient(
            limits=limits, trust_env=not is_local(self.url), timeout=self.timeout
        ) as client:

            async def one(body: Mapping[str, Any]) -> Reply | Failure:
                async with room:
                    return tries.given_up or await self._patiently(client, body, tries)

            tasks = [asyncio.create_task(one(body)) for body in bodies]
            _, late = await asyncio.wait(tasks, timeout=self.batch_timeout or None)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        over = Failure(f"got no answer within the {self.batch_timeout:g} s of a batch step")
        return [over if task in late else task.result() for task in tasks], tries.sent

    async def _patiently(self, client: AsyncClient, body: Mapping[str, Any], tries: Tries) -> Reply | Failure:
        """One request with its retries."""
        number = 0
        while True:
            tries.sent += 1
            found = await self._once(client, body)
            if isinstance(found, Reply):
                tries.failed_in_a_row = 0
                return found
            if not found.passing or number == self.retries or tries.given_up:
                break
            pause = min(_FIRST_WAIT * 2**number, _LONGEST_WAIT) * random.uniform(0.5, 1)
            await asyncio.sleep(max(found.wait, pause))
            number += 1
        tries.failed_in_a_row += 1
        if found.hopeless or tries.failed_in_a_row >= self.concurrency:
            tries.given_up = found.failure
        return found.failure

    async def _once(self, client: AsyncClient, body: Mapping[str, Any]) -> Reply | _Fault:
        import httpx2

        started = time.perf_counter()
        target = f"{self._base}/chat/completions"
        try:
            async with (
                asyncio.timeout(self.timeout),
                client.stream("POST", target, json=dict(body), headers=self._headers) as response,
            ):
                content = await _bounded(response)
        except (TimeoutError, httpx2.TimeoutException):
            return _Fault(Failure(f"got no answer in {self.timeout:g} s"), passing=True)
        except httpx2.HTTPError as error:
            return _Fault(
                Failure(f"got no answer from {self._base}: {self._error_line(error)}"), passing=True
            )
        if content is None:
            return _Fault(Failure(f"got an answer of more than {_LARGEST:,} bytes"))
        status = response.status_code
        if status == 200:
            found = _reply(content, time.perf_counter() - started)
            return found if isinstance(found, Reply) else _Fault(found)
        return _Fault(
            self._refused(status, content),
            passing=status in _PASSING,
            wait=_retry_after(response),
            hopeless=status in _HOPELESS,
        )

    def _refused(self, status: int, content: bytes) -> Failure:
        text = content.decode("utf-8", "replace")
        try:
            said = json.loads(text)["error"]
            text = said["message"] if isinstance(said, dict) else said
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # not an error in OpenAI's form: the text itself is shown
        return Failure(
            f"got HTTP {status} from {self._base}: {show(self._safe(' '.join(str(text).split())))}"
        )

    @property
    def _base(self) -> str:
        return self.url.rstrip("/")

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def _error_line(self, error: Exception) -> str:
        return self._safe(error_line(error))

    def _safe(self, text: str) -> str:
        """A text of the server or the client without the key."""
        hidden = text.replace(self.key, f"${self.variable}") if self.key else text
        return one_line(hidden, {})


async def _bounded(response: Response) -> bytes | None:
    """The body; None if it is larger than any answer."""
    content = b""
    async for part in response.aiter_bytes():
        content += part
        if len(content) > _LARGEST:
            return None
    return content


def _retry_after(response: Response) -> float:
    """The seconds that the server asks for, within bounds; 0 if it gives none."""
    try:
        return min(max(0.0, float(response.headers.get("retry-after", 0))), _LONGEST_WAIT)  # NaN: 0
    except ValueError:  # a date
        return 0.0


def _reply(content: bytes, seconds: float) -> Reply | Failure:
    try:
        answer = json.loads(content)
        choice = answer["choices"][0]
        text = choice["message"].get("content")
        usage = answer.get("usage") or {}
        tokens = [max(int(usage.get(name) or 0), 0) for name in ("prompt_tokens", "completion_tokens")]
        str(text).encode()  # a lone surrogate is a ValueError
        if max(tokens) > _MOST_TOKENS:
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return Failure(
            "got an answer that is not of the API's form", show(content[:200].decode("utf-8", "replace"))
        )
    if not isinstance(text, str) or not text.strip():
        cut = choice.get("finish_reason") == "length"
        return Failure(f"got an empty answer{': max_tokens is too few for it' if cut else ''}")
    return Reply(text, tokens[0], tokens[1], seconds)
