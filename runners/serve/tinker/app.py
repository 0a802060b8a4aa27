"""The HTTP server of a `Trainer`: Tinker's calls, answered by futures."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import secrets
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runners.engines import engine
from runners.errors import UserError, error_line, show
from runners.serve.chat import ServedModel
from runners.serve.http_server import HttpServer
from runners.serve.service import Limits
from runners.serve.tinker import wire
from runners.serve.tinker.losses import Rows, check_data, loss_of, spec_of
from runners.serve.tinker.trainer import (
    SAMPLING,
    TRAINING,
    Ended,
    Model,
    Sample,
    Sampler,
    Trainer,
)
from runners.serve.wire import ApiError

ANNOUNCED = 128  # completions in an answer: the client fetches them all at once
CLONES = 1_000_000_000  # numbers of requests of each copy of a sampling client


@attrs.frozen(kw_only=True)
class TrainingLimits(Limits):
    """What clients may use up; `rows` are completions that wait or decode."""

    rows: int = 65_536
    hold: float = 20.0  # seconds after which a future that is not done is answered "not yet"
    vanish: float = 300.0  # seconds without a heartbeat, after which a session ends
    gap: float = 60.0  # seconds in which a request with a smaller number must come
    sessions: int = 256
    models: int = 32  # in training
    samplers: int = 16  # of a session: the latest ones
    futures: int = 16_384  # answers that are to come, or were not fetched
    fetched: int = 512  # answers of a session that may be fetched once more
    queued: int = 256_000_000  # bytes of data that wait for their turn


@attrs.define(eq=False)
class Future:
    """An answer that is to come."""

    id: str
    session: TrainingSession
    heard: Callable[[Future], object]
    said: dict[str, Any]  # the promise
    outcome: Any = None  # JSON, bytes of protobuf, or a fault
    done: asyncio.Event = attrs.field(factory=asyncio.Event)
    cancelled: bool = False

    def set(self, outcome: Any) -> None:
        """The answer has come."""
        if isinstance(outcome, Exception):
            known = isinstance(outcome, UserError | ApiError | Ended)
            category = "user" if known else "server"
            outcome = {"error": error_line(outcome), "category": category}
        self.outcome = outcome
        self.done.set()
        self.heard(self)

    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.cancelled or self.session.over


@attrs.define(eq=False)
class Slot:
    """A model, and its requests that wait for one with a smaller number."""

    id: str
    session: TrainingSession
    model: Model | None = None  # None: it is not made yet, or could not be
    next: int = 1
    held: dict[int, tuple[Future, Callable[[], Any]]] = attrs.field(factory=dict)
    timer: asyncio.TimerHandle | None = None


@attrs.define(eq=False)
class Way:
    """A sampling session: a client's way to a sampler, and its futures that are done."""

    id: str
    path: str | None = None  # of saved weights
    sampler: Sampler | None = None  # None: it is not made yet, or could not be
    done: int = 0  # futures
    # Those that the client does not know of, by the number of its copy, with their places.
    news: dict[int, deque[tuple[int, dict[str, str]]]] = attrs.field(
        factory=lambda: defaultdict(deque)
    )
    changed: asyncio.Event = attrs.field(factory=asyncio.Event)


@attrs.define(eq=False)
class TrainingSession:
    """What a client has made."""

    id: str
    slots: dict[str, Slot] = attrs.field(factory=dict)
    ways: OrderedDict[str, Way] = attrs.field(factory=OrderedDict)
    fetched: deque[str] = attrs.field(factory=deque)
    over: bool = False
    timer: asyncio.TimerHandle | None = None


