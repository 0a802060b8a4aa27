"""The memory of a run, phase by phase: each phase a sum of named parts, the peak the largest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from grpo_fn.rollout import EXTEND_TOKENS, LEAST_EXTENSION, PREFILL_TOKENS
from runners.memory.passes import CACHE_STEP, FLOAT, PREFILL, MicroBatch, ModelShape, Pass, kv_bytes

# Bytes for each weight whose update is in flight: measured, as in `memory`; and those of its random bits.
_UPDATED, _RANDOM_BITS = 11, 2


@attrs.frozen(kw_only=True)
class Weights:
    """Bytes of a run's parameters."""

    trained: int  # number of trained parameters, not bytes
    master: int  # bytes of one of them as the optimizer moves it
    compute: int  # bytes of a number in the computation
    moment: int = FLOAT  # bytes of a number in one of the optimizer's two moments
    frozen: int = 0  # bytes of what does not train, as it is held
    vision: int = 0  # bytes of a vision tower, which does not train either
    rollout: int = 0  # bytes of a sampler that has weights of its own (quantized, or lagging behind)
    reference: int = 0  # bytes of a reference (beta > 0)
    embedding: int = 0  # trained parameters of the embedding, 0 where it does not train
    sampling: int = 0  # bytes of weights that are made anew for each rollout: `decode_weights`
    ranks: int = 1  # that a run goes over
    sharded: bool = False  # over the ranks: masters and moments

    @property
    def masters(self) -> int:
        """Bytes of the learner's weights; sharded, all in the compute dtype and a part of the masters."""
        if self.sharded:
            return self.trained * self.compute + self.trained * self.master // self.ranks
        return self.trained * self.master

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's state."""
        return 2 * self.trained * self.moment // (self.ranks if self.sharded else 1)

    @property
    def copy(self) -> int:
        """Bytes of the weights in the computation's dtype, 0 where that is the masters' own."""
        return 0 if self.sharded or self.compute == self.master else self.trained * self.compute

    @property
    def gradients(self) -> int:
        """Bytes of one set of gradients as they add up."""
        return self.trained * FLOAT


@attrs.frozen(kw_only=True)
class SampledRows:
    """One part of a rollout that is decoded together."""

    prompts: int
    rows: int
    prompt: int  # tokens
    new: int  # tokens at most
    arrays: int  # [rows,V] float32 arrays that a draw holds: `memory.sampling_arrays`
    prompt_copies: int | None = None  # these two as in `memory.kv_bytes`
    step: int = CACHE_STEP
    own_weights: bool = True  # samples with the rollout policy's weights; False: with the learner's
    turns: bool = False  # conversations: rows are parked and extended by given tokens, which `new` counts too


def _whole(parts: Mapping[str, float]) -> dict[str, int]:
    return {name: round(nbytes) for name, nbytes in parts.items() if nbytes >= 1}


@attrs.frozen
class MemoryPhase:
    """What is in memory at the height of one phase: bytes by name; what takes none is left out."""

    name: str
    parts: dict[str, int] = attrs.field(converter=_whole)

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


