"""Predicts the memory of a config's run, phase by phase, and chooses what depends on memory.

Each phase is a sum of named parts; the peak is the largest phase. All completions are assumed to reach
`rollout.max_new_tokens`, and all groups to have a gradient.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import attrs

from grpo_fn.learner import Packer, Row, Shape
from grpo_fn.policy import ROOM
from grpo_fn.rollout import EXTEND_TOKENS, LEAST_EXTENSION, PREFILL_TOKENS
from runners.config.loading import Config
from runners.config.sections import SHIPPED
from runners.data.datasets import load_rows
from runners.data.prompts import build_examples
from runners.data.row_images import processor_of
from runners.engines.settings import DEFAULT_ROWS
from runners.files.json_files import read_json
from runners.machine.startup import Platform
from runners.memory.shapes import (
    BACKWARD,
    CHECKPOINTED,
    FLOAT,
    PREFILL,
    SCAN_BACKWARD,
    SCAN_SAVED,
    Counts,
    ModelShape,
    sampling_arrays,
)
from runners.memory.sizes import ModelSizes
from runners.models.folders import resolve_model
from runners.models.model_reader import load_tokenizer

# On a CPU, once a micro-batch fills the caches, more rows make no product faster and only take memory. On a
# GPU the host needs about 5 ms a block to launch a micro-batch of any size (H100: .16 s for 30 blocks): the
# micro-batches of a small model must be large to keep the device busy.
CPU_ACTIVATIONS = 75e6  # bytes that a micro-batch saves for the backward pass
CPU_COMPLETIONS = 3  # are taken together with their prompt, even if they need more memory
GPU_TOKENS, USUAL_TOKENS = 8192, 4096  # USUAL: for a model whose sizes are not known
GPU_WORK, MOST_GPU_TOKENS = 2.5e11, 65536  # parameters of a block × tokens that take as long as their launch
LEAST_TOKENS, MOST_TOKENS = 256, 16384
ROOM_TO_LEARN = 0.85  # share of the memory for a micro-batch chosen here; the rest covers forecast errors
ROOM_FOR_SPEED = 0.5  # the same for one of more than GPU_TOKENS, which only saves launches
ROOM_TO_DECODE = 0.8  # share of the memory for completions decoded together
CACHE_STEP = 256  # mlx-lm's caches grow by so many positions
PACKED_ROWS = 256  # rows of a batch step that are packed: more rows do not change the micro-batch
UPDATED, RANDOM_BITS = 11, 2  # bytes of a weight while its update is computed (measured), of its random bits
MOST_PROMPTS = 1 << 16  # the largest number of prompts per batch step that is tried


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
    def floor(self) -> int:
        """The least that any batch setting needs: weights, moments and one set of gradients."""
        return round(sum(self.sizes.held.values()) + self.sizes.gradients)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory."""
        return self.nbytes <= self.total


def forecast(config: Config, platform: Platform, total: int, *, prompt: int, sizes: ModelSizes) -> Forecast:
    """The phases of the run that a checked config describes, on one of `sizes.ranks` ranks.

    `prompt` is the longest prompt's length. `total` is the machine's memory, which `system.memory_limit_gb`
    may reduce. If the config sets no micro-batch, it is as large as is useful and fits.
    """
    limit = config.system.memory_limit_gb * 1e9
    total = int(min(total, limit)) if limit else total

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
    row = shape.layers * shape.block_bytes(shape.saved, itemsize, rows=1, length=length, attended=length)
    tokens = int(CPU_ACTIVATIONS * length / row) // 64 * 64
    return min(max(tokens, prompt + CPU_COMPLETIONS * new, LEAST_TOKENS), MOST_TOKENS)


