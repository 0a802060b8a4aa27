"""Predicts the memory of a config's run: each phase of a step; the largest is the peak.

All completions are assumed to reach `rollout.max_new_tokens`, and all groups to have a gradient.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import attrs

from grpo_fn.learner import Packer, Row, Shape, piece_tokens
from grpo_fn.policy import ROOM
from grpo_fn.rollout import PREFILL_TOKENS
from runners.config.loading import Config
from runners.engines.engine import DEFAULT_ROWS
from runners.machine.startup import Platform
from runners.memory.shapes import BACKWARD, CHECKPOINTED, FLOAT, PREFILL, ModelShape
from runners.memory.sizes import ModelSizes

# On a CPU, once a micro-batch fills the caches, more rows make no product faster and only take memory. On a
# GPU the host needs about 5 ms a block to launch a micro-batch of any size (H100: .16 s for 30 blocks): the
# micro-batches of a small model must be large to keep the device busy.
CPU_ACTIVATIONS = 75e6  # bytes that a micro-batch saves for the backward pass
CPU_COMPLETIONS = 3  # are taken together with their prompt, even if they need more memory
LEAST_TOKENS, MOST_TOKENS = 256, 16384
GPU_TOKENS = 8192
GPU_WORK, MOST_GPU_TOKENS = 2.5e11, 65536  # parameters of a block × tokens that take as long as their launch
ROOM_TO_LEARN = 0.85  # share of the memory for a micro-batch chosen here; the rest covers forecast errors
ROOM_FOR_SPEED = 0.5  # the same for one of more than GPU_TOKENS, which only saves launches
ROOM_TO_DECODE = 0.8  # share of the memory for completions decoded together
CACHE_STEP = 256  # mlx-lm's caches grow by so many positions
PACKED_ROWS = 256  # rows of a batch step that are packed: more rows do not change the micro-batch
UPDATED, RANDOM_BITS = 11, 2  # bytes of a weight while its update is computed (measured), of its random bits
DRAW_ARRAYS = 5  # [rows,V] float32 arrays of a draw, the logits and an exponential included
FILTER_ARRAYS = 8  # more of them for what sorts: top-k, top-p, entropies to compare
MOST_PROMPTS = 1 << 16  # the largest number of prompts per batch step that is tried


@attrs.frozen
class Phase:
    """Bytes of a part of a step."""

    weights: int = attrs.field(converter=round)  # of all roles, and copies of them
    optimizer: int = attrs.field(converter=round)  # moments and gradients
    activations: int = attrs.field(default=0, converter=round)  # of both passes, logits included
    cache: int = 0  # keys and values

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(attrs.astuple(self))


@attrs.frozen(kw_only=True)
class Forecast:
    """The predicted memory of a run, in bytes."""

    config: Config  # with system.micro_batch_tokens
    sizes: ModelSizes
    prompt: int  # tokens of the longest prompt
    total: int  # that the run may use
    phases: dict[str, Phase]  # rollout, evaluation, gradient, update

    @property
    def peak(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def nbytes(self) -> int:
        """The predicted peak."""
        return self.phases[self.peak].total

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory."""
        return self.nbytes <= self.total


def forecast(config: Config, platform: Platform, total: int, *, prompt: int, sizes: ModelSizes) -> Forecast:
    """The memory of the run that a checked config describes, on one of `sizes.ranks` ranks.

    `prompt` is the longest prompt's length. `total` is what the run may use. If the config sets no
    micro-batch, it is as large as is useful and fits.
    """

    def of(tokens: int) -> Forecast:
        chosen = with_keys(config, "system", micro_batch_tokens=tokens)
        phases = {
            "rollout": _rollout(chosen, prompt, sizes),
            "evaluation": _evaluation(chosen, prompt, sizes),
            "gradient": _gradient(chosen, platform, prompt, sizes),
            "update": _update(chosen, sizes),
        }
        return Forecast(config=chosen, sizes=sizes, prompt=prompt, total=total, phases=phases)

    if config.system.micro_batch_tokens:
        return of(config.system.micro_batch_tokens)
    new = config.rollout.max_new_tokens
    tokens = usual_tokens(sizes.shape, sizes.compute, prompt, new, platform.backend)
    while platform.backend != "cpu" and tokens > prompt + new:
        share = ROOM_TO_LEARN if tokens <= GPU_TOKENS else ROOM_FOR_SPEED
        if of(tokens).phases["gradient"].total <= share * total:
            break
        tokens //= 2
    return of(tokens)


