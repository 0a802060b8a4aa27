"""Serves a `Trainer` over HTTP: Tinker's calls are answered with futures."""

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runners.engines.engine import Request as EngineRequest
from runners.errors import UserError, error_line, show
from runners.serve.app import HttpServer
from runners.serve.chat import ServedModel
from runners.serve.service import Limits
from runners.serve.sessions import derived_seed
from runners.serve.tinker import wire
from runners.serve.tinker.losses import check_data, loss_of
from runners.serve.tinker.trainer import PARTS, SAMPLING, TRAINING, Model, Trainer
from runners.serve.wire import ApiError, check_name

TOGETHER = 512  # samples that a client may wait for at the same time, one per connection
ROW = 4096  # bytes that each waiting or decoding completion counts as
AGAIN = 60.0  # seconds for which a fetched answer may be fetched again
MODEL = ":train:"  # part of a model's id; the client constructs the same ids
SAMPLER = ":sample:"


@attrs.frozen(kw_only=True)
class TrainingLimits(Limits):
    """Limits on what clients may use; `turns` limits the number of sessions."""

    hold: float = 20.0  # seconds before a request for a pending future is answered with "try again"
    vanish: float = 300.0  # seconds without a heartbeat before a session ends
    gap: float = 60.0  # seconds to wait for a missing request with a smaller number
    slots: int = 32  # maximum number of models in training, and of samplers (the latest are kept)
    futures: int = 16_384  # answers that are pending or were not fetched
    room: int = 268_435_456  # maximum size of waiting data and completions in bytes


@attrs.define(eq=False)
class TrainingSession:
    """One client's session."""

    id: str
    over: bool = False
    timer: asyncio.TimerHandle | None = None


@attrs.define(eq=False)
class Future:
    """An answer that is not available yet. Meanwhile, the client receives `said`."""

    session: TrainingSession
    said: dict[str, Any]
    answer: asyncio.Future[Any] = attrs.field(factory=asyncio.Future)  # JSON, or a protobuf's bytes

    def set(self, outcome: Any) -> None:
        """Sets the answer or an error. Only the first call has an effect."""
        if isinstance(outcome, Exception):
            category = "user" if isinstance(outcome, UserError | ApiError) else "server"
            outcome = {"error": error_line(outcome), "category": category}
        if not self.answer.done():
            self.answer.set_result(outcome)


@attrs.define(eq=False)
class Slot:
    """A model or sampler. `held` contains a model's requests that wait for one with a smaller
    number.
    """

    id: str
    session: TrainingSession
    path: str | None = None  # path of the saved weights
    found: Any = None  # None means that the object is not created yet, or that its creation failed
    next: int = 1
    held: dict[int, tuple[Callable[[], Any], Future]] = attrs.field(factory=dict)
    timer: asyncio.TimerHandle | None = None

    def made(self) -> Any:
        """Returns the Model or Sampler. Raises UserError if it does not exist."""
        if self.found is None:
            raise UserError(f"{self.path or self.id} could not be created")
        return self.found

    def fill(self, make: Callable[[], Any], answer: dict[str, Any] | None = None) -> Any:
        """Creates the Model or Sampler, and returns the client's answer (runs as a job)."""
        self.found = make()
        return answer


def restarted(
    timer: asyncio.TimerHandle | None, seconds: float, act: Callable[[Any], None], what: Any
) -> asyncio.TimerHandle:
    """Cancels a timer, if there is one, and starts a new one."""
    if timer is not None:
        timer.cancel()
    return asyncio.get_running_loop().call_later(seconds, act, what)


