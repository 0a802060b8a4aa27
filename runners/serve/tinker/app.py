"""The HTTP server of a `Trainer`: Tinker's calls, answered by futures."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import secrets
from collections import defaultdict, deque
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
from runners.serve.app import HttpServer
from runners.serve.chat import ServedModel
from runners.serve.service import Limits
from runners.serve.tinker import wire
from runners.serve.tinker.losses import check_data, loss_of
from runners.serve.tinker.trainer import SAMPLING, TRAINING, Ended, Model, Sample, Sampler, Trainer
from runners.serve.wire import ApiError

ANNOUNCED = 128  # completions in an answer: the client fetches them all at once
CLONES = 1_000_000_000  # numbers of requests of each copy of a sampling client
ROW = 4096  # bytes that a completion counts, while it waits or decodes
AGAIN = 60.0  # seconds in which an answer may be fetched once more
PARTS = ("attn", "mlp", "unembed")


@attrs.frozen(kw_only=True)
class TrainingLimits(Limits):
    """What clients may use up."""

    hold: float = 20.0  # seconds after which a future that is not done is answered "not yet"
    vanish: float = 300.0  # seconds without a heartbeat, after which a session ends
    gap: float = 60.0  # seconds in which a request with a smaller number must come
    sessions: int = 256
    models: int = 32  # in training
    samplers: int = 64  # the latest ones
    futures: int = 16_384  # answers that are to come, or were not fetched
    room: int = 268_435_456  # bytes of data and completions that wait


@attrs.define(eq=False)
class TrainingSession:
    """A client."""

    id: str
    over: bool = False
    timer: asyncio.TimerHandle | None = None


@attrs.define(eq=False)
class Future:
    """An answer that is to come. In place of itself, the client gets `said`."""

    session: TrainingSession
    heard: Callable[[Future], object]
    said: dict[str, Any]
    outcome: Any = None  # JSON, or bytes of protobuf
    done: asyncio.Event = attrs.field(factory=asyncio.Event)
    cancelled: bool = False

    def set(self, outcome: Any) -> None:
        """The answer has come, or a fault."""
        if isinstance(outcome, Exception):
            ours = not isinstance(outcome, UserError | ApiError | Ended)
            category = "server" if ours else "user"
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
    found: Model | None = None  # None: it is not made yet, or could not be
    next: int = 1
    held: dict[int, tuple[Callable[[], Any], Future]] = attrs.field(factory=dict)
    timer: asyncio.TimerHandle | None = None

    @property
    def model(self) -> Model:
        """Raises UserError if there is none."""
        if self.found is None:
            raise UserError(f"the model {self.id} could not be made")
        return self.found


@attrs.define(eq=False)
class Way:
    """A sampling session: a client's way to a sampler, and its futures that are done."""

    id: str
    session: TrainingSession
    path: str | None = None  # of saved weights
    found: Sampler | None = None  # None: it is not made yet, or could not be
    done: int = 0  # futures
    # Those that the client does not know of, by the number of its copy, with their places.
    news: dict[int, deque[Any]] = attrs.field(factory=lambda: defaultdict(deque))
    changed: asyncio.Event = attrs.field(factory=asyncio.Event)

    def sampler(self) -> Sampler:
        """Raises UserError if there is none."""
        if self.found is None:
            raise UserError(f"the weights of {self.path or self.id} could not be read")
        return self.found


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
            "get_server_capabilities": self._capabilities,
            "create_session": self._create_session,
            "session_heartbeat": lambda asked: self._touch(self._session(asked["session_id"])),
            "sessions/{id}/finish": lambda asked: self._end(self._session(asked["id"])),
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": partial(self._save, TRAINING),
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "join_sampling_session": lambda asked: {
                "client_counter": secrets.randbelow(CLONES) + 1
            },
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
        self._slots: dict[str, Slot] = {}
        self._ways: dict[str, Way] = {}
        self._futures: dict[str, Future] = {}
        self._room = self._limits.room
        trainer.deliver = lambda news: self.deliver(news)

    async def _call(self, name: str, call: Callable[[Any], Any], request: Request) -> Response:
        given = request.headers.get("x-api-key", "").encode()
        if self._key and not secrets.compare_digest(given, self._key.encode()):
            raise ApiError("the API key is wrong", status=401)
        encoding = request.headers.get("content-encoding", "")
        body = await self._body(request)
        asked = wire.read_body(name, body, encoding, self._limits.body) | request.path_params
        try:
            answer = call(asked)
            answer = await answer if inspect.isawaitable(answer) else answer
        except UserError as error:
            raise ApiError(str(error)) from error
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/x-protobuf")
        return JSONResponse(answer or {}, 408 if answer and "queue_state" in answer else 200)

    # What there is.

    def _session(self, name: str) -> TrainingSession:
        """The session with this id, or that of a thing with this id."""
        session = self._sessions.get(name.partition(":")[0])
        if session is None:
            raise ApiError(f"the session of {show(name)} is over, or never was", status=410)
        return session

    def _slot(self, name: str) -> Slot:
        self._session(name)
        if name not in self._slots:
            raise ApiError(f"there is no model {show(name)}", "model_id", status=404)
        return self._slots[name]

    def _way(self, name: str) -> Way:
        self._session(name)
        if name not in self._ways:
            kept = f"the latest {self._limits.samplers} are kept"
            raise ApiError(f"there is no sampling session {show(name)}: {kept}", status=404)
        self._ways[name] = self._ways.pop(name)  # it is the latest one
        return self._ways[name]

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
        for things in (self._slots, self._ways, self._futures):
            for name in [name for name, each in things.items() if each.session is session]:
                gone = things.pop(name)
                if isinstance(gone, Future) and not gone.done.is_set():
                    gone.set(Ended("the session is over"))

    # Futures.

    def _promise(
        self, name: str, session: TrainingSession, heard: Callable[[Future], object], cost: int = 0
    ) -> Future:
        """A new future, for which so many bytes wait. ApiError if there is no room for it."""
        if self._trainer.draining:
            raise ApiError("the server ends", status=503)
        if len(self._futures) >= self._limits.futures or cost > self._room:
            raise ApiError("too many requests are under way, or were not fetched", status=429)

        def free(future: Future) -> None:
            self._room += cost
            heard(future)

        self._room -= cost
        self._futures[name] = Future(session, free, {"request_id": name})
        return self._futures[name]

    def _ordered(
        self, asked: dict[str, Any], job: Callable[[Model], Any], cost: int = 0
    ) -> dict[str, Any]:
        """Queue a job of a model behind those with smaller numbers. A repeated call is the same."""
        slot = self._slot(asked["model_id"])
        number = asked["seq_id"]
        name = f"{slot.id}:{number}"
        if name not in self._futures:
            if number < slot.next:
                raise ApiError(f"seq_id: expected at least {slot.next}, found {number}", "seq_id")
            future = self._promise(name, slot.session, lambda future: None, cost)
            slot.held[number] = lambda: job(slot.model), future
            while slot.next in slot.held:
                self._trainer.put(*slot.held.pop(slot.next))
                slot.next += 1
            if slot.timer is not None:
                slot.timer.cancel()
            skip = asyncio.get_running_loop().call_later(self._limits.gap, self._skip, slot)
            slot.timer = skip
        return self._futures[name].said

    def _skip(self, slot: Slot) -> None:
        """Fail what waits for a request that has not come."""
        fault = UserError(f"request {slot.next} of {slot.id} did not come, so this has no turn")
        for number, (_, future) in slot.held.items():
            slot.next = max(slot.next, number + 1)
            slot.model.fault = str(fault)
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
            return {"type": "try_again", "request_id": name, "queue_state": "active"}
        asyncio.get_running_loop().call_later(AGAIN, self._futures.pop, name, None)
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
        cursor = done[-1][0] if done else cursor
        return {"completions": [each for _, each in done], "cursor": cursor}

    # Models.

    def _make(self, asked: dict[str, Any], make: Callable[[], Model]) -> dict[str, Any]:
        """A new model. A repeated call is the same."""
        session = self._session(asked["session_id"])
        self._check_base(asked["base_model"])
        name = f"{session.id}:train:{asked['model_seq_id']}"
        if name not in self._slots:
            if len(self._slots) >= self._limits.models:
                raise UserError(f"{self._limits.models} models are in training already")
            slot = Slot(name, session)

            def job() -> dict[str, Any]:
                slot.found = make()
                return {"model_id": name, "path": asked.get("path")}

            future = self._promise(f"{name}:make", session, lambda future: None)
            self._slots[name] = slot
            self._trainer.put(job, future)
        return {"request_id": f"{name}:make"}

    def _create_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        lora = wire.read("lora_config", asked["lora_config"])
        parts = [part for part in PARTS if lora[f"train_{part}"]]
        return self._make(asked, partial(self._trainer.create, lora["rank"], parts, lora["seed"]))

    def _load_weights(self, asked: dict[str, Any]) -> dict[str, Any]:
        how = {"optimizer": asked["optimizer"]}
        if asked["session_id"]:
            return self._make(asked, partial(self._trainer.restore, asked["path"], **how))
        return self._ordered(asked, partial(self._trainer.load, asked["path"], **how))

    def _get_info(self, asked: dict[str, Any]) -> dict[str, Any]:
        model = self._slot(asked["model_id"]).model
        rank = model.kind.about["lora_parameters"]["rank"]
        name = self._model.name
        data = {"model_name": name, "tokenizer_id": str(self._trainer.path)}
        about = {"model_id": asked["model_id"], "model_name": name, "model_data": data}
        return {**about, "is_lora": True, "lora_rank": rank}

    def _forward_backward(self, asked: dict[str, Any]) -> dict[str, Any]:
        message = asked["message"]

        def read() -> Any:
            loss, spec = loss_of(message.loss_fn, wire.loss_config(message))
            data = wire.data_of(message)
            check_data(data, loss, self._model.vocabulary, self._model.length)
            return data, loss, spec

        work = self._trainer.forward if message.forward_only else self._trainer.backward
        return self._ordered(
            asked, lambda model: wire.forward_output(*work(read, model)), asked["size"]
        )

    def _optim_step(self, asked: dict[str, Any]) -> dict[str, Any]:
        params = asked["adam_params"]
        return self._ordered(
            asked, lambda model: self._trainer.update(wire.rates_of(params), model)
        )

    def _save(self, part: str, asked: dict[str, Any]) -> dict[str, Any]:
        path = f"tinker://{asked['model_id']}/{part}/{asked['path'] or asked['seq_id']}"
        overwrite = asked.get("overwrite", True)
        return self._ordered(asked, partial(self._trainer.save, path, overwrite=overwrite))

    # Sampling.

    def _new_way(self, session: TrainingSession, number: int, path: str | None = None) -> Way:
        """A new sampling session, in place of the one that was not used for longest."""
        name = f"{session.id}:sample:{number}"
        if len(self._ways) >= self._limits.samplers:
            del self._ways[next(iter(self._ways))]
        return self._ways.setdefault(name, Way(name, session, path))

    def _save_for_sampler(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["sampling_session_seq_id"] is None:
            return self._save(SAMPLING, asked)
        session = self._session(asked["model_id"])
        way = self._new_way(session, asked["sampling_session_seq_id"])

        def job(model: Model) -> dict[str, Any]:
            way.found = self._trainer.snapshot(model)
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
            way.found = self._trainer.sampler(path)

        self._trainer.put(job, Future(session, lambda future: None, {}))
        return {"sampling_session_id": way.id}

    def _sampler(self, asked: dict[str, Any]) -> dict[str, Any]:
        way = self._way(asked["id"])
        return {"sampler_id": way.id, "base_model": self._model.name, "model_path": way.path}

    def _asample(self, asked: dict[str, Any]) -> dict[str, Any]:
        way = self._way(asked["sampling_session_id"])
        name = f"{way.id}:{asked['seq_id']}"
        if name in self._futures:
            return self._futures[name].said
        prompt = wire.prompt_of(asked["prompt"])
        self._model.check(prompt)
        sampling, seed = wire.sampling_of(asked["sampling_params"], self._model, len(prompt))
        count = asked["num_samples"]

        def heard(future: Future) -> None:
            way.done += 1
            state = "failed" if isinstance(future.outcome, dict) else "finished"
            done = {"state": state, "request_id": name}
            way.news[asked["seq_id"] // CLONES].append((way.done, done))
            way.changed.set()

        future = self._promise(name, way.session, heard, ROW * count)
        future.said["sample_sequence_ids"] = [f"{name}:{number}" for number in range(count)]
        last = asked["prompt_logprobs_last_n"] or len(prompt)
        sample = Sample(
            future,
            way.sampler,
            engine.Request(prompt=prompt, seeds=wire.seeds_of(seed, count)),
            sampling,
            min(last, len(prompt) - 1) if asked["prompt_logprobs"] else 0,
            wire.sample_output,
        )
        self._trainer.put(partial(self._trainer.take, sample), future)
        return future.said