def usual_tokens(shape: ModelShape, itemsize: int, prompt: int, new: int, backend: str) -> int:
    """Tokens of a micro-batch where memory is no limit: on a CPU those whose activations fill the caches,
    with CUDA those that take as long as their launch."""
    if backend == "metal":  # ends command buffers that take long
        return GPU_TOKENS
    if backend != "cpu":
        tokens = min(max(GPU_WORK / shape.block_parameters, GPU_TOKENS), MOST_GPU_TOKENS)
        return 1 << int(tokens).bit_length() - 1
    length = prompt + new
    row = shape.layers * shape.block_bytes(shape.saved, itemsize, 1, length, length)
    tokens = int(CPU_ACTIVATIONS * length / row) // 64 * 64
    return min(max(tokens, prompt + CPU_COMPLETIONS * new, LEAST_TOKENS), MOST_TOKENS)


def shares_prompts(config: Config, platform: Platform) -> bool:
    """Whether the learner computes a group's prompt once, if the model can: on a GPU only if asked for,
    because attention would need a mask array there.

    Never with checkpointed blocks, which would run again without the first run's keys, or where routers'
    decisions are recorded over whole rows.
    """
    wish, loss = config.system.share_prompts, config.loss
    wanted = wish == "always" or (wish == "auto" and platform.backend == "cpu")
    return wanted and not (config.system.grad_checkpoint or loss.router_aux_coef or loss.router_replay)


