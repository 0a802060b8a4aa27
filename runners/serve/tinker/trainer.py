"""Trains adapters on one base model and samples with them. All computation happens here.

The thread that calls `run` executes queued jobs in order, and decodes samples between jobs.
"""

import queue
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

import grpo_fn as g
from grpo_fn.layers import twin_module
from grpo_fn.trees import flat, from_names, named_leaves, on_host, split_leaves
from runners.config.sections import LoraConfig
from runners.engines.engine import DEFAULT_ROWS, Engine, Request, Row, Weights
from runners.errors import UserError, error_line, show
from runners.files.durable import new_folder
from runners.files.json_files import write_json
from runners.files.tensor_files import load_arrays, save_arrays
from runners.models import adapters
from runners.models.model_reader import cast_floating, main_dtype
from runners.serve.service import WAIT, News, hand_out
from runners.serve.tinker.losses import Datum, Loss, batch_of, counted

ALPHA = 32.0  # Tinker's adapters have the scale ALPHA / rank
LINGER = 0.01  # seconds to wait for more samples before decoding starts
MICRO_TOKENS = 2048  # maximum size of a micro-batch, unless a single row is longer
TRAINING = "weights"  # the kind of path for weights that are saved for further training
SAMPLING = "sampler_weights"
OPTIMIZER = "optimizer.safetensors"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,120}"
_PATH = re.compile(f"tinker://({_NAME})/({TRAINING}|{SAMPLING})/({_NAME})")
PARTS = ("attn", "mlp", "unembed")


@attrs.frozen(eq=False)
class Sampler:
    """Weights for sampling."""

    policy: g.Policy
    params: Any
    logprobs: Callable[[Any, g.Batch], mx.array]


@attrs.define(eq=False, kw_only=True)
class Model:
    """One model in training: adapters and their training state."""

    about: Mapping[str, Any]  # mlx-lm's lora_parameters and num_layers
    # A sampler with the initial weights. Its policy has its own module, because rows may decode
    # while the learner computes.
    sampler: Sampler
    step: Callable[[g.LossSpec], g.GradStep]  # returns a loss's gradient step, compiled once
    state: g.TrainState
    fault: str = ""  # why the sum lacks a gradient; empty if it is complete


@attrs.frozen(eq=False)
class Sample:
    """Completions for one prompt that are waiting for the engine or being decoded."""

    listener: Any  # see `Trainer.put`
    sampler: Sampler
    request: Request
    sampling: g.Sampling
    prompt_logp: np.ndarray | None  # None means not requested
    # Builds the listener's result from the completions and the prompt's log-probs.
    answer: Callable[[Sequence[Row], np.ndarray | None], Any]


