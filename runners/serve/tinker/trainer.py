"""Models in training over one base model, and what samples with them: all that computes.

One thread calls `run`. It works off a queue of jobs in their order, and decodes between them.
"""

from __future__ import annotations

import json
import math
import queue
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

import grpo_fn as g
from grpo_fn.layers import twin_module
from grpo_fn.trees import from_names, named_leaves, on_host, split_leaves
from runners.config.sections import LoraConfig
from runners.engines.engine import DEFAULT_ROWS, Engine, Request, Row, Ticket, Weights
from runners.errors import UserError, error_line, show
from runners.files.durable import new_folder
from runners.files.json_files import write_json
from runners.files.tensor_files import load_arrays, save_arrays
from runners.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTERS,
    BASE_DIGEST,
    base_digest,
    new_adapters,
    read_adapters,
)
from runners.models.folders import copy_companions, read_config
from runners.models.model_reader import cast_floating, main_dtype
from runners.serve.service import WAIT, News, hand_out
from runners.serve.tinker.losses import Rows, batch_of, counted

ALPHA = 32.0  # of Tinker's adapters: their scale is ALPHA / rank
LINGER = 0.01  # seconds in which another sample may follow the first ones
MICRO_TOKENS = 2048  # of a micro-batch, unless a single row is longer
SPECS = 16  # compiled losses that a kind of adapters keeps
TRAINING = "weights"  # what is saved to be trained on
SAMPLING = "sampler_weights"
OPTIMIZER = "optimizer.safetensors"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,120}"
_PATH = re.compile(f"tinker://({_NAME})/({TRAINING}|{SAMPLING})/({_NAME})")


class Ended(Exception):
    """Nobody waits for this any more."""


@attrs.frozen(eq=False, kw_only=True)
class Kind:
    """Adapters of one shape, whatever their numbers: the functions that they share."""

    about: Mapping[str, Any]  # mlx-lm's lora_parameters and num_layers
    policy: g.Policy
    sampler: g.Policy  # over a module of its own, since rows may decode while the learner computes
    logprobs: Callable[[Any, g.Batch], mx.array]
    update: Callable[..., tuple[g.TrainState, g.UpdateStats]]
    steps: dict[g.LossSpec, g.GradStep] = attrs.field(factory=dict, init=False)

    def step(self, spec: g.LossSpec) -> g.GradStep:
        """The grad step of a loss."""
        if spec not in self.steps:
            if len(self.steps) == SPECS:
                self.steps.clear()
            self.steps[spec] = g.make_grad_step(self.policy, spec)
        return self.steps[spec]


@attrs.define(eq=False)
class Model:
    """Adapters in training."""

    kind: Kind
    state: g.TrainState
    fault: str = ""  # of a gradient that is missing in the sum; empty: none is


@attrs.frozen(eq=False)
class Sampler:
    """Weights to sample with."""

    kind: Kind | None  # None: the base model
    params: Any


@attrs.define(eq=False, kw_only=True)
class Sample:
    """Completions of a prompt."""

    source: Callable[[], Sampler]
    request: Request
    sampling: g.Sampling
    scored: int  # tokens at the prompt's end whose log-probs are wanted
    # The answer: from the rows, and the log-probs of the prompt (None: not wanted).
    answer: Callable[[Sequence[Row], np.ndarray | None], Any]
    end: Callable[[Any], None]  # hears it, or a fault
    is_over: Callable[[], bool]
    sampler: Sampler | None = None
    prompt_logp: np.ndarray | None = None