def phases(
    shape: ModelShape,
    weights: Weights,
    *,
    rollout: SampledRows,
    micro_batches: Sequence[MicroBatch],
    evaluation: SampledRows | None = None,
    accumulates: bool = False,
    logprobs: bool = False,
    grad_checkpoint: bool = False,
    lags: bool = False,
) -> list[MemoryPhase]:
    """The phases of a run in their order.

    Args:
        shape: the model.
        weights: its parameters in all roles.
        rollout: the largest part that is decoded together.
        evaluation: the same of an evaluation, where there is one.
        micro_batches: what the learner takes, in full length.
        accumulates: gradients of earlier micro-batches are there when the last one comes.
        logprobs: the learner's own log-probs are taken once more before the gradient.
        grad_checkpoint: blocks are computed again in the backward pass.
        lags: the sampler's weights are not renewed at every update, and live through it.
    """
    held = {
        "weights": weights.masters,
        "frozen weights": weights.frozen,
        "vision tower": weights.vision,
        "moments": weights.moments,
        "reference weights": weights.reference,
    }
    rolled = {**held, "rollout weights": weights.rollout}
    made = [
        MemoryPhase("prompts", {**rolled, **_prompts(shape, weights, rollout)}),
        MemoryPhase("rollout", {**rolled, **_decoding(shape, weights, rollout)}),
    ]
    if rollout.turns:
        made.append(MemoryPhase("turns", {**rolled, **_turns(shape, weights, rollout)}))
    if logprobs:
        made.append(_largest([_logprobs(shape, weights, rolled, batch) for batch in micro_batches]))
    made.append(
        _largest(
            [
                _gradient(shape, weights, rolled, batch, accumulates, grad_checkpoint)
                for batch in micro_batches
            ]
        )
    )
    made.append(MemoryPhase("update", {**(rolled if lags else held), **_update(shape, weights)}))
    if weights.rollout:
        made.append(MemoryPhase("sync", {**rolled, "compute copy": weights.trained * weights.compute}))
    if evaluation is not None:
        made += [
            MemoryPhase("evaluation prompts", {**rolled, **_prompts(shape, weights, evaluation)}),
            MemoryPhase("evaluation", {**rolled, **_decoding(shape, weights, evaluation)}),
        ]
        if evaluation.turns:
            made.append(MemoryPhase("evaluation turns", {**rolled, **_turns(shape, weights, evaluation)}))
    return made


def floor(weights: Weights) -> int:
    """Bytes without which no run takes a step: weights, moments and one set of gradients."""
    trained = weights.masters + weights.moments + weights.gradients
    return trained + weights.frozen + weights.vision + weights.reference


def _copy(weights: Weights, sampling: SampledRows) -> int:
    return 0 if sampling.own_weights and weights.rollout else weights.copy