def rows_that_fit(found: Forecast, platform: Platform) -> int:
    """The largest rollout.max_batch whose rollout leaves some of the memory; at least one group."""
    rollout = found.config.rollout
    size, prompts = rollout.num_generations, -(-found.config.optim.batch_size // found.sizes.ranks)

    def fits(groups: int) -> bool:
        own = with_keys(found.config, "rollout", max_batch=groups * size)
        return max(_rollouts(own, found.prompt, found.sizes).values()) <= ROOM_TO_DECODE * found.total

    return size * max(largest(fits, prompts), 1)


def with_keys(config: Config, section: str, **values: object) -> Config:
    """The config with other values in a section."""
    return attrs.evolve(config, **{section: attrs.evolve(getattr(config, section), **values)})


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in 1..most with fits(n), or 0; fits must be true up to some n and false after it."""
    return bisect_left(range(1, most + 1), True, key=lambda n: not fits(n))


def longest_prompt(config: Config) -> int | None:
    """Tokens of the longest training prompt if data and tokenizer are on this machine; else None.

    Raises UserError for data or a tokenizer that cannot be used.
    """
    named = (config.model.path, config.data.source)
    if not all(path in SHIPPED or Path(path).expanduser().exists() for path in named):
        return None
    folder = resolve_model(config.model.path, custom_loader=bool(config.model.loader))
    stated = read_json(folder / "config.json")
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code)
    train, _ = load_rows(config.data, config.folders)
    processor = processor_of(config.data, folder, stated)
    examples, _ = build_examples(train, config.data, tokenizer, processor=processor)
    return max(len(example.tokens) for example in examples)


def _phases(config: Config, platform: Platform, prompt: int, sizes: ModelSizes) -> dict[str, dict[str, int]]:
    """Bytes by phase and part, without parts of 0 bytes."""
    optim = config.optim
    lags = config.loss.sync_every > optim.gradient_accumulation_steps
    rolled = {**sizes.held, "rollout weights": sizes.rollout}
    found = {name: {**rolled, **parts} for name, parts in _decoding_phases(config, prompt, sizes).items()}
    shapes = _micro_batches(config, platform, prompt, sizes)
    accumulates = len(shapes) > 1 or optim.gradient_accumulation_steps > 1
    gradients = [_gradient(sizes, shape, accumulates, config.system.grad_checkpoint) for shape in set(shapes)]
    found["gradient"] = {**rolled, **max(gradients, key=lambda parts: sum(parts.values()))}
    found["update"] = {**(rolled if lags else sizes.held), **_update(sizes)}
    return {
        name: {part: round(nbytes) for part, nbytes in parts.items() if nbytes >= 1}
        for name, parts in found.items()
    }


def _rollouts(config: Config, prompt: int, sizes: ModelSizes) -> dict[str, float]:
    """Bytes of the phases that a rollout has."""
    held = sum(sizes.held.values()) + sizes.rollout
    found = _decoding_phases(config, prompt, sizes)
    return {name: held + sum(found[name].values()) for name in ("prompts", "rollout")}


def _decoding_phases(config: Config, prompt: int, sizes: ModelSizes) -> dict[str, dict[str, float]]:
    rollout, size = config.rollout, config.rollout.num_generations
    prompts = -(-config.optim.batch_size // sizes.ranks)
    if rollout.max_batch:
        prompts = min(prompts, max(rollout.max_batch // size, 1))
    drawing = sampling_arrays(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        entropy=config.loss.top_entropy_quantile < 1,
    )
    copy, turns = 0 if sizes.rollout else sizes.copy, config.env.answers
    found = _decoding(sizes, prompts, prompts * size, prompt, rollout.max_new_tokens, drawing, copy, turns)
    rows = rollout.max_batch or DEFAULT_ROWS
    rows = min(rows, config.eval.samples or rows)
    new = config.eval.max_new_tokens or rollout.max_new_tokens
    greedy = sampling_arrays(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, entropy=False)
    held_out = _decoding(sizes, rows, rows, prompt, new, greedy, sizes.copy, turns)
    most = max(held_out.values(), key=lambda parts: sum(parts.values()))
    return {**found, "evaluation": most}


def _decoding(
    sizes: ModelSizes, prompts: int, rows: int, prompt: int, new: int, arrays: int, copy: int, turns: bool
) -> dict[str, dict[str, float]]:
    """The prefill of some prompts, and decoding `rows` completions of them at their full length."""
    shape, size = sizes.shape, sizes.compute
    position = 2 * shape.keys * size  # bytes of a position's keys and values in one block
    step = ROOM if sizes.shares_prefix else CACHE_STEP
    # The last drawn token is never an input.
    own = position * rows * -(-(new - 1) // step) * step
    copies = position * (prompts if sizes.shares_prefix else rows) * prompt
    filled = position * prompts * -(-prompt // CACHE_STEP) * CACHE_STEP
    chunk = min(prompt, PREFILL_TOKENS)
    logits = FLOAT * rows * shape.vocabulary
    given = min(new, max(LEAST_EXTENSION, EXTEND_TOKENS // rows)) if turns else 1  # tokens of one call
    token = shape.block_bytes(PREFILL, size, rows=rows, length=given, attended=prompt + new)
    # A cache grows into a new array, a block at a time; then only the logits of the last draw are in memory.
    growing = (own if sizes.shares_prefix else own + copies) + token + logits
    drawing = arrays * logits
    weights = {"compute copy": copy, "weights to sample with": sizes.decoding}
    return {
        "prompts": {
            **weights,
            "keys and values": shape.layers * filled,
            "working set": shape.block_bytes(PREFILL, size, rows=prompts, length=chunk, attended=prompt),
        },
        "rollout": {
            **weights,
            "keys and values": shape.layers * (copies + own),
            # Conversations: caches of earlier turns, rows that wait for a reply, rows that are extended.
            "parked rows": 3 * shape.layers * (own if sizes.shares_prefix else own + copies) if turns else 0,
            "working set": growing if growing >= drawing else 0,
            "logits": drawing if growing < drawing else 0,
        },
    }


def _micro_batches(config: Config, platform: Platform, prompt: int, sizes: ModelSizes) -> list[Shape]:
    """The micro-batches of a batch step, or of its first rows."""
    size, new, ranks = config.rollout.num_generations, config.rollout.max_new_tokens, sizes.ranks
    rows = -(-config.optim.batch_size // ranks) * size // config.optim.minibatches
    packed = max(PACKED_ROWS, config.system.micro_batch_tokens // (prompt + new) + size)
    rows = min(max(rows, 1), max(packed // size, 1) * size)
    packer = Packer(max_tokens=config.system.micro_batch_tokens, bucketed=True)
    shares = sizes.shares_prompts and shares_prompts(config, platform)
    planned = packer.pack([Row(i, i // size, prompt, new, new) for i in range(rows)], shares)
    return [run.shape for run in planned]


def shares_prompts(config: Config, platform: Platform) -> bool:
    """Whether the learner computes a group's prompt once, if the model can: on a GPU only if asked for,
    because attention would need a mask array there.

    Never with checkpointed blocks, which would run again without the first run's keys, or where routers'
    decisions are recorded over whole rows.
    """
    wish, loss = config.system.share_prompts, config.loss
    wanted = wish == "always" or (wish == "auto" and platform.backend == "cpu")
    return wanted and not (config.system.grad_checkpoint or loss.router_aux_coef or loss.router_replay)


def _gradient(sizes: ModelSizes, batch: Shape, accumulates: bool, checkpointed: bool) -> dict[str, float]:
    """The larger of two moments of the backward pass: all activations saved, or all gradients computed."""
    shape, size = sizes.shape, sizes.compute
    whole = {"rows": batch.rows, "length": batch.length, "attended": batch.length}
    passes = [whole]
    if batch.prompts:  # the prompts, and the completions, whose last token is never an input
        own = {"rows": batch.rows, "length": batch.width - 1, "attended": batch.length + batch.width - 1}
        passes = [{**whole, "rows": batch.prompts}, own]

    def most(*counts: Counts) -> float:
        return max(sum(shape.block_bytes(c, size, **each) for c in counts) for each in passes)

    # A checkpointed block is computed again first. MLX is then one block ahead: two are in memory.
    working = most(BACKWARD, shape.saved, shape.saved) if checkpointed else most(BACKWARD)
    kept = CHECKPOINTED if checkpointed else shape.saved
    saved = shape.layers * sum(shape.block_bytes(kept, size, **each) for each in passes)
    logits, share = shape.logit_bytes(batch.rows * batch.width, size)
    beside = (1 - share) * working  # the other arrays in flight belong to the last block
    if shape.scans:
        states = FLOAT * shape.states * sum(each["rows"] * each["length"] for each in passes)
        saved += 0 if checkpointed else SCAN_SAVED * states * shape.scans
        working += (SCAN_BACKWARD + (2 * SCAN_SAVED if checkpointed else 0)) * states
    at_logits = logits + beside >= working
    head = FLOAT * sizes.embedding
    base = {"compute copy": sizes.copy, "accumulated gradients": sizes.gradients if accumulates else 0}
    first = {
        **base,
        "activations": saved,
        "working set": beside if at_logits else working,
        "logits": logits if at_logits else 0,
        "gradient of the head": head,
    }
    # A tied embedding has two gradients, as input and as head, before they are added.
    last = {
        **base,
        "gradients": sizes.gradients,
        "working set": working,
        "gradient of the head": head if shape.tied else 0,
    }
    return max(first, last, key=lambda parts: sum(parts.values()))


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