class TrainingServer(HttpServer):
    """Serves Tinker's wire; the thread that calls `trainer.run` does the work."""

    def __init__(
        self,
        trainer: Trainer,
        model: ServedModel,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str = "",
        limits: TrainingLimits | None = None,
    ) -> None:
        """`key`: that clients must send; empty: any. See `HttpServer`."""
        calls: dict[str, Callable[[dict[str, Any]], Any]] = {
            "healthz": lambda asked: {"status": "ok"},
            "telemetry": lambda asked: {"status": "accepted"},
            "client/config": lambda asked: {"sample_use_retrieve_futures": True},
            "client/dynamic_config": lambda asked: {"sample_cancel_enabled": True},
            "join_sampling_session": lambda asked: {
                "client_counter": 1 + secrets.randbelow(CLONES)
            },
            "get_server_capabilities": self._capabilities,
            "create_session": self._create_session,
            "session_heartbeat": lambda asked: self._touch(self._session(asked["session_id"])),
            "sessions/{session_id}/finish": lambda asked: self._end(
                self._session(asked["session_id"])
            ),
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": partial(self._save, TRAINING),
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "samplers/{id}": self._sampler,
            "asample": self._asample,
            "cancel_future": self._cancel,
            "retrieve_future": self._retrieve,
            "retrieve_futures": self._retrieve_many,
        }
        routes = [
            Route(f"/api/v1/{name}", partial(self._call, name, call), methods=["GET", "POST"])
            for name, call in calls.items()
        ]
        self._limits = limits or TrainingLimits()
        super().__init__(routes, self._limits, host, port)
        self._trainer = trainer
        self._model = model
        self._key = key
        self._sessions: dict[str, TrainingSession] = {}
        self._futures: dict[str, Future] = {}
        self._bytes = 0  # of data that waits for its turn
        self._rows = 0
        trainer.deliver = lambda news: self.deliver(news)

    async def _call(self, name: str, call: Callable[[Any], Any], request: Request) -> Response:
        given = request.headers.get("x-api-key", "")
        if self._key and not secrets.compare_digest(given.encode(), self._key.encode()):
            raise ApiError("the API key is wrong", status=401)
        encoding = request.headers.get("content-encoding", "")
        body = wire.unpacked(await self._body(request), encoding, self._limits.body)
        asked = wire.read_body(name, body) | request.path_params
        try:
            answer = call(asked)
            answer = await answer if inspect.isawaitable(answer) else answer
        except UserError as error:
            raise ApiError(str(error)) from error
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/x-protobuf")
        return answer if isinstance(answer, Response) else JSONResponse(answer or {})

    # What there is.

    def _session(self, name: str) -> TrainingSession:
        """The session with this id, or that of a thing with this id."""
        session = self._sessions.get(name.partition(":")[0])
        if session is None:
            raise ApiError(f"the session of {show(name)} is over, or never was", status=410)
        return session

    def _slot(self, asked: dict[str, Any]) -> Slot:
        name = asked["model_id"]
        slot = self._session(name).slots.get(name)
        if slot is None:
            raise ApiError(f"there is no model {show(name)}", "model_id", status=404)
        return slot

    def _way(self, name: str) -> Way:
        ways = self._session(name).ways
        if name not in ways:
            kept = f"a session keeps its latest {self._limits.samplers}"
            raise ApiError(f"there is no sampling session {show(name)}: {kept}", status=404)
        ways.move_to_end(name)
        return ways[name]

    def _capabilities(self, asked: dict[str, Any]) -> dict[str, Any]:
        model = {"model_name": self._model.name, "max_context_length": self._model.length}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    def _check_base(self, name: str | None) -> None:
        if name not in (None, self._model.name):
            wanted = show(self._model.name)
            raise ApiError(f"there is no model {show(name)}; expected {wanted}", status=404)

    def _create_session(self, asked: dict[str, Any]) -> dict[str, Any]:
        if len(self._sessions) >= self._limits.sessions:
            raise ApiError(f"there are {self._limits.sessions} sessions already", status=429)
        session = TrainingSession(secrets.token_hex(8))
        self._sessions[session.id] = session
        self._touch(session)
        return {"session_id": session.id}

    def _touch(self, session: TrainingSession) -> None:
        """The session is alive."""
        if session.timer is not None:
            session.timer.cancel()
        loop = asyncio.get_running_loop()
        session.timer = loop.call_later(self._limits.vanish, self._end, session)

    def _end(self, session: TrainingSession) -> None:
        """Free all that a session holds."""
        session.over = True
        self._sessions.pop(session.id, None)
        for future in list(self._futures.values()):
            if future.session is session:
                del self._futures[future.id]
                future.set(Ended("the session is over"))
        session.slots.clear()

    # Futures.

    def _promise(
        self,
        name: str,
        session: TrainingSession,
        heard: Callable[[Future], object] = lambda future: None,
        **said: Any,
    ) -> Future:
        """A new future. ApiError if there is no room for it."""
        if self._trainer.draining:
            raise ApiError("the server ends", status=503)
        if len(self._futures) >= self._limits.futures:
            raise ApiError("too many requests are under way, or were not fetched", status=429)
        future = Future(name, session, heard, {"request_id": name, **said})
        self._futures[name] = future
        return future

    def _queue(self, future: Future, job: Callable[[], Any]) -> dict[str, Any]:
        """Hand a job to the trainer, unless nobody waits for it by then."""

        def unless_over() -> Any:
            if future.is_over():
                raise Ended("the session is over")
            return job()

        self._trainer.put(unless_over, future.set)
        return future.said

    def _ordered(
        self, asked: dict[str, Any], job: Callable[[Model], Any], size: int = 0
    ) -> dict[str, Any]:
        """Queue a job of a model behind those with smaller numbers. A repeated call is the same."""
        slot = self._slot(asked)
        number = asked["seq_id"]
        name = f"{slot.id}:{number}"
        if name in self._futures:
            return self._futures[name].said
        if number < slot.next:
            raise ApiError(f"seq_id: expected at least {slot.next}, found {number}", "seq_id")
        if number > slot.next and self._bytes + size > self._limits.queued:
            raise ApiError("too much data waits for its turn", status=429)

        def run() -> Any:
            if slot.model is None:
                raise UserError(f"the model {slot.id} could not be made")
            return job(slot.model)

        def heard(future: Future) -> None:
            self._bytes -= size

        self._bytes += size
        slot.held[number] = self._promise(name, slot.session, heard), run
        self._release(slot)
        return self._futures[name].said

    def _release(self, slot: Slot) -> None:
        """Queue what has its turn, and wait no longer than `gap` for what is missing."""
        while slot.next in slot.held:
            self._queue(*slot.held.pop(slot.next))
            slot.next += 1
        if slot.timer is not None:
            slot.timer.cancel()
        loop = asyncio.get_running_loop()
        wait = loop.call_later(self._limits.gap, self._skip, slot) if slot.held else None
        slot.timer = wait

    def _skip(self, slot: Slot) -> None:
        """Fail what waits for a request that has not come."""
        fault = UserError(f"request {slot.next} of {slot.id} did not come, so this has no turn")
        if slot.model is not None:
            slot.model.fault = str(fault)
        slot.next = max(slot.held) + 1
        for future, _ in slot.held.values():
            future.set(fault)
        slot.held.clear()

    def _cancel(self, asked: dict[str, Any]) -> None:
        if asked["request_id"] in self._futures:
            self._futures[asked["request_id"]].cancelled = True

    async def _retrieve(self, asked: dict[str, Any]) -> Any:
        name = asked["request_id"]
        future = self._futures.get(name)
        if future is None:
            raise ApiError(f"there is no request {show(name)}, or its answer is gone", status=410)
        try:
            await asyncio.wait_for(future.done.wait(), self._limits.hold)
        except TimeoutError:
            waits = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(waits, 408)
        fetched = future.session.fetched
        fetched.append(name)
        if len(fetched) > self._limits.fetched:
            self._futures.pop(fetched.popleft(), None)
        return future.outcome

    async def _retrieve_many(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What is done of the requests of a sampling client, or of a copy of it."""
        target = wire.read("target", asked["target"])
        way = self._way(target["sampling_session_id"])
        for name in asked["retrieved_request_ids"]:
            if name.startswith(f"{way.id}:"):
                self._futures.pop(name, None)
        news = way.news[target["cloned_sampler_id"]]
        cursor = asked["prev_cursor"]
        while news and news[0][0] <= cursor:
            news.popleft()
        if not news:
            way.changed.clear()
            hold = self._limits.hold if asked["timeout"] is None else asked["timeout"]
            with suppress(TimeoutError):
                await asyncio.wait_for(way.changed.wait(), min(hold, self._limits.hold))
        done = list(itertools.islice(news, ANNOUNCED))
        last = done[-1][0] if done else cursor
        return {"completions": [each for _, each in done], "cursor": last}

    # Models.

    def _make(self, asked: dict[str, Any], make: Callable[[], Model]) -> dict[str, Any]:
        """A new model. A repeated call is the same."""
        session = self._session(asked["session_id"])
        optimizer = wire.read("optimizer_config", asked["optimizer_config"] or {})["type"]
        if optimizer != "adamw":
            raise UserError(f"optimizer_config: expected adamw, found {show(optimizer)}")
        self._check_base(asked["base_model"])
        name = f"{session.id}:train:{asked['model_seq_id']}"
        if name in session.slots:
            return {"request_id": f"{name}:make"}
        if sum(len(each.slots) for each in self._sessions.values()) >= self._limits.models:
            raise UserError(f"{self._limits.models} models are in training already")
        slot = Slot(name, session)

        def job() -> dict[str, Any]:
            slot.model = make()
            return {"model_id": name, "path": asked.get("path")}

        promise = self._queue(self._promise(f"{name}:make", session), job)
        session.slots[name] = slot
        return promise

    def _create_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        lora = wire.read("lora_config", asked["lora_config"])
        parts = [part for part in ("attn", "mlp", "unembed") if lora[f"train_{part}"]]
        make = partial(self._trainer.create, lora["rank"], parts, lora["seed"])
        return self._make(asked, make)

    def _load_weights(self, asked: dict[str, Any]) -> dict[str, Any]:
        path = asked["path"]
        optimizer = asked["optimizer"]
        if asked["session_id"]:
            return self._make(asked, partial(self._trainer.restore, path, optimizer=optimizer))

        def job(model: Model) -> dict[str, Any]:
            self._trainer.load(model, path, optimizer=optimizer)
            return {"model_id": asked["model_id"], "path": path}

        return self._ordered(asked, job)

    def _get_info(self, asked: dict[str, Any]) -> dict[str, Any]:
        model = self._slot(asked).model
        if model is None:
            raise UserError("the model could not be made")
        rank = model.kind.about["lora_parameters"]["rank"]
        name = self._model.name
        data = {"model_name": name, "tokenizer_id": str(self._trainer.path)}
        about = {"model_id": asked["model_id"], "model_name": name, "model_data": data}
        return {**about, "is_lora": True, "lora_rank": rank}

    def _forward_backward(self, asked: dict[str, Any]) -> dict[str, Any]:
        message = asked["message"]

        def read() -> Rows:
            loss = loss_of(message.loss_fn)
            spec = spec_of(loss, wire.loss_config(message))
            data = wire.data_of(message)
            check_data(data, loss, self._model.vocabulary, self._model.length)
            return Rows(data, loss, spec)

        def job(model: Model) -> bytes:
            backward = not message.forward_only
            return wire.forward_output(*self._trainer.forward(model, read, backward=backward))

        return self._ordered(asked, job, asked["size"])

    def _optim_step(self, asked: dict[str, Any]) -> dict[str, Any]:
        def job(model: Model) -> dict[str, Any]:
            return self._trainer.update(model, wire.rates_of(asked["adam_params"]))

        return self._ordered(asked, job)

    def _save(self, part: str, asked: dict[str, Any]) -> dict[str, Any]:
        path = f"tinker://{asked['model_id']}/{part}/{asked['path'] or asked['seq_id']}"
        overwrite = part == SAMPLING or asked["overwrite"]
        return self._ordered(
            asked, lambda model: self._trainer.save(model, path, overwrite=overwrite)
        )

    # Sampling.

    def _new_way(self, session: TrainingSession, number: int, path: str | None = None) -> Way:
        """A new sampling session, in place of the one that was not used for longest."""
        way = Way(f"{session.id}:sample:{number}", path)
        way = session.ways.setdefault(way.id, way)
        if len(session.ways) > self._limits.samplers:
            session.ways.popitem(last=False)
        return way

    def _save_for_sampler(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["sampling_session_seq_id"] is None:
            return self._save(SAMPLING, asked)
        if asked["kind"] not in ("snapshot", "inflight"):
            raise UserError(f"kind: expected snapshot or inflight, found {show(asked['kind'])}")
        way = self._new_way(self._slot(asked).session, asked["sampling_session_seq_id"])

        def job(model: Model) -> dict[str, Any]:
            way.sampler = Sampler(model.kind, model.state.params)
            return {"sampling_session_id": way.id}

        return self._ordered(asked, job)

    def _create_sampling_session(self, asked: dict[str, Any]) -> dict[str, Any]:
        session = self._session(asked["session_id"])
        path = asked["model_path"]
        self._check_base(asked["base_model"])
        if path is not None and not self._trainer.place(path).is_dir():
            raise ApiError(f"there are no weights {show(path)}", "model_path", status=404)
        way = self._new_way(session, asked["sampling_session_seq_id"], path)

        def job() -> None:
            way.sampler = self._trainer.sampler(path)

        self._trainer.put(job, lambda fault: None)
        return {"sampling_session_id": way.id}

    def _sampler(self, asked: dict[str, Any]) -> dict[str, Any]:
        way = self._way(asked["id"])
        return {"sampler_id": way.id, "base_model": self._model.name, "model_path": way.path}

    def _asample(self, asked: dict[str, Any]) -> dict[str, Any]:
        wire.refuse_extras(asked)
        way = self._way(asked["sampling_session_id"])
        name = f"{way.id}:{asked['seq_id']}"
        if name in self._futures:
            return self._futures[name].said
        prompt = wire.prompt_of(asked["prompt"])
        self._model.check(prompt)
        sampling = wire.sampling_of(asked["sampling_params"], self._model, len(prompt))
        count = asked["num_samples"]
        if self._rows + count > self._limits.rows:
            raise ApiError("too many completions are under way", status=429)

        def heard(future: Future) -> None:
            self._rows -= count
            way.done += 1
            state = "failed" if isinstance(future.outcome, dict) else "finished"
            news = way.news[asked["seq_id"] // CLONES]
            news.append((way.done, {"state": state, "request_id": name}))
            way.changed.set()

        def source() -> Sampler:
            if way.sampler is None:
                raise UserError(f"the weights of {way.path or way.id} could not be read")
            return way.sampler

        ids = [f"{name}:{number}" for number in range(count)]
        future = self._promise(name, self._session(name), heard, sample_sequence_ids=ids)
        self._rows += count
        last = asked["prompt_logprobs_last_n"] or len(prompt)
        sample = Sample(
            source=source,
            request=engine.Request(prompt=prompt, seeds=wire.seeds_of(asked, count)),
            sampling=sampling,
            scored=min(last, len(prompt) - 1) if asked["prompt_logprobs"] else 0,
            answer=wire.sample_output,
            end=future.set,
            is_over=future.is_over,
        )
        self._trainer.put(partial(self._trainer.take, sample), future.set)
        return future.said