def rows_that_fit(found: Forecast) -> int:
    """The largest rollout.max_batch whose rollout leaves some of the memory; at least one group."""
    size = found.config.rollout.num_generations

    def fits(groups: int) -> bool:
        own = with_keys(found.config, "rollout", max_batch=groups * size)
        return _rollout(own, found.prompt, found.sizes).total <= ROOM_TO_DECODE * found.total

    return size * max(_largest(fits, -(-found.config.optim.batch_size // found.sizes.ranks)), 1)


def largest_batch(found: Forecast, platform: Platform) -> int:
    """The largest `optim.batch_size` whose peak fits into the memory; 0 if not even one prompt fits."""

    def fits(prompts: int) -> bool:
        other = with_keys(found.config, "optim", batch_size=prompts)
        return forecast(other, platform, found.total, prompt=found.prompt, sizes=found.sizes).fits

    return _largest(fits, MOST_PROMPTS)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in 1..most with fits(n), or 0; fits must be true up to some n and false after it."""
    return bisect_left(range(1, most + 1), True, key=lambda n: not fits(n))


def with_keys(config: Config, section: str, **values: object) -> Config:
    """The config with other values in a section."""
    return attrs.evolve(config, **{section: attrs.evolve(getattr(config, section), **values)})


def _rollout(config: Config, prompt: int, sizes: ModelSizes) -> Phase:
    """The training prompts, as many as are decoded together."""
    rollout, prompts = config.rollout, -(-config.optim.batch_size // sizes.ranks)
    if rollout.max_batch:
        prompts = min(prompts, max(rollout.max_batch // rollout.num_generations, 1))
    sorts = rollout.top_k or rollout.top_p < 1 or config.loss.top_entropy_quantile < 1
    arrays = DRAW_ARRAYS + (FILTER_ARRAYS if sorts else 0)
    copy = 0 if sizes.rollout else sizes.copy
    rows = prompts * rollout.num_generations
    return _decoding(config, sizes, prompts, rows, prompt, rollout.max_new_tokens, arrays, copy)


def _evaluation(config: Config, prompt: int, sizes: ModelSizes) -> Phase:
    """A completion of each held-out problem, as many as are decoded together."""
    rows = config.rollout.max_batch or DEFAULT_ROWS
    rows = min(rows, config.eval.samples or rows)
    new = config.eval.max_new_tokens or config.rollout.max_new_tokens
    return _decoding(config, sizes, rows, rows, prompt, new, DRAW_ARRAYS, sizes.copy)


def _decoding(
    config: Config, sizes: ModelSizes, prompts: int, rows: int, prompt: int, new: int, arrays: int, copy: int
) -> Phase:
    """The prefill of some prompts, and decoding `rows` completions of them at full length: the larger one."""
    shape, size, talks = sizes.shape, sizes.compute, config.env.answers
    logits = FLOAT * rows * shape.vocabulary
    position = 2 * shape.keys * size  # bytes of a position's keys and values in one block
    step = ROOM if sizes.shares_prefix else CACHE_STEP
    own = position * rows * -(-(new - 1) // step) * step  # the last drawn token is never an input
    copies = position * (prompts if sizes.shares_prefix else rows) * prompt
    grown = own if sizes.shares_prefix else own + copies
    given = min(new, PREFILL_TOKENS) if talks else 1  # tokens of a call
    # A cache grows into a new array, a block at a time; then only the logits of the last draw are in memory.
    growing = grown + shape.block_bytes(PREFILL, size, rows, given, prompt + new) + logits
    prefill = shape.block_bytes(PREFILL, size, prompts, min(prompt, PREFILL_TOKENS), prompt)
    prefill += shape.layers * (
        position * prompts * (-prompt % CACHE_STEP) - own
    )  # its cache, and none of those
    return Phase(
        weights=sizes.weights + sizes.rollout + sizes.decoding + copy,
        optimizer=sizes.moments,
        activations=max(prefill, growing, arrays * logits),
        # Conversations: caches of earlier turns, rows that wait for a reply, rows that are extended.
        cache=shape.layers * (copies + own + (3 * grown if talks else 0)),
    )


def _gradient(config: Config, platform: Platform, prompt: int, sizes: ModelSizes) -> Phase:
    """The largest micro-batch of a batch step, or of its first rows."""
    size, new, tokens = config.rollout.num_generations, config.rollout.max_new_tokens, config.system
    rows = -(-config.optim.batch_size // sizes.ranks) * size // config.optim.minibatches
    packed = max(PACKED_ROWS, tokens.micro_batch_tokens // (prompt + new) + size)
    rows = min(max(rows, 1), max(packed // size, 1) * size)
    price = piece_tokens(sizes.parameters)
    packer = Packer(max_tokens=tokens.micro_batch_tokens, bucketed=True, piece_tokens=price)
    shares = sizes.shares_prompts and shares_prompts(config, platform)
    planned = packer.pack([Row(i, i // size, prompt, new, new) for i in range(rows)], shares)
    sums = len(planned) > 1 or config.optim.gradient_accumulation_steps > 1
    found = (_backward(config, sizes, shape, sums) for shape in {run.shape for run in planned})
    return max(found, key=lambda phase: phase.total)


def _backward(config: Config, sizes: ModelSizes, batch: Shape, sums_up: bool) -> Phase:
    """The larger of two moments of the backward pass: all activations saved, or all gradients computed."""
    shape, size, checkpointed = sizes.shape, sizes.compute, config.system.grad_checkpoint
    passes = [(batch.rows, batch.length, batch.length)]  # rows, tokens, tokens attended to
    if batch.prompts:  # the prompts, and the completions, whose last token is never an input
        own = batch.width - 1
        passes = [(batch.prompts, batch.length, batch.length), (batch.rows, own, batch.length + own)]
    # A checkpointed block is computed again first. MLX is then one block ahead: two are in memory.
    flying = [BACKWARD, shape.saved, shape.saved] if checkpointed else [BACKWARD]
    working = max(sum(shape.block_bytes(counts, size, *each) for counts in flying) for each in passes)
    kept = CHECKPOINTED if checkpointed else shape.saved
    saved = shape.layers * sum(shape.block_bytes(kept, size, *each) for each in passes)
    logits, share = shape.logit_bytes(batch.rows * batch.width, size)
    logits += (1 - share) * working  # the other arrays in flight belong to the last block
    head = FLOAT * sizes.embedding
    weights = sizes.weights + sizes.rollout + sizes.copy
    sums = sizes.moments + (sizes.gradients if sums_up else 0)
    first = Phase(weights, sums + head, saved + max(logits, working))
    # A tied embedding has two gradients, as input and as head, before they are added.
    last = Phase(weights, sums + sizes.gradients + (head if shape.tied else 0), working)
    return max(first, last, key=lambda phase: phase.total)


def _update(config: Config, sizes: ModelSizes) -> Phase:
    """Gradients, and the new values that exist beside the old ones: of a block and the embedding."""
    lags = config.loss.sync_every > config.optim.gradient_accumulation_steps
    gradients = sizes.gradients
    ahead = (sizes.trained - sizes.embedding) / sizes.shape.layers + sizes.embedding
    new = (UPDATED + RANDOM_BITS * (config.model.master != "float32")) * ahead
    gradients += sizes.gradients if sizes.ranks > 1 else 0  # their sums over the ranks
    return Phase(sizes.weights + (sizes.rollout if lags else 0), sizes.moments + gradients + new)