class TrainingServer(HttpServer):
    """Serves Tinker's API. The thread that calls `trainer.run` does the work."""

    def __init__(
        self,
        trainer: Trainer,
        model: ServedModel,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str = "",
        limits: TrainingLimits | None = None,
    ) -> None:
        """Clients must send the API key `key`; if `key` is empty, any key is accepted. See
        `HttpServer`.
        """
        about = {"model_name": model.name, "max_context_length": model.length}
        calls: dict[str, Callable[[dict[str, Any]], Any]] = {
            "healthz": lambda asked: {"status": "ok"},
            "telemetry": lambda asked: {"status": "accepted"},
            "client/config": lambda asked: {"sample_max_concurrent_requests": TOGETHER},
            "client/dynamic_config": lambda asked: {},
            "get_server_capabilities": lambda asked: {
                "supported_models": [{**about, "trainable": True, "sampleable": True}]
            },
            "create_session": self._create_session,
            "session_heartbeat": lambda asked: self._touch(self._session(asked["session_id"])),
            "sessions/{id}/finish": lambda asked: self._end(self._session(asked["id"])),
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": lambda asked: self._ordered(
                asked,
                lambda model: self._trainer.update(wire.rates_of(asked["adam_params"]), model),
            ),
            "save_weights": partial(self._save, TRAINING),
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": lambda asked: self._make(
                asked, partial(self._trainer.restore, asked["path"], optimizer=asked["optimizer"])
            ),
            "create_sampling_session": self._create_sampling_session,
            "join_sampling_session": lambda asked: {"client_counter": secrets.randbelow(10**9) + 1},
            "samplers/{id}": lambda asked: {
                "sampler_id": self._slot(asked["id"]).id,
                "base_model": model.name,
                "model_path": self._slot(asked["id"]).path,
            },
            "asample": self._asample,
            "retrieve_future": self._retrieve,
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
        self._futures: dict[str, Future] = {}
        self._room = self._limits.room
        trainer.deliver = lambda news: self.deliver(news)

    async def _call(self, name: str, call: Callable[[Any], Any], request: Request) -> Response:
        given = request.headers.get("x-api-key", "").encode()
        if self._key and not secrets.compare_digest(given, self._key.encode()):
            raise ApiError("the API key is invalid", status=401)
        answer = call(wire.read_body(name, await self._body(request)) | request.path_params)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/x-protobuf")
        return JSONResponse(answer or {}, 408 if answer and "queue_state" in answer else 200)

    # Sessions, models and samplers.

    def _session(self, name: str) -> TrainingSession:
        """Returns the session with this id, or the session that owns the object with this id.
        Raises ApiError if there is none.
        """
        session = self._sessions.get(name.partition(":")[0])
        if session is None:
            raise ApiError(f"the session of {show(name)} has ended or never existed", status=410)
        return session

    def _slot(self, name: str) -> Slot:
        """Returns the model or sampler with this id. Raises ApiError if there is none."""
        self._session(name)
        if name not in self._slots:
            raise ApiError(
                f"there is no {show(name)}; only the latest {self._limits.slots} samplers are kept",
                status=404,
            )
        self._slots[name] = self._slots.pop(name)  # moves it to the end, as the most recently used
        return self._slots[name]

    def _new(self, asked: dict[str, Any], kind: str, number: int) -> Slot:
        """Adds a new model or sampler, and returns it. If there are too many samplers, the least
        recently used one is replaced. A repeated call has the same result.
        """
        check_name(self._model, asked.get("base_model"))
        session = self._session(asked.get("session_id") or asked["model_id"])
        name = f"{session.id}{kind}{number}"
        same = [each for each in self._slots if kind in each and each != name]
        if len(same) >= self._limits.slots:
            if kind == MODEL:
                raise UserError(f"{len(same)} models are already in training")
            del self._slots[same[0]]
        return self._slots.setdefault(name, Slot(name, session, asked.get("model_path")))

    def _create_session(self, asked: dict[str, Any]) -> dict[str, Any]:
        if len(self._sessions) >= self._limits.turns:
            raise ApiError(f"there are already {self._limits.turns} sessions", status=429)
        session = TrainingSession(secrets.token_hex(8))
        self._sessions[session.id] = session
        self._touch(session)
        return {"session_id": session.id}

    def _touch(self, session: TrainingSession) -> None:
        """Marks the session as alive."""
        session.timer = restarted(session.timer, self._limits.vanish, self._end, session)

    def _end(self, session: TrainingSession) -> None:
        """Frees everything that a session holds."""
        session.over = True
        self._sessions.pop(session.id, None)
        for things in (self._slots, self._futures):
            for name in [name for name, each in things.items() if each.session is session]:
                gone = things.pop(name)
                if isinstance(gone, Future):
                    gone.set(UserError("the session has ended"))

    # Futures.

    def _promise(self, name: str, session: TrainingSession, cost: int = 0) -> Future:
        """Adds a new future that counts as `cost` waiting bytes. Raises ApiError if there is no
        room.
        """
        if self._trainer.draining:
            raise ApiError("the server is shutting down", status=503)
        if len(self._futures) >= self._limits.futures or cost > self._room:
            raise ApiError(
                "too many requests are in progress or have unfetched results", status=429
            )

        def free(_: object) -> None:
            self._room += cost

        self._room -= cost
        self._futures[name] = future = Future(session, {"request_id": name})
        future.answer.add_done_callback(free)
        return future

    def _ordered(
        self, asked: dict[str, Any], job: Callable[[Model], Any], cost: int = 0
    ) -> dict[str, Any]:
        """Queues a model's job after the model's jobs with smaller numbers. A repeated call has the
        same result.
        """
        slot = self._slot(asked["model_id"])
        number = asked["seq_id"]
        name = f"{slot.id}:{number}"
        if name not in self._futures:
            if number < slot.next:
                raise ApiError(f"seq_id: expected at least {slot.next}, found {number}", "seq_id")
            if number > slot.next and self._room < self._limits.room / 2:
                raise ApiError("too many requests wait for an earlier one", status=429)
            future = self._promise(name, slot.session, cost)
            slot.held[number] = lambda: job(slot.made()), future
            while slot.next in slot.held:
                self._trainer.put(*slot.held.pop(slot.next))
                slot.next += 1
            gap = self._limits.gap if slot.held else 0.0  # a running timer keeps the model alive
            slot.timer = restarted(slot.timer, gap, self._skip, slot)
        return self._futures[name].said

    def _skip(self, slot: Slot) -> None:
        """Fails all requests that wait for a request that never arrived."""
        fault = UserError(
            f"request {slot.next} of {slot.id} was not received, so this one cannot be executed"
        )
        if slot.held and slot.found is not None:
            slot.found.fault = str(fault)
        for number, (_, future) in slot.held.items():
            slot.next = max(slot.next, number + 1)
            future.set(fault)
        slot.held.clear()

    async def _retrieve(self, asked: dict[str, Any]) -> Any:
        name = asked["request_id"]
        future = self._futures.get(name)
        if future is None:
            raise ApiError(
                f"there is no request {show(name)}, or its answer was dropped", status=410
            )
        try:
            answer = await asyncio.wait_for(asyncio.shield(future.answer), self._limits.hold)
        except TimeoutError:
            return {"type": "try_again", "request_id": name, "queue_state": "active"}
        asyncio.get_running_loop().call_later(AGAIN, self._futures.pop, name, None)
        return answer

    # Models.

    def _make(self, asked: dict[str, Any], make: Callable[[], Model]) -> dict[str, Any]:
        slot = self._new(asked, MODEL, asked["model_seq_id"])
        name = f"{slot.id}:make"
        if name not in self._futures and slot.found is None:
            job = partial(slot.fill, make, {"model_id": slot.id, "path": asked.get("path")})
            self._trainer.put(job, self._promise(name, slot.session))
        return {"request_id": name}

    def _create_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        lora = wire.read("lora_config", asked["lora_config"])
        parts = [part for part in PARTS if lora[f"train_{part}"]]
        seed = secrets.randbits(32) if lora["seed"] is None else lora["seed"]
        return self._make(asked, partial(self._trainer.create, lora["rank"], parts, seed))

    def _get_info(self, asked: dict[str, Any]) -> dict[str, Any]:
        about = self._slot(asked["model_id"]).made().about
        # Only clients on this machine can use a path, so others do not receive it.
        tokenizer = str(self._trainer.path) if self.is_local else self._model.name
        name = {"model_name": self._model.name}
        return {
            "model_id": asked["model_id"],
            **name,
            "model_data": {**name, "tokenizer_id": tokenizer},
            "is_lora": True,
            "lora_rank": about["lora_parameters"]["rank"],
        }

    def _forward_backward(self, asked: dict[str, Any]) -> dict[str, Any]:
        message = asked["message"]

        def read() -> Any:
            loss, spec = loss_of(message.loss_fn, wire.loss_config(message))
            data = wire.data_of(message)
            check_data(data, loss, self._model.vocabulary, self._model.length)
            return data, loss, spec

        work = partial(self._trainer.forward, read, backward=not message.forward_only)
        return self._ordered(
            asked, lambda model: wire.forward_output(*work(model=model)), asked["size"]
        )

    def _save(self, part: str, asked: dict[str, Any]) -> dict[str, Any]:
        path = f"tinker://{asked['model_id']}/{part}/{asked['path'] or asked['seq_id']}"
        overwrite = asked.get("overwrite", True)
        return self._ordered(asked, partial(self._trainer.save, path, overwrite=overwrite))

    # Sampling.

    def _save_for_sampler(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["sampling_session_seq_id"] is None:
            return self._save(SAMPLING, asked)
        way = self._new(asked, SAMPLER, asked["sampling_session_seq_id"])
        return self._ordered(
            asked,
            lambda model: way.fill(
                partial(self._trainer.snapshot, model), {"sampling_session_id": way.id}
            ),
        )

    def _create_sampling_session(self, asked: dict[str, Any]) -> dict[str, Any]:
        path = asked["model_path"]
        if path is not None and not self._trainer.place(path).is_dir():
            raise ApiError(f"there are no weights {show(path)}", "model_path", status=404)
        way = self._new(asked, SAMPLER, asked["sampling_session_seq_id"])
        job = partial(way.fill, partial(self._trainer.sampler, path))
        self._trainer.put(job, Future(way.session, {}))
        return {"sampling_session_id": way.id}

    def _asample(self, asked: dict[str, Any]) -> dict[str, Any]:
        way = self._slot(asked["sampling_session_id"])
        name = f"{way.id}:{asked['seq_id']}"
        if name in self._futures:
            return self._futures[name].said
        prompt = wire.prompt_of(asked["prompt"])
        self._model.check(prompt)
        sampling, seed = wire.sampling_of(asked["sampling_params"], self._model, len(prompt))
        count = asked["num_samples"]
        future = self._promise(name, way.session, ROW * count)
        future.said["sample_sequence_ids"] = [f"{name}:{number}" for number in range(count)]
        last = asked["prompt_logprobs_last_n"] or len(prompt)
        scored = min(last, len(prompt) - 1) if asked["prompt_logprobs"] else 0
        seeds = tuple(derived_seed((seed >> 32, seed & 0xFFFFFFFF), n) for n in range(count))
        wanted = EngineRequest(prompt=prompt, seeds=seeds)
        job = partial(
            self._trainer.sample, future, way.made, wanted, sampling, scored, wire.sample_output
        )
        self._trainer.put(job, future)
        return future.said
