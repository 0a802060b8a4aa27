"""Serves a `Service` over HTTP, in a separate thread."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, Self

import attrs
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from runners.data.rendering import encode_raw
from runners.engines.engine import Row
from runners.errors import UserError, error_line
from runners.machine.terminal import echo
from runners.serve import wire
from runners.serve.chat import Chat, Reply, ReplyReader, ReplyStream, ServedModel, message_key
from runners.serve.service import Limits, News, Service, hand_out
from runners.serve.sessions import Point, Refused, Session, Turn
from runners.serve.wire import Answer, ApiError, Asked

LOCAL = ("127.0.0.1", "localhost", "[::1]")
RETRY = {"Retry-After": "1"}


class Gone(Exception):
    """Raised if the client has disconnected, or if the call has reached its time limit."""


@attrs.frozen(eq=False, kw_only=True)
class Call:
    """One request's completions, and their results so far."""

    session: Session
    answer: Answer
    turns: list[Turn]
    reader: ReplyReader
    # Pairs of a turn's number and either its new tokens and log-probs, or its outcome.
    news: asyncio.Queue[tuple[int, Any]] = attrs.field(factory=asyncio.Queue)

    def put(self, number: int, *what: Any) -> None:
        """Adds an update for a turn."""
        self.news.put_nowait((number, what[0] if len(what) == 1 else what))

    def reply(self, number: int, row: Row) -> Reply:
        """Parses a completion as a message, and records the chat so that a later call may continue
        it.
        """
        reply = self.reader.read(self.answer.model.decoder.decode(row.tokens), whole=True)
        chat = self.answer.asked.chat
        if chat is not None:
            ends = {message_key(reply.message, thoughts=thoughts) for thoughts in (True, False)}
            self.session.record(self.turns[number], [[*chat.keys, end] for end in ends])
            self.session.messages = (*chat.messages, reply.message)
        return reply


