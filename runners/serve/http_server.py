"""An HTTP server in a thread of its own: who may ask, how much, and what may go wrong."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from runners.errors import error_line
from runners.machine.terminal import echo
from runners.serve.service import Limits, News, hand_out
from runners.serve.wire import ApiError

LOCAL = ("127.0.0.1", "localhost", "[::1]")
RETRY = {"Retry-After": "1"}


class HttpServer:
    """Answers while its `with` block runs."""

    def __init__(self, routes: Sequence[Route], limits: Limits, host: str, port: int) -> None:
        """Port 0: any free one. OSError if the address cannot be had."""
        self.limits = limits
        # Calls listeners in the server's thread; outside of the `with` block as they are.
        self.deliver: Callable[[News], object] = hand_out
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self._host = f"[{host}]" if ":" in host else host
        self.url = f"http://{self._host}:{self._socket.getsockname()[1]}"
        self._router = Router(routes)
        config = uvicorn.Config(
            self._guarded,
            interface="asgi3",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=int(limits.idle),
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._runs = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        self._runs.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.deliver = hand_out
        self._socket.close()

    def _serve(self) -> None:
        async def serve() -> None:
            loop = asyncio.get_running_loop()
            self.deliver = partial(loop.call_soon_threadsafe, hand_out)
            self._runs.set()
            await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or refuses it with an error in OpenAI's form."""
        started = False

        async def bounded(message: Message) -> None:
            nonlocal started
            started = True
            async with asyncio.timeout(self.limits.idle):
                await send(message)  # waits for a reader that is slow

        try:
            self._check(scope["headers"])
            await self._router({**scope, "app": self}, receive, bounded)
            return
        except ClientDisconnect:  # before its body was here
            return
        except HTTPException as error:
            fault = ApiError(error.detail, status=error.status_code)
        except ApiError as error:
            fault = error
        except Exception as error:
            if started:  # by closing the connection
                raise
            echo(f"{scope['path']}: {error_line(error)}", err=True)
            fault = ApiError("the server failed", status=500)
        headers = RETRY if fault.status in (429, 503) else None
        await JSONResponse(fault.body, fault.status, headers)(scope, receive, bounded)

    def _check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise ApiError for a request that another site's page may have made.

        A page in a browser reaches this machine's servers by a name that it makes point here
        (Host), or as they are (Origin).
        """
        found = {name: value.decode("latin-1") for name, value in headers}
        host = found.get(b"host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._host in LOCAL and name not in LOCAL:
            raise ApiError(f"Host: expected one of {', '.join(LOCAL)}", status=403)
        origin = found.get(b"origin", f"http://{host}").lower()
        if origin not in (f"http://{host}", f"https://{host}"):
            raise ApiError("Origin: requests of other sites are refused", status=403)

    async def _body(self, request: Request) -> bytes:
        """A request's body, bounded in size and time."""
        limits = self.limits
        body = b""
        try:
            async with asyncio.timeout(limits.idle):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limits.body:
                        raise ApiError(f"the body has over {limits.body:,} bytes", status=413)
        except TimeoutError:
            raise ApiError("the body did not come in time", status=408) from None
        return body


class Connection(H11Protocol):
    """Closes if no whole request comes within `timeout_keep_alive`."""

    _seen: Any = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _tick(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self.cycle is self._seen:
            self.transport.close()
        else:
            self._seen = self.cycle
            self._timer = self.loop.call_later(self.timeout_keep_alive, self._tick)
