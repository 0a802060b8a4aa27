"""Predicts the memory of a config's run, phase by phase, and chooses what depends on memory.

Each phase is a sum of named parts; the peak is the largest phase. All completions are assumed to reach
`rollout.max_new_tokens`, and all groups to have a gradient.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import attrs

from grpo_fn.learner import Packer, Row, Shape, piece_tokens
from grpo_fn.policy import ROOM
from grpo_fn.rollout import EXTEND_TOKENS, LEAST_EXTENSION, PREFILL_TOKENS
from runners.config.loading import Config
from runners.engines.settings import DEFAULT_ROWS
from runners.machine.startup import Platform
from runners.memory.shapes import (
    BACKWARD,
    CHECKPOINTED,
    FLOAT,
    PREFILL,
    ModelShape,
    block_bytes,
    logit_bytes,
    saved_arrays,
)
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
MOST_PROMPTS = 1 << 16  # the largest number of prompts per batch step that is tried
GREEDY_ARRAYS = 5  # [rows,V] float32 arrays of a greedy draw, the logits included


@attrs.frozen(kw_only=True)
class Forecast:
    """The predicted memory of a run, in bytes."""

    config: Config  # with system.micro_batch_tokens
    sizes: ModelSizes
    prompt: int  # tokens of the longest prompt
    total: int  # that the run may use
    phases: dict[str, dict[str, int]]  # phase -> part -> bytes, in the order of a step

    @property
    def totals(self) -> dict[str, int]:
        """The sum of each phase."""
        return {name: sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def peak(self) -> str:
        """The phase that takes most."""
        return max(self.totals, key=self.totals.__getitem__)

    @property
    def nbytes(self) -> int:
        """The predicted peak."""
        return max(self.totals.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory."""
        return self.nbytes <= self.total


def forecast(config: Config, platform: Platform, total: int, *, prompt: int, sizes: ModelSizes) -> Forecast:
    """The phases of the run that a checked config describes, on one of `sizes.ranks` ranks.

    `prompt` is the longest prompt's length. `total` is the machine's memory, which `system.memory_limit_gb`
    may reduce. If the config sets no micro-batch, it is as large as is useful and fits.
    """
    total = within_limit(config, total)

    def of(tokens: int) -> Forecast:
        chosen = with_keys(config, "system", micro_batch_tokens=tokens)
        phases = _phases(chosen, platform, prompt, sizes)
        return Forecast(config=chosen, sizes=sizes, prompt=prompt, total=total, phases=phases)

    if config.system.micro_batch_tokens:
        return of(config.system.micro_batch_tokens)
    new = config.rollout.max_new_tokens
    tokens = usual_tokens(sizes.shape, sizes.compute, prompt, new, platform.backend)
    while platform.backend != "cpu" and tokens > prompt + new:
        share = ROOM_TO_LEARN if tokens <= GPU_TOKENS else ROOM_FOR_SPEED
        if of(tokens).totals["gradient"] <= share * total:
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
    row = shape.layers * block_bytes(shape, saved_arrays(shape), itemsize, 1, length, length)
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
    held = sum(found.sizes.held.values()) + found.sizes.rollout

    def fits(groups: int) -> bool:
        own = with_keys(found.config, "rollout", max_batch=groups * size)
        phases = _rollout(own, found.prompt, found.sizes).values()
        return held + max(sum(parts.values()) for parts in phases) <= ROOM_TO_DECODE * found.total

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


def within_limit(config: Config, total: int) -> int:
    """`total` bytes, or `system.memory_limit_gb` if that is less."""
    limit = int(config.system.memory_limit_gb * 1e9)
    return min(total, limit) if limit else total