def _prompts(shape: ModelShape, weights: Weights, sampling: SampledRows) -> dict[str, float]:
    """One call of the prefill, with the caches as far as they are filled then."""
    length = sampling.prompt
    chunk = Pass(rows=sampling.prompts, length=min(length, PREFILL_TOKENS), attended=length)
    filled = -(-length // CACHE_STEP) * CACHE_STEP
    keys = 2 * shape.layers * shape.keys * weights.compute * sampling.prompts * filled
    return {
        "compute copy": _copy(weights, sampling),
        "weights to sample with": weights.sampling,
        "keys and values": keys,
        "working set": chunk.nbytes(shape, PREFILL, weights.compute),
    }


def _decoding(shape: ModelShape, weights: Weights, sampling: SampledRows) -> dict[str, float]:
    keys = kv_bytes(
        shape,
        rows=sampling.rows,
        prompt=sampling.prompt,
        new=sampling.new,
        itemsize=weights.compute,
        prompt_copies=sampling.prompt_copies,
        step=sampling.step,
    )
    logits = FLOAT * sampling.rows * shape.vocabulary
    # A cache grows block by block into a new array; one model block at a time holds old and new.
    grows_from = sampling.prompt if sampling.prompt_copies is None else 0
    own = kv_bytes(
        attrs.evolve(shape, layers=1),
        rows=sampling.rows,
        prompt=grows_from,
        new=sampling.new,
        itemsize=weights.compute,
        step=sampling.step,
    )
    token = Pass(rows=sampling.rows, length=1, attended=sampling.prompt + sampling.new)
    # The logits of the last draw are still there when the caches grow, but its other arrays are not.
    working = own + token.nbytes(shape, PREFILL, weights.compute) + logits
    drawing = sampling.arrays * logits
    return {
        "compute copy": _copy(weights, sampling),
        "weights to sample with": weights.sampling,
        "keys and values": keys,
        # Those of earlier turns stay with their batch; rows that wait for a reply have a copy.
        "parked rows": 2 * _own(shape, weights, sampling) if sampling.turns else 0,
        "working set": working if working >= drawing else 0,
        "logits": 0 if working >= drawing else drawing,
    }


def _own(shape: ModelShape, weights: Weights, sampling: SampledRows) -> int:
    """Keys and values of all rows behind their prompts, at full length; of copied prompts these too."""
    return kv_bytes(
        shape,
        rows=sampling.rows,
        prompt=0 if sampling.prompt_copies is not None else sampling.prompt,
        new=sampling.new,
        itemsize=weights.compute,
        step=sampling.step,
    )


def _turns(shape: ModelShape, weights: Weights, sampling: SampledRows) -> dict[str, float]:
    """Rows that begin a turn with given tokens: an upper bound, with every row there at its full length.

    Beside what decoding holds, all rows' own keys and values are joined, and appended to.
    """
    held = _decoding(shape, weights, sampling)
    length = min(sampling.new, max(LEAST_EXTENSION, EXTEND_TOKENS // sampling.rows))
    given = Pass(rows=sampling.rows, length=length, attended=sampling.prompt + sampling.new)
    return {
        **{name: held[name] for name in ("compute copy", "weights to sample with", "keys and values")},
        "parked rows": 3 * _own(shape, weights, sampling),
        "working set": given.nbytes(shape, PREFILL, weights.compute),
        "logits": FLOAT * sampling.rows * shape.vocabulary,
    }


def _logprobs(shape: ModelShape, weights: Weights, held: dict[str, int], batch: MicroBatch) -> MemoryPhase:
    working = batch.forward(shape, weights.compute)
    logits, _ = batch.logits(shape, weights.compute, gradient=False)
    return MemoryPhase(
        "log-probs",
        {
            **held,
            "compute copy": weights.copy,
            "working set": working if working >= logits else 0,
            "logits": 0 if working >= logits else logits,
        },
    )


def _gradient(
    shape: ModelShape,
    weights: Weights,
    held: dict[str, int],
    batch: MicroBatch,
    accumulates: bool,
    checkpointed: bool,
) -> MemoryPhase:
    """The larger of the backward pass's two ends: all activations saved, or all gradients computed."""
    base = {**held, "compute copy": weights.copy}
    if accumulates:
        base["accumulated gradients"] = weights.gradients
    saved = batch.saved_activations(shape, weights.compute, checkpointed=checkpointed)
    working = batch.in_flight(shape, weights.compute, checkpointed=checkpointed)
    logits, share = batch.logits(shape, weights.compute, gradient=True)
    beside = (1 - share) * working  # the rest of what is in flight is the last block's
    at_logits = logits + beside >= working
    head = FLOAT * weights.embedding
    first = {
        **base,
        "activations": saved,
        "working set": beside if at_logits else working,
        "logits": logits if at_logits else 0,
        "gradient of the head": head,
    }
    last = {
        **base,
        "gradients": weights.gradients,
        "working set": working,
        # A tied embedding's two gradients, as input and as head, are there before they are added.
        "gradient of the head": head if shape.tied else 0,
    }
    return _largest([MemoryPhase("gradient", first), MemoryPhase("gradient", last)])


def _update(shape: ModelShape, weights: Weights) -> dict[str, float]:
    """Gradients, and what is in flight of new values beside the old ones: a block and the embedding."""
    ahead = (weights.trained - weights.embedding) / shape.layers + weights.embedding
    each = _UPDATED + (_RANDOM_BITS if weights.master < FLOAT else 0)
    if weights.sharded:
        # This rank's part of the summed gradients, its new masters and moments, and the gathered weights.
        part = 4 * FLOAT * weights.trained / weights.ranks
        return {
            "accumulated gradients": weights.gradients,
            "working set": part + weights.trained * weights.compute,
        }
    sums = {"sums over the ranks": weights.gradients} if weights.ranks > 1 else {}
    return {"accumulated gradients": weights.gradients, **sums, "working set": each * ahead}


def _largest(found: Sequence[MemoryPhase]) -> MemoryPhase:
    return max(found, key=lambda phase: phase.total)
