"""Predicts the memory that a run needs in each phase of a step; the largest phase is the peak.

All completions are assumed to reach `rollout.max_new_tokens`, and all groups to have a gradient.
Operations in flight need additional memory, which was measured: MLX's CPU backend submits up to 100
operations ahead. GPUs need less memory, so the forecasts are upper bounds there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import mul
from typing import NamedTuple

import attrs

from grpo_fn.backends import number
from grpo_fn.learner import Packer, Row, Shape, chunk_rows, piece_tokens
from grpo_fn.policy import ROOM
from grpo_fn.rollout import PREFILL_TOKENS
from runners.config.loading import Config
from runners.engines.engine import DEFAULT_ROWS
from runners.machine.startup import Platform
from runners.memory.sizes import FLOAT, ModelShape, ModelSizes

# On a CPU, once a micro-batch fills the caches, more rows do not speed up products and only need
# memory. On a GPU, the host needs about 5 ms per block to launch a micro-batch of any size (H100: .16
# s for 30 blocks), so a small model's micro-batches must be large to keep the device busy.
CPU_ACTIVATIONS = 75e6  # bytes that a micro-batch saves for the backward pass
CPU_COMPLETIONS = 3  # completions computed with their prompt, even if they need more memory
LEAST_TOKENS = 256
MOST_TOKENS = 16384
GPU_TOKENS = 8192
# A block's parameters × tokens, from 16,384 tokens on: for .5e9 parameters, the learner takes 1.4
# times as long with 8,192, and 28 % more memory with 32,768, at no higher speed
# (`python -m benchmarks.evidence.gpu_step`).
GPU_WORK = 8e10
MOST_GPU_TOKENS = 65536
# share of the memory for a micro-batch chosen here; the rest covers forecast errors
ROOM_TO_LEARN = 0.85
ROOM_FOR_SPEED = 0.5  # the same for more than GPU_TOKENS, which only saves launches
ROOM_TO_DECODE = 0.8  # share of the memory for completions decoded together
CACHE_STEP = 256  # positions by which mlx-lm's caches grow
PACKED_ROWS = 256  # rows per batch step that are packed: more rows do not change the micro-batch
UPDATED = 11  # bytes per weight while its update is computed (measured)
RANDOM_BITS = 2  # bytes of random bits per weight
DRAW_ARRAYS = 5  # [rows,V] float32 arrays for sampling a token, logits included
FILTER_ARRAYS = 8  # further arrays if logits are sorted, for top-k, top-p or entropies
MOST_PROMPTS = 1 << 16  # the largest number of prompts per batch step that is tried


# A block's arrays per position that are as wide as: hidden, intermediate, queries, keys, scores;
# last, the number of hidden-sized arrays that are always float32. The saved arrays follow from a block's
# algebra: its input and its middle sum, the norm and the scaled norm for each; queries after
# rotation, and attention outputs; keys and values, and the layouts that products need. The
# other arrays were measured on llama blocks of 14 shapes, and in full runs of benchmarks/memory.py.
SAVED = (4, 3, 1.5, 4, 1, 2)
CHECKPOINTED = (1, 0, 0, 0, 0, 0)  # the block's input alone
BACKWARD = (7, 3, 3.4, 4.5, 4.2, 1.5)
PREFILL = (5, 7.6, 0, 0, 9.5, 1)


class Phase(NamedTuple):
    """The bytes of one part of a step, by purpose. Their sum is the part's total."""

    weights: float  # weights in all roles, and their copies
    optimizer: float  # moments and gradients
    activations: float = 0  # in both passes, including logits
    cache: float = 0  # keys and values