def _phases(config: Config, platform: Platform, prompt: int, sizes: ModelSizes) -> dict[str, dict[str, int]]:
    """Bytes by phase and part, without parts of 0 bytes."""
    optim, rollout = config.optim, config.rollout
    rolled = {**sizes.held, "rollout weights": sizes.rollout}
    rows = rollout.max_batch or DEFAULT_ROWS
    rows = min(rows, config.eval.samples or rows)
    new = config.eval.max_new_tokens or rollout.max_new_tokens
    held_out = _decoding(config, sizes, rows, rows, prompt, new, GREEDY_ARRAYS, sizes.copy)
    shapes = _micro_batches(config, platform, prompt, sizes)
    accumulates = len(shapes) > 1 or optim.gradient_accumulation_steps > 1
    gradients = [
        gradient_phase(sizes, shape, accumulates, config.system.grad_checkpoint) for shape in set(shapes)
    ]
    graded = _most(*(_teacher(sizes, shape) for shape in set(shapes)))
    lags = config.loss.sync_every > optim.gradient_accumulation_steps
    found = {
        **{name: {**rolled, **parts} for name, parts in _rollout(config, prompt, sizes).items()},
        "evaluation": {**rolled, **_most(*held_out.values())},
        **({"teacher": {**rolled, **graded}} if graded and config.teacher.form == "reward" else {}),
        "gradient": {**rolled, **_most(*gradients), **(graded if config.teacher.form == "loss" else {})},
        "update": {**(rolled if lags else sizes.held), **_update(sizes)},
    }
    return {
        name: {part: round(nbytes) for part, nbytes in parts.items() if nbytes >= 1}
        for name, parts in found.items()
    }


def _most(*phases: dict[str, float]) -> dict[str, float]:
    return max(phases, key=lambda parts: sum(parts.values()))


