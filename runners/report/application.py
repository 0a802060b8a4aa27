"""The live page: answers from the files of runs, and a stream that says when they grow.

It writes nothing. It answers only requests whose Host and Origin are its own, so that no other web page can
read a run through the browser.
"""

from __future__ import annotations

import asyncio
import html
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from runners.errors import UserError, one_line
from runners.report.live_run import LiveRun
from runners.report.page import page, small_page
from runners.report.run_record import entries, is_run_folder

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

_LOOK = 0.4  # seconds between two checks of a run's files
_PAUSE = 1.0  # least seconds between two events: each makes an open page fetch new data
_BEAT = 15.0  # seconds after which an idle stream sends a sign of life


def application(
    place: Path, hosts: Sequence[str], is_ending: Callable[[], bool] = lambda: False
) -> Starlette:
    """The server's application, for requests whose Host is among `hosts`; streams end with `is_ending`.

    Its plain functions are called in threads.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.responses import (
        HTMLResponse,
        PlainTextResponse,
        RedirectResponse,
        Response,
        StreamingResponse,
    )
    from starlette.routing import Route

    known: dict[Path, LiveRun] = {}
    guard = threading.Lock()

    def live(folder: Path) -> LiveRun:
        with guard:
            if folder not in known:
                known[folder] = LiveRun(folder)
            return known[folder]

    def run_of(request: Request) -> LiveRun:
        folder = runs_in(place).get(request.path_params["run"])
        if folder is None:
            raise HTTPException(404)
        return live(folder)

    def compressed(content: bytes | None) -> Response:
        if content is None:
            raise HTTPException(404)
        return Response(content, media_type="application/octet-stream")

    def index(request: Request) -> Response:
        found = runs_in(place)
        if list(found.values()) == [place]:
            return RedirectResponse(f"run/{quote(next(iter(found)), safe='')}/", 303)
        return HTMLResponse(list_page(place, {name: live(folder) for name, folder in found.items()}))

    def run_page(request: Request) -> Response:
        name, *_ = run_of(request).summary()
        begin = {"mode": "live", "at": "first", "run": "data", "events": "events"}
        return HTMLResponse(page(name, [], begin | ({} if is_run_folder(place) else {"list": "../../"})))

    def first(request: Request) -> Response:
        return compressed(run_of(request).data(-1, 0))

    def data(request: Request) -> Response:
        generation, since = (_whole(request.query_params.get(name, "")) for name in ("generation", "since"))
        return compressed(run_of(request).data(generation, max(since, 0)))

    def part(request: Request) -> Response:
        return compressed(run_of(request).part(_number(request), request.path_params["piece"]))

    def evaluation(request: Request) -> Response:
        return compressed(run_of(request).evaluation(_number(request)))

    def events(request: Request) -> StreamingResponse:
        run = run_of(request)

        async def stream() -> AsyncIterator[bytes]:
            before, sent = None, time.monotonic()
            yield b"retry: 1000\n\n"
            while not is_ending() and not await request.is_disconnected():
                now = await run_in_threadpool(run.signature)
                if before is None:
                    before = now
                elif now != before and time.monotonic() - sent >= _PAUSE:
                    before, sent = now, time.monotonic()
                    yield f"data: {json.dumps({'state': now[-1]})}\n\n".encode()
                elif now == before and time.monotonic() - sent > _BEAT:
                    sent = time.monotonic()
                    yield b": still here\n\n"
                await asyncio.sleep(_LOOK)

        return StreamingResponse(stream(), media_type="text/event-stream")

    def unreadable(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{one_line(str(error), {})}\n", 503)

    inside = "/run/{run}"
    routes = [
        Route("/", index),
        Route(f"{inside}/", run_page),
        Route(f"{inside}/first", first),
        Route(f"{inside}/data", data),
        Route(f"{inside}/part/{{at}}/{{piece}}", part),
        Route(f"{inside}/evaluation/{{at}}", evaluation),
        Route(f"{inside}/events", events),
    ]
    app = Starlette(routes=routes, exception_handlers={UserError: unreadable})
    app.add_middleware(_Guard, hosts=frozenset(host.lower() for host in hosts))
    return app


class _Guard:
    """Refuses requests that do not come from the server's own pages, and sets the headers of its answers."""

    def __init__(self, app: Any, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        if _address(f"//{host}")[0] not in self.hosts:
            text = f"Host: {host[:100]} is not served here; `grpo watch --allow-host NAME` adds a name\n"
            return await PlainTextResponse(text, 403)(scope, receive, send)
        if origin is not None and _address(origin)[1] != host.lower():
            return await PlainTextResponse("requests of other pages are refused\n", 403)(scope, receive, send)

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        await self.app(scope, receive, with_headers)


_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]


def runs_in(place: Path) -> dict[str, Path]:
    """The runs that are served, by name: the one in `place`, or those in its folders.

    Bytes of a folder's name that are not UTF-8 are spelt out.
    """
    inside = [place] if is_run_folder(place) else filter(is_run_folder, entries(place))
    return {path.name.encode("utf-8", "backslashreplace").decode("utf-8") or "run": path for path in inside}


def list_page(place: Path, found: dict[str, LiveRun]) -> str:
    """The page with the runs of a folder; it reloads itself, because it has no script."""
    rows = []
    for name, run in found.items():
        rows.append(f'<tr><td><a href="run/{quote(name, safe="")}/">{html.escape(name)}</a></td>')
        try:
            _, state, (em, reward, update) = run.summary()
        except UserError as error:
            rows.append(f"<td colspan='4'>{html.escape(one_line(str(error), {}))}</td></tr>")
        else:
            score, mean = "–" if em is None else f"{em:.1%}", "–" if reward is None else f"{reward:.4g}"
            rows.append(f"<td>{state}</td><td>{score}</td><td>{mean}</td><td>{update or 0:g}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in ("run", "state", "exact match", "reward", "updates"))
    empty = "<p class='empty'>No run has begun here yet. This page looks again.</p>"
    table = (
        f"<table class='facts compare'><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
    return small_page(f"Runs in {place.name or place}", table if rows else empty, again=5 if rows else 1)


def _address(url: str) -> tuple[str, str]:
    """A URL's host name, and it with its port; both empty if it is none."""
    try:
        found = urlsplit(url)
    except ValueError:
        return "", ""
    return (found.hostname or "").lower(), found.netloc.lower()


def _number(request: Request) -> int:
    """The number in an address such as part/GENERATION-NUMBER-ROWS."""
    return _whole(request.path_params["at"].partition("-")[2].partition("-")[0])


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