class Trainer:
    """Runs queued jobs; see the module. Any thread may call `put`. `deliver` passes the jobs'
    results to other threads.
    """

    def __init__(self, base: g.Policy, engine: Engine, path: Path, folder: Path) -> None:
        """Stores the base policy, which was loaded from `path` for inference. Models are saved in
        `folder`.
        """
        self.deliver: Callable[[News], object] = hand_out
        self.draining = False
        self.path = path
        self._folder = folder
        self._digest = adapters.base_digest(named_leaves(base.module.parameters()))
        self._engine = engine
        self._optimizer = g.adamw(1e-4)  # each update sets its own learning rate and other rates
        self._update = g.make_update_step(self._optimizer)
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._waiting: list[Sample] = []
        self._decoding: dict[Any, Sample] = {}
        self._base = Sampler(base, {}, g.make_logprob_step(base.twin()))
        self._loaded: Sampler | None = None

    def put(self, job: Callable[[], Any], listener: Any) -> None:
        """Queues a job. The listener's `set` receives the job's result, unless it is None, or the
        job's error. If the listener's `session` is `over`, the job is not run and `set` receives an
        error.
        """
        self._jobs.put(partial(self._work, job, listener))

    @property
    def idle(self) -> bool:
        """Whether no job or sample is waiting or being decoded."""
        return self._jobs.empty() and not (self._waiting or self._decoding)

    def run(self, until: Callable[[], bool]) -> None:
        """Executes jobs and decodes until `until` returns True."""
        while not until():
            try:
                self._jobs.get(not self._decoding, LINGER if self._waiting else WAIT)()
            except queue.Empty:  # no job for a moment: samples that arrived together start together
                self._begin()
                self._collect()

    def _work(self, job: Callable[[], Any], listener: Any) -> None:
        try:
            if listener.session.over:
                raise UserError("the session has ended")
            outcome = job()
        except Exception as error:
            outcome = error
        if outcome is not None:
            self.deliver([partial(listener.set, outcome)])

    # Sampling.

    def sample(
        self,
        listener: Any,
        source: Callable[[], Sampler],
        request: Request,
        sampling: g.Sampling,
        scored: int,
        answer: Callable[[Sequence[Row], np.ndarray | None], Any],
    ) -> None:
        """Queues a request for the engine (runs as a job). The listener receives the result of
        `answer`, which is called with the completions and the log-probs of the prompt's last
        `scored` tokens.
        """
        sampler = source()
        prompt_logp = None
        if scored:
            start = len(request.prompt) - scored
            row = (request.prompt[:start], request.prompt[start:])
            (piece,) = g.split_batch(g.batch_of([row], [[0.0] * scored]), max_tokens=MICRO_TOKENS)
            logp = np.array(sampler.logprobs(sampler.params, piece))[0, :scored]
            prompt_logp = np.concatenate([np.full(start, np.nan, np.float32), logp])
        self._waiting.append(Sample(listener, sampler, request, sampling, prompt_logp, answer))

    def _begin(self) -> None:
        """Submits the waiting samples that use the same weights as the oldest one, unless samples
        with other weights are decoding.
        """
        first = self._waiting[0].sampler if self._waiting else self._loaded
        if first is not self._loaded and not self._decoding and first is not None:
            self._engine.load(Weights(first.policy, first.params, 0, DEFAULT_ROWS))
            self._loaded = first
        if first is self._loaded:
            ready = [sample for sample in self._waiting if sample.sampler is first]
            self._waiting = [sample for sample in self._waiting if sample.sampler is not first]
            for sample in ready:
                self._work(partial(self._submit, sample), sample.listener)

    def _submit(self, sample: Sample) -> None:
        self._decoding[self._engine.submit(sample.request, sample.sampling)] = sample

    def _collect(self) -> None:
        """Decodes for a moment, and informs the listeners."""
        for ticket, sample in self._decoding.items():
            if sample.listener.session.over:
                self._engine.cancel(ticket)
        try:
            done = self._engine.collect(0)
        except Exception as error:  # the error ends all samples that are decoding
            self.deliver([partial(each.listener.set, error) for each in self._decoding.values()])
            for ticket in self._decoding:
                self._engine.cancel(ticket)
            self._decoding = {}
            return
        for ticket in done.keys() & self._decoding.keys():
            sample = self._decoding.pop(ticket)
            self._work(partial(sample.answer, done[ticket], sample.prompt_logp), sample.listener)

    def sampler(self, path: str | None) -> Sampler:
        """Creates a sampler with saved weights, or with the base model's if `path` is None (runs as
        a job).
        """
        return self._base if path is None else self.snapshot(self.restore(path, optimizer=False))

    def snapshot(self, model: Model) -> Sampler:
        """Creates a sampler with a model's current weights (runs as a job)."""
        return attrs.evolve(model.sampler, params=model.state.params)

    # Models.

    def create(self, rank: int, parts: Sequence[str], seed: int) -> Model:
        """Creates a model with new adapters on these parts, see PARTS (runs as a job)."""
        module = twin_module(self._base.policy.module)
        keys = adapted_layers(module, parts)
        if not keys:
            raise UserError(f"lora_config: this model has no layers of {' or '.join(parts)}")
        lora = LoraConfig(rank=rank, scale=ALPHA / rank, keys=keys)
        return self._model(module, adapters.new_adapters(module, "lora", lora, seed))

    def restore(self, path: str, *, optimizer: bool) -> Model:
        """Creates a model that resumes from a saved one (runs as a job)."""
        folder = self.place(path)
        module = twin_module(self._base.policy.module)
        module.freeze()
        try:
            about = adapters.read_adapters(module, folder, self.path, self._digest, "lora")
            moments = load_arrays(folder / OPTIMIZER)[0] if optimizer else {}
        except UserError as error:  # the message must not show the folder
            raise UserError(str(error).replace(str(folder), path)) from error
        model = self._model(module, about)
        if optimizer:
            model.state = attrs.evolve(model.state, opt_state=from_names(moments))
        return model

    def forward(
        self,
        read: Callable[[], tuple[Sequence[Datum], Loss, g.LossSpec]],
        *,
        backward: bool,
        model: Model,
    ) -> tuple[list[np.ndarray], float]:
        """Returns the log-probs of each datum's targets, and the loss (runs as a job).

        If `backward` is True, the loss's gradient is added to the model's accumulated gradient. If
        the computation fails, nothing is added.
        """
        logp: list[mx.array] = []
        state = model.state
        try:
            data, loss, spec = read()
            parts = g.split_batch(batch_of(data, loss), max_tokens=MICRO_TOKENS)
            pieces = [counted(part) for part in parts]
            if backward:
                state, stats = model.step(spec)(state, pieces, logprobs=logp)
                total = stats.loss
            else:
                logp = [model.sampler.logprobs(state.params, piece) for piece in pieces]
                total = mx.stack(
                    [_loss(spec, *each) for each in zip(pieces, logp, strict=True)]
                ).sum()
            g.materialize(state.accum_grads, total, logp)
            value: Any = total.item()
            if not np.isfinite(value):
                raise UserError(f"the loss is {value}, so its gradient was not added")
        except Exception as error:
            model.fault = error_line(error) if backward else model.fault
            raise
        model.state = state
        row_numbers: list[Any] = [piece.row_b for piece in pieces]
        rows = dict(zip(flat(map(on_host, row_numbers)), flat(map(np.array, logp)), strict=True))
        return [rows[n][: len(datum.tokens)] for n, datum in enumerate(data)], value

    def update(self, rates: g.Rates, model: Model) -> dict[str, Any]:
        """Takes an optimizer step with the gradient accumulated since the last step (runs as a
        job).
        """
        state, stats = self._update(model.state, rates)
        fault = model.fault or ("it is not finite" if stats.skipped.item() else "")
        if fault:
            state = attrs.evolve(state, params=model.state.params, opt_state=model.state.opt_state)
        g.materialize(state)
        model.state = g.sync_old(state)
        model.fault = ""
        if fault:
            raise UserError(f"no step was taken, and the gradient was dropped: {fault}")
        return {"metrics": {"grad_norm:mean": stats.grad_norm.item()}}

    def save(self, path: str, model: Model, *, overwrite: bool) -> dict[str, Any]:
        """Saves a model (runs as a job). If the path's kind is TRAINING, the optimizer state is
        saved too.
        """
        target = self.place(path)
        if target.exists() and not overwrite:
            raise UserError(f"{path} already exists; expected a different name, or overwrite")
        about = {
            "fine_tune_type": "lora",
            "model": str(self.path),
            adapters.BASE_DIGEST: self._digest,
            **model.about,
        }
        with new_folder(target) as folder:
            weights = named_leaves(model.state.params)
            save_arrays(folder / adapters.ADAPTERS, weights, {"format": "mlx"})
            write_json(folder / adapters.ADAPTER_CONFIG, about)
            if target.parent.name == TRAINING:
                save_arrays(folder / OPTIMIZER, named_leaves(model.state.opt_state), {})
        return {"path": path}

    def place(self, path: str) -> Path:
        """Returns the folder for a `tinker://` path, inside the trainer's folder. Raises UserError
        for other paths.
        """
        found = _PATH.fullmatch(path)
        if found is None:
            raise UserError(
                f"path: expected tinker://RUN/{TRAINING}/NAME or tinker://RUN/{SAMPLING}/NAME, "
                f"found {show(path)}"
            )
        return self._folder.joinpath(*found.groups())

    def _model(self, module: nn.Module, about: Mapping[str, Any]) -> Model:
        """Returns a model with the module's current adapters."""
        cast_floating(module, mx.float32, named_leaves(module.trainable_parameters()))
        policy = g.Policy.from_module(module, compute_dtype=main_dtype(self._base.policy.module))
        params = from_names(split_leaves(module)[0])
        state = g.init_state(params, self._optimizer, key=mx.random.key(0))
        g.materialize(state)
        return Model(
            about=about,
            sampler=Sampler(policy.twin(), state.params, g.make_logprob_step(policy)),
            step=lru_cache(16)(partial(g.make_grad_step, policy)),
            state=state,
        )


def adapted_layers(module: nn.Module, parts: Sequence[str]) -> tuple[str, ...]:
    """Returns the layers that belong to these parts (see PARTS), by their names in a block. A tied
    output head is not included.
    """
    blocks: Any = module.layers
    linear = {
        name
        for name, layer in flat(block.named_modules() for block in blocks)
        if isinstance(layer, nn.Linear | nn.QuantizedLinear) or hasattr(layer, "to_lora")
    }
    attention = {name for name in linear if re.search("attn|attention|mixer", name)}
    heads = {name for name, _ in module.named_modules() if name.endswith("lm_head")}
    layers: dict[str, set[str]] = dict(
        zip(PARTS, (attention, linear - attention, heads), strict=True)
    )
    return tuple(sorted(flat(layers[part] for part in parts)))


def _loss(spec: g.LossSpec, piece: g.Batch, logp_bt: mx.array) -> mx.array:
    return g.policy_loss(
        logp_bt,
        piece.advantages_b,
        piece.mask_bt,
        spec,
        old_logp_bt=piece.old_logp_bt,
        rollout_logp_bt=piece.rollout_logp_bt,
    )[0]