def _rollout(config: Config, prompt: int, sizes: ModelSizes) -> dict[str, dict[str, float]]:
    """The two phases of a rollout of the training prompts.

    Measured: an exponential takes four arrays besides the logits, top-k sorts a copy, and top-p takes an
    exponential of it as well. The entropy's arrays may be in memory at the same time.
    """
    rollout, size = config.rollout, config.rollout.num_generations
    prompts = -(-config.optim.batch_size // sizes.ranks)
    if rollout.max_batch:
        prompts = min(prompts, max(rollout.max_batch // size, 1))
    truncation = 8 + (rollout.top_k > 0) if rollout.top_p < 1 else 2 if rollout.top_k else rollout.min_p > 0
    arrays = 5 + max(truncation, 8 * (config.loss.top_entropy_quantile < 1))
    copy = 0 if sizes.rollout else sizes.copy
    return _decoding(config, sizes, prompts, prompts * size, prompt, rollout.max_new_tokens, arrays, copy)


def _decoding(
    config: Config, sizes: ModelSizes, prompts: int, rows: int, prompt: int, new: int, arrays: int, copy: int
) -> dict[str, dict[str, float]]:
    """The prefill of some prompts, and decoding `rows` completions of them at their full length."""
    shape, size, turns = sizes.shape, sizes.compute, config.env.answers
    position = 2 * shape.keys * size  # bytes of a position's keys and values in one block
    step = ROOM if sizes.shares_prefix else CACHE_STEP
    own = position * rows * -(-(new - 1) // step) * step  # the last drawn token is never an input
    copies = position * (prompts if sizes.shares_prefix else rows) * prompt
    grown = own if sizes.shares_prefix else own + copies
    logits = FLOAT * rows * shape.vocabulary
    given = min(new, max(LEAST_EXTENSION, EXTEND_TOKENS // rows)) if turns else 1  # tokens of one call
    # A cache grows into a new array, a block at a time; then only the logits of the last draw are in memory.
    growing = grown + block_bytes(shape, PREFILL, size, rows, given, prompt + new) + logits
    drawing = arrays * logits
    weights = {"compute copy": copy, "weights to sample with": sizes.decoding}
    return {
        "prompts": {
            **weights,
            "keys and values": shape.layers * position * prompts * -(-prompt // CACHE_STEP) * CACHE_STEP,
            "working set": block_bytes(shape, PREFILL, size, prompts, min(prompt, PREFILL_TOKENS), prompt),
        },
        "rollout": {
            **weights,
            "keys and values": shape.layers * (copies + own),
            # Conversations: caches of earlier turns, rows that wait for a reply, rows that are extended.
            "parked rows": 3 * shape.layers * grown if turns else 0,
            **({"working set": growing} if growing >= drawing else {"logits": drawing}),
        },
    }


def _micro_batches(config: Config, platform: Platform, prompt: int, sizes: ModelSizes) -> list[Shape]:
    """The micro-batches of a batch step, or of its first rows."""
    size, new, tokens = config.rollout.num_generations, config.rollout.max_new_tokens, config.system
    rows = -(-config.optim.batch_size // sizes.ranks) * size // config.optim.minibatches
    packed = max(PACKED_ROWS, tokens.micro_batch_tokens // (prompt + new) + size)
    rows = min(max(rows, 1), max(packed // size, 1) * size)
    price = piece_tokens(sizes.parameters)
    packer = Packer(max_tokens=tokens.micro_batch_tokens, bucketed=True, piece_tokens=price)
    shares = sizes.shares_prompts and shares_prompts(config, platform)
    planned = packer.pack([Row(i, i // size, prompt, new, new) for i in range(rows)], shares)
    return [run.shape for run in planned]


def gradient_phase(
    sizes: ModelSizes, batch: Shape, accumulates: bool, checkpointed: bool
) -> dict[str, float]:
    """The larger of two moments of the backward pass: all activations saved, or all gradients computed."""
    shape, size = sizes.shape, sizes.compute
    passes = [(batch.rows, batch.length, batch.length)]  # rows, tokens, tokens attended to
    if batch.prompts:  # the prompts, and the completions, whose last token is never an input
        own = batch.width - 1
        passes = [(batch.prompts, batch.length, batch.length), (batch.rows, own, batch.length + own)]
    saved = saved_arrays(shape)
    # A checkpointed block is computed again first. MLX is then one block ahead: two are in memory.
    flying = [BACKWARD, saved, saved] if checkpointed else [BACKWARD]
    working = max(sum(block_bytes(shape, counts, size, *each) for counts in flying) for each in passes)
    kept = CHECKPOINTED if checkpointed else saved
    activations = shape.layers * sum(block_bytes(shape, kept, size, *each) for each in passes)
    logits, share = logit_bytes(shape, batch.rows * batch.width, size)
    logits += (1 - share) * working  # the other arrays in flight belong to the last block
    head = FLOAT * sizes.embedding
    base = {"compute copy": sizes.copy, "accumulated gradients": sizes.gradients if accumulates else 0}
    busy = {"logits": logits} if logits >= working else {"working set": working}
    first = {**base, "activations": activations, **busy, "gradient of the head": head}
    # A tied embedding has two gradients, as input and as head, before they are added.
    last = {"gradients": sizes.gradients, "gradient of the head": head if shape.tied else 0}
    return _most(first, {**base, "working set": working, **last})


def _teacher(sizes: ModelSizes, batch: Shape) -> dict[str, float]:
    """A teacher's forward pass over a micro-batch, whose rows are as long as the student's."""
    shape, size = sizes.teacher_shape, sizes.compute
    if shape is None:
        return {}
    length = batch.length + (batch.width if batch.prompts else 0)
    return {
        "teacher's working set": block_bytes(shape, PREFILL, size, batch.rows, length, length),
        "teacher's logits": logit_bytes(shape, batch.rows * batch.width, size)[0],
    }


def _update(sizes: ModelSizes) -> dict[str, float]:
    """Gradients, and the new values that exist beside the old ones: of a block and the embedding."""
    found: dict[str, float] = {"accumulated gradients": sizes.gradients}
    if sizes.sharded:  # a part of the summed gradients, new masters and moments, and the gathered weights
        part = 4 * FLOAT * sizes.trained / sizes.ranks
        return {**found, "working set": part + sizes.trained * sizes.compute}
    ahead = (sizes.trained - sizes.embedding) / sizes.shape.layers + sizes.embedding
    each = UPDATED + (RANDOM_BITS if sizes.master < FLOAT else 0)
    sums = sizes.gradients if sizes.ranks > 1 else 0
    return {**found, "sums over the ranks": sums, "working set": each * ahead}