class HttpServer:
    """An HTTP server that answers requests while its `with` block is active."""

    def __init__(self, routes: Sequence[Route], limits: Limits, host: str, port: int) -> None:
        """Opens the socket; port 0 selects a free port. Raises OSError if the address is not
        available.
        """
        self.limits = limits
        # Calls the listeners: in the server's thread inside the `with` block, otherwise directly.
        self.deliver: Callable[[News], object] = hand_out
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        name = f"[{host}]" if ":" in host else host
        self.is_local = name in LOCAL  # whether only this machine can reach the server
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"
        self._router = Router(routes)
        self._server = uvicorn.Server(
            uvicorn.Config(
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
        )
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
        """Answers a request, or refuses it with an error in OpenAI's format."""
        started = False

        async def bounded(message: Message) -> None:
            nonlocal started
            started = True
            async with asyncio.timeout(self.limits.idle):
                await send(message)  # blocks while the client reads slowly

        try:
            self._check(scope["headers"])
            await self._router({**scope, "app": self}, receive, bounded)
            return
        except ClientDisconnect:  # the client left before the body was received
            return
        except HTTPException as error:
            fault = ApiError(error.detail, status=error.status_code)
        except ApiError as error:
            fault = error
        except UserError as error:
            fault = ApiError(str(error))
        except Exception as error:
            if started:  # the error closes the connection
                raise
            echo(f"{scope['path']}: {error_line(error)}", err=True)
            fault = ApiError("the server failed", status=500)
        headers = RETRY if fault.status in (429, 503) else None
        await JSONResponse(fault.body, fault.status, headers)(scope, receive, bounded)

    def _check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises ApiError if another site's page may have sent the request.

        A page in a browser could reach this machine's servers through a host name that resolves to
        this machine (checked by Host), or directly (checked by Origin).
        """
        found = {name: value.decode("latin-1") for name, value in headers}
        host = found.get(b"host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self.is_local and name not in LOCAL:
            raise ApiError(f"Host: expected one of {', '.join(LOCAL)}", status=403)
        origin = found.get(b"origin", f"http://{host}").lower()
        if origin not in (f"http://{host}", f"https://{host}"):
            raise ApiError("Origin: requests from other sites are refused", status=403)

    async def _body(self, request: Request) -> bytes:
        """Reads a request's body, within the limits on size and time."""
        limits = self.limits
        body = b""
        try:
            async with asyncio.timeout(limits.idle):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limits.body:
                        raise ApiError(f"the body is larger than {limits.body:,} bytes", status=413)
        except TimeoutError:
            raise ApiError("the body was not received in time", status=408) from None
        return body


class Server(HttpServer):
    """Serves OpenAI's and vLLM's APIs. The thread that calls `service.run` decodes."""

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 0,
        public: Session | None = None,
    ) -> None:
        """Calls without a session's key use the session `public`. If `public` is None, such calls
        are refused. See `HttpServer`.
        """
        readers = {
            "/v1/chat/completions": wire.read_chat,
            "/v1/completions": wire.read_completion,
            "/inference/v1/generate": wire.read_generate,
        }
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            *(
                Route(path, partial(self._complete, read), methods=["POST"])
                for path, read in readers.items()
            ),
        ]
        super().__init__(routes, service.limits, host, port)
        self.service = service
        self._public = public
        service.deliver = lambda news: self.deliver(news)
        self._tokenizing = ThreadPoolExecutor(1, "tokenizing")  # tokenizers are not thread-safe

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def _session(self, request: Request) -> Session:
        """Returns the session for a request's key. Raises ApiError if there is none."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self.service.session(key.strip()) if scheme.lower() == "bearer" else None
        session = session or self._public
        if session is None:
            raise ApiError("the API key is invalid", status=401, code="invalid_api_key")
        return session

    # Endpoints.

    async def _health(self, request: Request) -> Response:
        ends = self.service.draining
        return JSONResponse({"status": "ending" if ends else "ok"}, 503 if ends else 200)

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = self.service.model
        card = {"id": model.name, "max_model_len": model.length, "created": 0}
        data = [{**card, "object": "model", "owned_by": "grpo_fn"}]
        return JSONResponse({"object": "list", "data": data})

    async def _complete(
        self, read: Callable[[dict[str, Any]], Asked], request: Request
    ) -> Response:
        """Answers a completion request, in one response or as a stream."""
        session = self._session(request)
        asked = read(wire.read_json(await self._body(request)))
        if session.sampling is None:
            wire.check_name(self.service.model, asked.given.get("model"))
        try:
            session.count()
            loop = asyncio.get_running_loop()
            call = await loop.run_in_executor(self._tokenizing, self._prepared, session, asked)
            self.service.submit(call.turns)
        except Refused as error:
            raise ApiError(str(error), status=error.status, code=error.code) from error
        except UserError as error:  # raised by the chat template or the tokenizer
            raise ApiError(str(error), "messages" if asked.chat else "prompt") from error
        if asked.given.get("stream"):
            return StreamingResponse(
                self._chunks(call, request.receive), media_type="text/event-stream"
            )
        try:
            rows = dict([news async for news in self._news(call, request.receive)])
        except Gone:
            raise ApiError("the call exceeded its time limit", status=408) from None
        found = [rows[number] for number in range(len(call.turns))]
        replies = [call.reply(number, row) for number, row in enumerate(found)]
        return JSONResponse(call.answer.whole(found, replies))

    def _prepared(self, session: Session, asked: Asked) -> Call:
        """Tokenizes a call's prompts and starts its turns. A prompt that continues an earlier call
        reuses that call's exact token ids.
        """
        model = self.service.model
        prompts: list[tuple[tuple[int, ...], Point | None]] = []
        if asked.chat is not None:
            prompts.append(_prompt(session, model, asked.chat))
        for prompt in asked.prompts:
            ids = encode_raw(model.tokenizer, prompt) if isinstance(prompt, str) else prompt
            model.check(ids)
            prompts.append((ids, session.point_in(ids)))
        marks = () if asked.chat is None else model.marks(asked.chat)
        count = asked.given.get("n", 1)
        # Completions that do not keep their caches share their prompt's cache while decoding.
        keep = count == 1 and (asked.chat is not None or asked.ids)
        turns: list[Turn] = []
        try:
            for ids, point in prompts:
                sampling = asked.sampling(model, len(ids))
                sampling = attrs.evolve(sampling, eos_ids=sampling.eos_ids | {*marks[1:2]})
                for _ in range(count):
                    turns.append(
                        session.begin(ids, point, sampling, asked.seed_of(len(turns)), keep=keep)
                    )
        except BaseException:
            for turn in turns:
                session.ended(turn, Refused(""))
            raise
        call = Call(
            session=session,
            answer=Answer(asked=asked, model=model, prompts=[ids for ids, _ in prompts]),
            turns=turns,
            reader=model.reader(asked.chat, turns[0].sampling.stop, first=prompts[0][1] is None),
        )
        for number, turn in enumerate(turns):
            turn.end = partial(call.put, number)
            turn.hear = turn.end if asked.given.get("stream") else None
        return call

    async def _news(self, call: Call, receive: Receive) -> AsyncGenerator[tuple[int, Any]]:
        """Yields a call's updates until all its turns have ended. If the client disconnects or the
        iterator is closed, the remaining turns are cancelled.
        """
        loop = asyncio.get_running_loop()
        leaving = loop.create_task(_leave(receive, call))
        timer = loop.call_later(self.limits.seconds, call.put, -1, Gone())
        left = len(call.turns)
        try:
            while left:
                number, what = await call.news.get()
                if isinstance(what, Gone):
                    raise what
                if isinstance(what, Exception):
                    raise ApiError(
                        error_line(what), status=503 if isinstance(what, Refused) else 500
                    )
                left -= isinstance(what, Row)
                yield number, what
        finally:
            leaving.cancel()
            timer.cancel()
            for turn in call.turns:
                if not turn.over:
                    self.service.cancel(turn)

    async def _chunks(self, call: Call, receive: Receive) -> AsyncGenerator[bytes]:
        """Yields a call's answer as server-sent events."""
        answer = call.answer
        asked = answer.asked
        streams = [ReplyStream(call.reader, answer.model.decoder) for _ in call.turns]
        whole = asked.logprobs or asked.given.get("return_token_ids")
        sampled = 0
        try:
            for number in range(len(call.turns)) if asked.chat else ():
                yield event(
                    answer.chunk(number, {"role": "assistant", "content": ""}, first=number == 0)
                )
            async with aclosing(self._news(call, receive)) as news:
                async for number, what in news:
                    if isinstance(what, Row):
                        reply = call.reply(number, what)
                        delta = wire.delta_of(streams[number].rest(reply))
                        finish = "tool_calls" if reply.calls else what.finish
                        yield event(answer.chunk(number, delta, finish=finish))
                        continue
                    first = not (sampled or asked.chat)
                    sampled += len(what[0])
                    delta = wire.delta_of(streams[number].add(what[0]))
                    if delta or whole:
                        yield event(answer.chunk(number, delta, *what, first=first))
            if asked.given.get("stream_options", {}).get("include_usage"):
                yield event(answer.usage_chunk(sampled))
        except ApiError as error:
            yield event(error.body)
        except Gone:
            return
        yield b"data: [DONE]\n\n"


class Connection(H11Protocol):
    """An HTTP connection that closes if no complete request arrives within `timeout_keep_alive`."""

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


def event(value: dict[str, Any]) -> bytes:
    """Encodes an object as a server-sent event."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def _prompt(
    session: Session, model: ServedModel, chat: Chat
) -> tuple[tuple[int, ...], Point | None]:
    """Tokenizes a chat's prompt. If the chat continues an earlier chat of the session, the prompt
    starts with the earlier chat's exact ids, and the point where it ends is returned too.
    """
    point, keys = session.point(chat.keys)
    if point is not None:
        given = model.following(point.ids, chat, chat.messages[keys - 1 :])
        if given is not None:
            return (*point.ids, *given), point
    return model.prompt(chat), None


async def _leave(receive: Receive, call: Call) -> None:
    """Waits until the client disconnects, and then reports it to the call."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.put(-1, Gone())