@attrs.frozen(kw_only=True)
class Forecast:
    """The predicted memory for a run, in bytes."""

    config: Config  # with system.micro_batch_tokens
    sizes: ModelSizes
    prompt: int  # tokens of the longest prompt
    held_out: int  # problems to evaluate on, 0 if unknown
    total: int  # memory that the run may use

    @property
    def phases(self) -> dict[str, Phase]:
        """The parts of a step, by name."""
        return {
            phase.__name__: Phase._make(map(round, phase()))
            for phase in (self.rollout, self.evaluation, self.gradient, self.update)
        }

    @property
    def peak(self) -> tuple[str, int]:
        """The name of the phase that needs the most memory, and its size in bytes."""
        name, phase = max(self.phases.items(), key=lambda item: sum(item[1]))
        return name, int(sum(phase))

    def having(self, section: str, **values: object) -> Forecast:
        """Returns the forecast for the same config with other values in one section."""
        return attrs.evolve(self, config=self.config.having(section, **values))

    def rollout(self) -> Phase:
        """Predicts the rollout phase for the number of training prompts that are decoded
        together.
        """
        rollout = self.config.rollout
        prompts = -(-self.config.optim.batch_size // self.sizes.ranks)
        if rollout.max_batch:
            prompts = min(prompts, max(rollout.max_batch // rollout.num_generations, 1))
        sorts = rollout.top_k or rollout.top_p < 1 or self.config.loss.top_entropy_quantile < 1
        return self._decoding(
            prompts,
            prompts * rollout.num_generations,
            rollout.max_new_tokens,
            arrays=DRAW_ARRAYS + (FILTER_ARRAYS if sorts else 0),
            copy=0 if self.sizes.rollout else self.sizes.copy,
        )

    def evaluation(self) -> Phase:
        """Predicts the evaluation phase for the number of held-out problems that are decoded
        together.
        """
        settings = self.config.eval
        rollout = self.config.rollout
        limit = rollout.max_batch or DEFAULT_ROWS
        rows = min(filter(None, (limit, settings.samples, self.held_out)))
        new = settings.max_new_tokens or rollout.max_new_tokens
        return self._decoding(rows, rows, new, DRAW_ARRAYS, self.sizes.copy)

    def _decoding(self, prompts: int, rows: int, new: int, arrays: int, copy: int) -> Phase:
        """Predicts the memory for prefilling `prompts` prompts or for decoding `rows` completions
        at full length, whichever is larger.
        """
        sizes = self.sizes
        shape = sizes.shape
        size = sizes.compute
        prompt = self.prompt
        once = sizes.shares_prefix
        talks = self.config.env.answers
        logits = FLOAT * rows * shape.vocabulary
        position = 2 * shape.keys * size  # in one block
        # The last sampled token is never an input; caches grow in steps.
        step = ROOM if once else CACHE_STEP
        own = position * rows * -(-(new - 1) // step) * step
        copies = position * (prompts if once else rows) * prompt
        grown = own if once else own + copies
        given = min(new, PREFILL_TOKENS) if talks else 1  # tokens per call
        # A cache grows into a new array, one block at a time; only the last step's logits are then in
        # memory.
        growing = grown + block_bytes(shape, PREFILL, size, rows, given, prompt + new) + logits
        prefill = block_bytes(shape, PREFILL, size, prompts, min(prompt, PREFILL_TOKENS), prompt)
        # The prompts' cache exists, but the completions' cache does not.
        prefill += shape.layers * (position * prompts * (-prompt % CACHE_STEP) - own)
        # Conversations: caches of earlier turns, rows that wait for a reply, rows that are extended.
        turns = 3 * grown if talks else 0
        weights = sizes.weights + sizes.rollout + sizes.decoding + copy
        if sizes.blocks and rows <= number("block_rows"):
            weights += sizes.blocks + sizes.decoding
        return Phase(
            weights=weights,
            optimizer=sizes.moments,
            activations=max(prefill, growing, arrays * logits),
            cache=shape.layers * (copies + own + turns),
        )

    def gradient(self) -> Phase:
        """Predicts the gradient phase for the largest micro-batch of a batch step, or of its first
        rows.
        """
        config = self.config
        sizes = self.sizes
        prompt = self.prompt
        tokens = config.system.micro_batch_tokens
        size = config.rollout.num_generations
        new = config.rollout.max_new_tokens
        rows = -(-config.optim.batch_size // sizes.ranks) * size // config.optim.minibatches
        packed = max(PACKED_ROWS, tokens // (prompt + new) + size)
        rows = min(max(rows, 1), max(packed // size, 1) * size)
        packer = Packer(
            max_tokens=tokens, bucketed=True, piece_tokens=piece_tokens(sizes.parameters)
        )
        each = [Row(i, i // size, prompt, new, new) for i in range(rows)]
        planned = packer.pack(each, sizes.shares_prompts)
        sums_up = len(planned) > 1 or config.optim.gradient_accumulation_steps > 1
        shapes = {run.shape for run in planned}
        return max((self._backward(shape, sums_up) for shape in shapes), key=sum)

    def _backward(self, batch: Shape, sums_up: bool) -> Phase:
        """Predicts a micro-batch's memory at the larger of two moments: when all activations are
        saved, or when all gradients are computed.
        """
        sizes = self.sizes
        shape = sizes.shape
        size = sizes.compute
        passes = [(batch.rows, batch.length, batch.length)]  # rows, tokens, tokens attended to
        if batch.prompts:  # the prompts, and the completions, whose last token is never an input
            own = batch.width - 1
            passes = [
                (batch.prompts, batch.length, batch.length),
                (batch.rows, own, batch.length + own),
            ]
        # A checkpointed block is first recomputed. MLX is then one block ahead, so two blocks are in
        # memory.
        kept = saves = saved(shape)
        flying: list[tuple[float, ...]] = [BACKWARD]
        if self.config.system.grad_checkpoint:
            kept = CHECKPOINTED
            flying += [saves, saves]
        elif sizes.recomputes_mlps:
            kept = (saves[0], 0, *saves[2:])
            flying.append((0, saves[1], 0, 0, 0, 0))
        nbytes = [
            [block_bytes(shape, counts, size, rows, length, attended) for counts in (kept, *flying)]
            for rows, length, attended in passes
        ]
        working = max(sum(each[1:]) for each in nbytes)
        activations = shape.layers * sum(each[0] for each in nbytes)
        # The logits are computed in chunks: on CUDA the products, elsewhere twelve float32 arrays per
        # chunk, up to the 24 that MLX keeps in flight. The other arrays in flight belong to the
        # last block.
        products = number("product_arrays")
        arrays, most, width = (products, products, size) if products else (12, 24, FLOAT)
        targets = arrays * batch.rows * batch.width
        bound = most * chunk_rows(shape.vocabulary)
        logits = (
            width * shape.vocabulary * min(targets, bound) + (1 - min(targets / bound, 1)) * working
        )
        head = FLOAT * sizes.embedding
        weights = sizes.weights + sizes.rollout + sizes.copy
        sums = sizes.moments + (sizes.gradients if sums_up else 0)
        first = Phase(weights, sums + head, activations + max(logits, working))
        # A tied embedding has two gradients, as input and as head, before they are added.
        last = Phase(weights, sums + sizes.gradients + (head if shape.tied else 0), working)
        return max(first, last, key=sum)

    def update(self) -> Phase:
        """Predicts the update phase: gradients, and the new values that exist next to the old ones
        (for one block and the embedding).
        """
        config = self.config
        sizes = self.sizes
        late = config.loss.sync_every > config.optim.gradient_accumulation_steps
        has_sampler = late or config.rollout.max_staleness
        ahead = (sizes.trained - sizes.embedding) / sizes.shape.layers + sizes.embedding
        number_bytes = UPDATED + (RANDOM_BITS if config.model.master != "float32" else 0)
        gradients = sizes.gradients * (2 if sizes.ranks > 1 else 1)  # and their sums over ranks
        return Phase(
            sizes.weights + (sizes.rollout if has_sampler else 0),
            sizes.moments + gradients + number_bytes * ahead,
        )


def saved(shape: ModelShape) -> tuple[float, ...]:
    """Returns the number of arrays that one block saves for the backward pass, in the order of
    `SAVED`. With relu², a block saves one array less than with a gated MLP.
    """
    return (SAVED[0], 3 + number("gate_arrays") if shape.gated else 2, *SAVED[2:])


def block_bytes(
    shape: ModelShape, counts: Sequence[float], itemsize: int, rows: int, length: int, attended: int
) -> float:
    """Returns the bytes that a block's arrays need, for `rows` rows with `length` tokens each,
    which attend to `attended` tokens. `counts` has the format of `SAVED`.
    """
    *counted, precise = counts
    scores = shape.heads * length * attended if itemsize == FLOAT or number("keeps_scores") else 0
    own = [length * width for width in (shape.hidden, shape.intermediate, shape.queries)]
    arrays = [*own, attended * shape.keys, scores]
    return rows * (
        itemsize * sum(map(mul, counted, arrays)) + (FLOAT - itemsize) * precise * own[0]
    )


def forecast(
    config: Config,
    platform: Platform,
    total: int,
    *,
    prompt: int,
    sizes: ModelSizes,
    held_out: int = 0,
) -> Forecast:
    """Predicts the memory that a checked config's run needs, on one of `sizes.ranks` ranks.

    `prompt` is the longest prompt's length. `held_out` is the number of problems to evaluate on, or
    0 if unknown. `total` is the memory that the run may use. If the config does not set the
    micro-batch, the largest useful one that fits is used.
    """
    found = Forecast(config=config, sizes=sizes, prompt=prompt, held_out=held_out, total=total)
    if config.system.micro_batch_tokens:
        return found
    new = config.rollout.max_new_tokens
    tokens = usual_tokens(sizes.shape, sizes.compute, prompt, new, platform.backend)
    while True:
        found = found.having("system", micro_batch_tokens=tokens)
        room = total * (ROOM_TO_LEARN if tokens <= GPU_TOKENS else ROOM_FOR_SPEED)
        if platform.backend == "cpu" or tokens <= prompt + new or sum(found.gradient()) <= room:
            return found
        tokens //= 2


def usual_tokens(shape: ModelShape, itemsize: int, prompt: int, new: int, backend: str) -> int:
    """Returns the number of tokens per micro-batch if memory is not limited. On a CPU, their
    activations fill the caches. With CUDA, computing takes as long as launching.
    """
    if backend == "metal":  # Metal kills command buffers that take too long
        return GPU_TOKENS
    if backend != "cpu":
        parameters = shape.hidden * (2 * shape.queries + 2 * shape.keys + 3 * shape.intermediate)
        tokens = int(min(max(GPU_WORK / parameters, 2 * GPU_TOKENS), MOST_GPU_TOKENS))
        return 1 << tokens.bit_length() - 1  # rounded down to a power of two
    length = prompt + new
    row = shape.layers * block_bytes(shape, saved(shape), itemsize, 1, length, length)
    tokens = int(CPU_ACTIVATIONS * length / row) // 64 * 64
    return min(max(tokens, prompt + CPU_COMPLETIONS * new, LEAST_TOKENS), MOST_TOKENS)


def rows_that_fit(found: Forecast) -> int:
    """Returns the largest rollout.max_batch whose rollout leaves some memory free, but at least one
    group.
    """
    size = found.config.rollout.num_generations
    groups = _largest(
        lambda n: sum(found.having("rollout", max_batch=n * size).rollout()),
        ROOM_TO_DECODE * found.total,
        -(-found.config.optim.batch_size // found.sizes.ranks),
    )
    return size * max(groups, 1)


def largest_batch(found: Forecast) -> int:
    """Returns the largest `optim.batch_size` whose peak fits into the memory, or 0 if not even one
    prompt fits.
    """
    return _largest(
        lambda n: found.having("optim", batch_size=n).peak[1], found.total, MOST_PROMPTS
    )


def _largest(nbytes: Callable[[int], float], room: float, most: int) -> int:
    """Returns the largest n in 0..most whose bytes fit. The bytes must grow with n."""
    return bisect_right(range(1, most + 1), room, key=nbytes)
