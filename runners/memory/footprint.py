"""The memory of a run, phase by phase: each phase a sum of named parts, the peak the largest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from grpo_fn.rollout import EXTEND_TOKENS, LEAST_EXTENSION, PREFILL_TOKENS
from runners.memory.passes import CACHE_STEP, FLOAT, PREFILL, MicroBatch, ModelShape, Pass, kv_bytes

# Bytes for each weight while its update is computed (measured, as in `memory`), and for its random bits.
_UPDATED, _RANDOM_BITS = 11, 2


@attrs.frozen(kw_only=True)
class WeightSizes:
    """Bytes of a run's parameters."""

    trained: int  # number of trained parameters, not bytes
    master: int  # bytes of one master weight, which the optimizer changes
    compute: int  # bytes of a number in the computation
    moment: int = FLOAT  # bytes of a number in one of the optimizer's two moments
    frozen: int = 0  # bytes of the parameters that are not trained
    vision: int = 0  # bytes of a vision tower, which is not trained either
    rollout: int = 0  # bytes of a sampler with its own weights (quantized, or older)
    reference: int = 0  # bytes of a reference (beta > 0)
    embedding: int = 0  # trained parameters of the embedding, 0 if it is not trained
    sampling: int = 0  # bytes of weights that are made anew for each rollout: `decode_weights`
    ranks: int = 1  # number of ranks of the run
    sharded: bool = False  # whether masters and moments are split over the ranks

    @property
    def masters(self) -> int:
        """Bytes of the learner's weights; if sharded: all in the compute dtype, and a part of the masters."""
        if self.sharded:
            return self.trained * self.compute + self.trained * self.master // self.ranks
        return self.trained * self.master

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's state."""
        return 2 * self.trained * self.moment // (self.ranks if self.sharded else 1)

    @property
    def copy(self) -> int:
        """Bytes of the weights' copy in the compute dtype, 0 if the masters have that dtype."""
        return 0 if self.sharded or self.compute == self.master else self.trained * self.compute

    @property
    def gradients(self) -> int:
        """Bytes of one set of accumulated gradients."""
        return self.trained * FLOAT


@attrs.frozen(kw_only=True)
class SampledRows:
    """A part of a rollout whose rows are decoded together."""

    prompts: int
    rows: int
    prompt: int  # tokens
    new: int  # tokens at most
    arrays: int  # number of [rows,V] float32 arrays in a draw: `memory.sampling_arrays`
    prompt_copies: int | None = None  # these two as in `memory.kv_bytes`
    step: int = CACHE_STEP
    own_weights: bool = True  # samples with the rollout policy's weights; False: with the learner's
    turns: bool = False  # conversations: rows are parked and extended by given tokens, which `new` counts too


def _whole(parts: Mapping[str, float]) -> dict[str, int]:
    return {name: round(nbytes) for name, nbytes in parts.items() if nbytes >= 1}


@attrs.frozen
class MemoryPhase:
    """The memory at the peak of one phase: bytes by name, without parts of 0 bytes."""

    name: str
    parts: dict[str, int] = attrs.field(converter=_whole)

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


def phases(
    shape: ModelShape,
    weights: WeightSizes,
    *,
    rollout: SampledRows,
    micro_batches: Sequence[MicroBatch],
    evaluation: SampledRows | None = None,
    accumulates: bool = False,
    logprobs: bool = False,
    grad_checkpoint: bool = False,
    lags: bool = False,
) -> list[MemoryPhase]:
    """The phases of a run, in order.

    Args:
        shape: the model.
        weights: its parameters in all roles.
        rollout: the largest part that is decoded together.
        evaluation: the same for an evaluation, if there is one.
        micro_batches: the learner's micro-batches, at full length.
        accumulates: gradients of earlier micro-batches are in memory when the last one is computed.
        logprobs: the learner's log-probs are computed once more before the gradient.
        grad_checkpoint: blocks are computed again in the backward pass.
        lags: the sampler's weights are not renewed at every update, so they stay in memory during it.
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


def floor(weights: WeightSizes) -> int:
    """The minimum bytes for one step: weights, moments and one set of gradients."""
    trained = weights.masters + weights.moments + weights.gradients
    return trained + weights.frozen + weights.vision + weights.reference


def _copy(weights: WeightSizes, sampling: SampledRows) -> int:
    return 0 if sampling.own_weights and weights.rollout else weights.copy


def _prompts(shape: ModelShape, weights: WeightSizes, sampling: SampledRows) -> dict[str, float]:
    """One call of the prefill, with the caches filled so far."""
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


def _decoding(shape: ModelShape, weights: WeightSizes, sampling: SampledRows) -> dict[str, float]:
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
    # When the caches grow, the logits of the last draw are still in memory, but its other arrays are not.
    working = own + token.nbytes(shape, PREFILL, weights.compute) + logits
    drawing = sampling.arrays * logits
    return {
        "compute copy": _copy(weights, sampling),
        "weights to sample with": weights.sampling,
        "keys and values": keys,
        # Caches of earlier turns stay with their batch; rows that wait for a reply have a copy.
        "parked rows": 2 * _own(shape, weights, sampling) if sampling.turns else 0,
        "working set": working if working >= drawing else 0,
        "logits": 0 if working >= drawing else drawing,
    }


def _own(shape: ModelShape, weights: WeightSizes, sampling: SampledRows) -> int:
    """Keys and values of all rows after their prompts, at full length; with copied prompts those too."""
    return kv_bytes(
        shape,
        rows=sampling.rows,
        prompt=0 if sampling.prompt_copies is not None else sampling.prompt,
        new=sampling.new,
        itemsize=weights.compute,
        step=sampling.step,
    )


def _turns(shape: ModelShape, weights: WeightSizes, sampling: SampledRows) -> dict[str, float]:
    """Rows that start a turn with given tokens: an upper bound, with every row at its full length.

    In addition to the memory of decoding, all rows' own keys and values are joined and extended.
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


def _logprobs(
    shape: ModelShape, weights: WeightSizes, held: dict[str, int], batch: MicroBatch
) -> MemoryPhase:
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
    weights: WeightSizes,
    held: dict[str, int],
    batch: MicroBatch,
    accumulates: bool,
    checkpointed: bool,
) -> MemoryPhase:
    """The larger of two moments of the backward pass: all activations saved, or all gradients computed."""
    base = {**held, "compute copy": weights.copy}
    if accumulates:
        base["accumulated gradients"] = weights.gradients
    saved = batch.saved_activations(shape, weights.compute, checkpointed=checkpointed)
    working = batch.in_flight(shape, weights.compute, checkpointed=checkpointed)
    logits, share = batch.logits(shape, weights.compute, gradient=True)
    beside = (1 - share) * working  # the other arrays in flight belong to the last block
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
        # A tied embedding has two gradients, as input and as head, before they are added.
        "gradient of the head": head if shape.tied else 0,
    }
    return _largest([MemoryPhase("gradient", first), MemoryPhase("gradient", last)])


def _update(shape: ModelShape, weights: WeightSizes) -> dict[str, float]:
    """Gradients, and the new values that exist beside the old ones: of a block and the embedding."""
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