class Trainer:
    """See the module. Any thread may `put`; `deliver` brings what jobs return to other threads."""

    def __init__(self, base: g.Policy, engine: Engine, path: Path, folder: Path) -> None:
        """`base` is for inference, and comes from `path`. Saved models go into the folder."""
        self.base = base
        self.deliver: Callable[[News], object] = hand_out
        self.draining = False
        self.path = path
        self._folder = folder
        self._digest = base_digest(named_leaves(base.module.parameters()))
        self._engine = engine
        self._optimizer = g.adamw(1e-4)  # each step has its own rates
        self._kinds: WeakValueDictionary[str, Kind] = WeakValueDictionary()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._waiting: list[Sample] = []
        self._decoding: dict[Ticket, Sample] = {}
        self._bare = Sampler(None, {})
        self._loaded: Sampler | None = None
        self._logprobs = g.make_logprob_step(base)

    def put(self, job: Callable[[], Any], end: Callable[[Any], None]) -> None:
        """Queue a job; `end` hears what it returns (if it is not None), or its fault."""
        self._jobs.put(partial(self._work, job, end))

    @property
    def idle(self) -> bool:
        """Whether nothing waits or decodes."""
        return self._jobs.empty() and not (self._waiting or self._decoding)

    def run(self, until: Callable[[], bool]) -> None:
        """Work until `until` says so."""
        while not until():
            try:
                self._jobs.get(not self._decoding, LINGER if self._waiting else WAIT)()
            except queue.Empty:  # samples that came together begin together
                self._begin()
                self._collect()

    def _work(self, job: Callable[[], Any], end: Callable[[Any], None]) -> None:
        try:
            outcome = job()
        except Exception as error:
            outcome = error
        if outcome is not None:
            self.deliver([partial(end, outcome)])

    # Jobs on samples.

    def take(self, sample: Sample) -> None:
        """Score a sample's prompt, and let it wait for the engine."""
        sample.sampler = sample.source()
        if sample.scored:
            prompt = sample.request.prompt
            start = len(prompt) - sample.scored
            batch = g.batch_of([(prompt[:start], prompt[start:])], [[0.0] * sample.scored])
            (piece,) = g.split_batch(batch, max_tokens=MICRO_TOKENS)
            kind = sample.sampler.kind
            step = self._logprobs if kind is None else kind.logprobs
            sample.prompt_logp = np.full(len(prompt), np.nan, np.float32)
            logp_bt = np.array(step(sample.sampler.params, piece))
            sample.prompt_logp[start:] = logp_bt[0, : sample.scored]
        self._waiting.append(sample)

    def _begin(self) -> None:
        """Hand samples to the engine: those of the oldest one's weights, if no others decode."""
        if not self._waiting:
            return
        first = self._waiting[0].sampler
        if first is not self._loaded:
            if self._decoding or first is None:
                return
            policy = self.base if first.kind is None else first.kind.sampler
            self._engine.load(Weights(policy, first.params, 0, DEFAULT_ROWS))
            self._loaded = first
        waiting = self._waiting
        self._waiting = [sample for sample in waiting if sample.sampler is not first]
        for sample in waiting:
            if sample.sampler is first:
                self._work(partial(self._submit, sample), sample.end)

    def _submit(self, sample: Sample) -> None:
        if sample.is_over():
            raise Ended("the request was cancelled")
        self._decoding[self._engine.submit(sample.request, sample.sampling)] = sample

    def _collect(self) -> None:
        """Decode for a moment, and tell who asked."""
        for ticket, sample in self._decoding.items():
            if sample.is_over():
                self._engine.cancel(ticket)
        news: News = []
        try:
            for ticket, rows in self._engine.collect(0).items():
                sample = self._decoding.pop(ticket)
                news.append(partial(sample.end, sample.answer(rows, sample.prompt_logp)))
        except Exception as error:  # of all that decode
            for ticket, sample in self._decoding.items():
                self._engine.cancel(ticket)
                news.append(partial(sample.end, error))
            self._engine.collect(0)
            self._decoding = {}
        if news:
            self.deliver(news)

    def sampler(self, path: str | None) -> Sampler:
        """What samples with saved weights; None: with the base model's."""
        if path is None:
            return self._bare
        model = self.restore(path, optimizer=False)
        return Sampler(model.kind, model.state.params)

    # Jobs on models.

    def create(self, rank: int, parts: Sequence[str], seed: int | None) -> Model:
        """A model with new adapters on these parts: "mlp", "attn", "unembed"."""
        module = twin_module(self.base.module)
        keys = adapted_layers(module, parts)
        if not keys:
            raise UserError(f"lora_config: this model has no layers of {' or '.join(parts)}")
        lora = LoraConfig(rank=rank, scale=ALPHA / rank, keys=keys)
        seed = secrets.randbits(32) if seed is None else seed
        return self._model(module, new_adapters(module, "lora", lora, seed))

    def restore(self, path: str, *, optimizer: bool) -> Model:
        """A model that goes on from a saved one."""
        folder = self.place(path)
        module = twin_module(self.base.module)
        module.freeze()
        model = self._model(module, read_adapters(module, folder, self.path, self._digest, "lora"))
        if optimizer:
            moments, _ = load_arrays(folder / OPTIMIZER)
            shapes = {name: leaf.shape for name, leaf in moments.items()}
            own = {name: each.shape for name, each in named_leaves(model.state.opt_state).items()}
            if shapes != own:
                raise UserError(f"{path}: the optimizer's arrays are not those of its adapters")
            model.state = attrs.evolve(model.state, opt_state=from_names(moments))
        return model

    def load(self, model: Model, path: str, *, optimizer: bool) -> None:
        """Give a model the saved weights of another one of its kind."""
        found = self.restore(path, optimizer=optimizer)
        if found.kind is not model.kind:
            raise UserError(f"{path}: its adapters have another rank or layers than the model's")
        model.state = found.state
        model.fault = ""

    def forward(
        self,
        model: Model,
        read: Callable[[], Rows],
        *,
        backward: bool,
    ) -> tuple[list[np.ndarray], float]:
        """The log-probs of each datum's targets, and the loss; `backward` adds its gradient."""
        try:
            data, loss, spec = read()
            pieces = g.split_batch(batch_of(data, loss), max_tokens=MICRO_TOKENS)
            pieces = [counted(piece) for piece in pieces]
            logp: list[mx.array] = []
            state = model.state
            if backward:
                state, stats = model.kind.step(spec)(state, pieces, logprobs=logp)
                total = stats.loss
            else:
                logp = [model.kind.logprobs(state.params, piece) for piece in pieces]
                total = mx.stack(
                    [_loss(*each, spec) for each in zip(pieces, logp, strict=True)]
                ).sum()
            g.materialize(state.accum_grads, total, logp)
            if not math.isfinite(total.item()):
                raise UserError(f"the loss is {total.item()}, so its gradient was not added")
        except Exception as error:
            if backward:
                model.fault = error_line(error)
            raise
        model.state = state
        rows: dict[int, np.ndarray] = {}
        for piece, logp_bt in zip(pieces, logp, strict=True):
            rows |= dict(zip(on_host(piece.row_b), np.array(logp_bt), strict=True))
        return [rows[n][: len(datum.tokens)] for n, datum in enumerate(data)], total.item()

    def update(self, model: Model, rates: g.Rates) -> dict[str, Any]:
        """An optimizer step with the gradient since the last one."""
        state, stats = model.kind.update(model.state, rates)
        fault = model.fault or ("it is not finite" if stats.skipped.item() else "")
        if fault:
            state = attrs.evolve(state, params=model.state.params, opt_state=model.state.opt_state)
        g.materialize(state)
        model.state = g.sync_old(state)
        model.fault = ""
        if fault:
            raise UserError(f"no step was taken, and the gradient was dropped: {fault}")
        return {"metrics": {"grad_norm:mean": stats.grad_norm.item()}}

    def save(self, model: Model, path: str, *, overwrite: bool) -> dict[str, Any]:
        """Write a model; with its optimizer if the path is one of TRAINING."""
        target = self.place(path)
        if target.exists() and not overwrite:
            raise UserError(f"{path} exists; expected another name, or overwrite")
        about = {"fine_tune_type": "lora", "model": str(self.path), BASE_DIGEST: self._digest}
        with new_folder(target) as folder:
            save_arrays(folder / ADAPTERS, named_leaves(model.state.params), {"format": "mlx"})
            write_json(folder / ADAPTER_CONFIG, {**about, **model.kind.about})
            write_json(folder / "config.json", read_config(self.path))
            copy_companions(self.path, folder)
            if target.parent.name == TRAINING:
                save_arrays(folder / OPTIMIZER, named_leaves(model.state.opt_state), {})
        return {"path": path}

    def place(self, path: str) -> Path:
        """The folder of a path, inside of this trainer's. UserError for anything else."""
        found = _PATH.fullmatch(path)
        if found is None or ".." in path:
            wanted = f"tinker://RUN/{TRAINING}/NAME or tinker://RUN/{SAMPLING}/NAME"
            raise UserError(f"path: expected {wanted}, found {show(path)}")
        return self._folder.joinpath(*found.groups())

    def _model(self, module: nn.Module, about: Mapping[str, Any]) -> Model:
        """A model with the adapters that are in the module."""
        cast_floating(module, mx.float32, named_leaves(module.trainable_parameters()))
        params = from_names(split_leaves(module)[0])
        key = json.dumps(about, sort_keys=True)
        kind = self._kinds.get(key)
        if kind is None:
            dtype = main_dtype(self.base.module)
            policy = g.Policy.from_module(module, compute_dtype=dtype)
            kind = self._kinds[key] = Kind(
                about=about,
                policy=policy,
                sampler=policy.twin(),
                logprobs=g.make_logprob_step(policy),
                update=g.make_update_step(self._optimizer),
            )
        return Model(kind, g.init_state(params, self._optimizer, key=mx.random.key(0)))


def adapted_layers(module: nn.Module, parts: Sequence[str]) -> tuple[str, ...]:
    """The layers that get adapters, by their names in a block; a head that is tied gets none."""
    linear = (nn.Linear, nn.QuantizedLinear)
    names = {"attn": set(), "mlp": set(), "unembed": set()}
    for block in module.layers:
        for name, layer in block.named_modules():
            if isinstance(layer, linear) or hasattr(layer, "to_lora"):
                names["attn" if re.search("attn|attention|mixer", name) else "mlp"].add(name)
    names["unembed"] = {name for name, _ in module.named_modules() if name.endswith("lm_head")}
    return tuple(sorted(set().union(*(names[part] for part in parts))))


def _loss(piece: g.Batch, logp_bt: mx.array, spec: g.LossSpec) -> mx.array:
    loss, _ = g.policy_loss(
        logp_bt,
        piece.advantages_b,
        piece.mask_bt,
        spec,
        old_logp_bt=piece.old_logp_bt,
        rollout_logp_bt=piece.rollout_logp_bt,
    )
    return loss
