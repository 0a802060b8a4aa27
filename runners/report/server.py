"""The live page: a small server that reads the files of runs, and notifies open pages when they grow.

It writes nothing. It answers only requests whose Host and Origin are its own, so that no other web page can
read a run through the browser.
"""

from __future__ import annotations

import asyncio
import html
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from runners.errors import UserError
from runners.report.live_run import LiveRun
from runners.report.page import page, small_page
from runners.report.run_record import RunRecord, is_run_folder

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST, PORT = "127.0.0.1", 8517
_TRIED = 20  # ports, from the wanted one on
_LOOK = 0.4  # seconds between two checks of a run's files
_PAUSE = 1.0  # least seconds between two events: each makes an open page fetch new data
_BEAT = 15.0  # seconds after which an idle stream sends a sign of life
_LOCAL = ("127.0.0.1", "localhost", "::1")


def check_server_installed() -> None:
    """Raises UserError if a package is missing."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"the live page needs {' and '.join(missing)}: `pip install starlette uvicorn`")


def listening(host: str, port: int) -> socket.socket:
    """A socket on the port, or on the next free one; 0: on any. UserError if none is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    fault: OSError | None = None
    for number in [port] if port == 0 else range(port, min(port + _TRIED, 65536)):
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, number))
            found.listen(64)
            return found
        except OSError as error:
            found.close()
            fault = error
    raise UserError(f"{host}, port {port}: cannot be listened on: {fault and (fault.strerror or fault)}")


def address(found: socket.socket) -> str:
    """The URL of a socket."""
    host, port = found.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(place: Path, found: socket.socket, hosts: Sequence[str] = (), *, with_parent: bool = False) -> None:
    """Serves the run in `place`, or the runs in it, until Ctrl-C.

    Args:
        place: a run's folder, or one that holds runs' folders.
        found: the socket from `listening`.
        hosts: host names that the server answers to, besides those of this machine's loopback.
        with_parent: also ends when standard input ends, and so with the process that started this one.
    """
    import uvicorn

    host = found.getsockname()[0]
    ends: list[Callable[[], bool]] = []
    settings = uvicorn.Config(
        application(place, (*_LOCAL, host, *hosts), lambda: any(end() for end in ends)),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=3,
        lifespan="off",
    )
    server = uvicorn.Server(settings)
    ends.append(lambda: server.should_exit)
    if with_parent:
        threading.Thread(target=_until_alone, args=(server,), daemon=True).start()
    try:
        server.run(sockets=[found])
    except KeyboardInterrupt:  # how a person ends it
        return


def application(
    place: Path, hosts: Sequence[str], is_ending: Callable[[], bool] = lambda: False
) -> Starlette:
    """The server's application, for requests whose Host is among `hosts`; streams end with `is_ending`."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
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

    def run_of(request: Request) -> LiveRun:
        name = request.path_params["run"]
        folder = runs_in(place).get(name)
        if folder is None:
            raise LookupError(name)
        with guard:
            return known.setdefault(folder, LiveRun(folder))

    async def answer(request: Request, make: Callable[[LiveRun], bytes | None]) -> Response:
        try:
            run = await run_in_threadpool(run_of, request)
            content = await run_in_threadpool(make, run)
        except (LookupError, UserError):
            content = None
        if content is None:
            return PlainTextResponse("not found\n", 404)
        return Response(content, media_type="application/octet-stream")

    async def index(request: Request) -> Response:
        found = await run_in_threadpool(runs_in, place)
        if list(found.values()) == [place]:
            return RedirectResponse(f"run/{quote(next(iter(found)), safe='')}/", 303)
        return HTMLResponse(await run_in_threadpool(list_page, place, found))

    async def run_page(request: Request) -> Response:
        try:
            run = await run_in_threadpool(run_of, request)
        except (LookupError, UserError):
            return PlainTextResponse("not found\n", 404)
        await run_in_threadpool(run.record.refresh)
        begin = {"mode": "live", "at": "first", "run": "data", "events": "events"}
        alone = await run_in_threadpool(lambda: list(runs_in(place).values()) == [place])
        return HTMLResponse(page(run.record.name, [], begin | ({} if alone else {"list": "../../"})))

    async def first(request: Request) -> Response:
        return await answer(request, lambda run: run.data(-1, 0))

    async def data(request: Request) -> Response:
        asked = {name: _whole(request.query_params.get(name)) for name in ("generation", "since")}
        return await answer(request, lambda run: run.data(asked["generation"], max(asked["since"], 0)))

    async def part(request: Request) -> Response:
        number, piece = _whole(request.path_params["at"].split("-")[1:2]), request.path_params["piece"]
        return await answer(request, lambda run: run.part(number, piece))

    async def evaluation(request: Request) -> Response:
        number = _whole(request.path_params["at"].split("-")[1:2])
        return await answer(request, lambda run: run.evaluation(number))

    async def events(request: Request) -> Response:
        try:
            run = await run_in_threadpool(run_of, request)
        except (LookupError, UserError):
            return PlainTextResponse("not found\n", 404)

        async def stream() -> AsyncIterator[bytes]:
            before, said = run.signature(), time.monotonic()
            yield b"retry: 1000\n\n"
            while not is_ending() and not await request.is_disconnected():
                await asyncio.sleep(_LOOK)
                now = await run_in_threadpool(run.signature)
                if now != before and time.monotonic() - said >= _PAUSE:
                    before, said = now, time.monotonic()
                    yield f"data: {json.dumps({'state': now[-1]})}\n\n".encode()
                elif now == before and time.monotonic() - said > _BEAT:
                    said = time.monotonic()
                    yield b": still here\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

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
    app = Starlette(routes=routes)
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
        if _name_of(f"//{host}") not in self.hosts:
            text = f"Host: {host[:100]} is not served here; `grpo watch --allow-host NAME` adds a name\n"
            return await PlainTextResponse(text, 403)(scope, receive, send)
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
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
    """The runs that are served, by name: the one in `place`, or those in its folders."""
    if is_run_folder(place):
        return {place.name or "run": place}
    try:
        inside = [path for path in place.iterdir() if path.is_dir() and is_run_folder(path)]
    except OSError:
        return {}
    return {path.name: path for path in sorted(inside)}


def list_page(place: Path, found: dict[str, Path]) -> str:
    """The page with the runs of a folder; it reloads itself, because it has no script."""
    rows = []
    for name, folder in found.items():
        record = RunRecord(folder)
        record.refresh()
        scores = [value for value in record.columns.get("em", []) if value is not None]
        updates = [value for value in record.columns.get("update", []) if value is not None]
        rewards = [value for value in record.columns.get("reward", []) if value is not None]
        cells = (
            f'<a href="run/{quote(name, safe="")}/">{html.escape(name)}</a>',
            html.escape(record.state()),
            f"{scores[-1]:.1%}" if scores else "–",
            f"{rewards[-1]:.4g}" if rewards else "–",
            str(max(updates, default=0)),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("run", "state", "exact match", "reward", "updates"))
    empty = "<p class='empty'>No run has begun here yet. This page looks again.</p>"
    table = (
        f"<table class='facts compare'><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
    return small_page(f"Runs in {place.name or place}", table if rows else empty, again=5 if rows else 1)


def _name_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _whole(value: Any) -> int:
    text = value[0] if isinstance(value, list) and value else value
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 12 else -1


def _until_alone(server: Any) -> None:
    while sys.stdin.buffer.read(1 << 12):
        pass
    server.should_exit = True
