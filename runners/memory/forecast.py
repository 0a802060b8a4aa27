"""Predicts the memory of a config's run phase by phase, and compares it with the machine's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs

from grpo_fn.learner import Packer, Row
from grpo_fn.policy import ROOM
from runners.config.loading import Config
from runners.config.sections import SHIPPED
from runners.data.datasets import load_rows
from runners.data.prompts import build_examples
from runners.data.row_images import processor_of
from runners.files.json_files import read_json
from runners.inference.text_generation import DEFAULT_ROWS
from runners.machine.startup import Platform
from runners.memory.footprint import MemoryPhase, SampledRows, floor, phases
from runners.memory.micro_batch import resolve_micro_batch, with_tokens
from runners.memory.model_sizes import ModelSizes, model_sizes
from runners.memory.passes import MicroBatch, sampling_arrays
from runners.models.folders import resolve_model
from runners.models.model_reader import load_tokenizer

ROOM_TO_LEARN = 0.85  # share of the memory for a micro-batch chosen here; the rest covers forecast errors
NO_LESS = 1.05  # times the memory of a single row: a smaller micro-batch would be slower and save nothing
PACKED_ROWS = 256  # rows of a batch step that are packed: more rows do not change the micro-batch


@attrs.frozen(kw_only=True)
class Forecast:
    """The predicted memory of a run."""

    config: Config
    sizes: ModelSizes
    prompt: int  # tokens of the longest prompt
    prompt_source: str  # the source of that number
    total: int  # bytes that the run may use
    phases: tuple[MemoryPhase, ...]
    ranks: int = 1  # each of them needs this memory

    @property
    def peak(self) -> MemoryPhase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def gradient(self) -> int:
        """Bytes of the learner's gradient phase, which depends on the micro-batch."""
        return max(phase.total for phase in self.phases if phase.name in ("gradient", "log-probs"))

    @property
    def floor(self) -> int:
        """The least bytes that any batch setting needs."""
        return floor(self.sizes.weights)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory."""
        return self.peak.total <= self.total


def forecast(
    config: Config,
    platform: Platform,
    total: int,
    *,
    prompt: int | None = None,
    sizes: ModelSizes | None = None,
    ranks: int = 1,
) -> Forecast:
    """The phases of the run that a checked config describes.

    `prompt` is the longest prompt's length; by default it is `data.max_prompt_length`. `total` is the
    machine's memory, which `system.memory_limit_gb` may reduce. With several `ranks` it is the memory of one
    of them. If the config does not set the learner's micro-batch, it is as large as is useful and fits.
    Raises UserError as `model_sizes`.
    """
    sizes = sizes or model_sizes(config, platform)
    weights = attrs.evolve(sizes.weights, ranks=ranks, sharded=config.optim.shard and ranks > 1)
    sizes = attrs.evolve(sizes, weights=weights)
    limit = config.system.memory_limit_gb * 1e9
    total = int(min(total, limit)) if limit else total
    source = "data.max_prompt_length" if prompt is None else "the longest prompt of the data"
    prompt = config.data.max_prompt_length if prompt is None else prompt
    rest = platform, total, prompt, sizes, ranks, source
    given = config.system.micro_batch_tokens
    found = _forecast(resolve_micro_batch(config, sizes, platform, prompt), *rest)
    if given or platform.backend == "cpu":
        return found
    return _roomy(found, lambda tokens: _forecast(with_tokens(config, tokens), *rest))


def _roomy(found: Forecast, of: Callable[[int], Forecast]) -> Forecast:
    """Halves the micro-batch of `found` until the forecast fits, or until a smaller one would save nothing.

    Weights, moments and two sets of gradients do not depend on the micro-batch.
    """
    tokens = found.config.system.micro_batch_tokens
    least = of(min(found.prompt + found.config.rollout.max_new_tokens, tokens))
    enough = max(ROOM_TO_LEARN * found.total, NO_LESS * least.gradient)
    while found.gradient > enough:
        tokens //= 2
        if tokens <= least.config.system.micro_batch_tokens:
            return least
        found = of(tokens)
    return found


def _forecast(
    config: Config,
    platform: Platform,
    total: int,
    prompt: int,
    sizes: ModelSizes,
    ranks: int,
    source: str,
) -> Forecast:
    """The forecast of a config that sets the micro-batch."""
    spec, optim = config.loss_spec(), config.optim
    system = config.system
    shares = (
        sizes.shares_prompts
        and not system.grad_checkpoint
        and not config.loss.router_aux_coef
        and not config.loss.router_replay
        and system.share_prompts != "never"
        and (system.share_prompts == "always" or platform.backend == "cpu")
    )
    own = attrs.evolve(optim, batch_size=-(-optim.batch_size // ranks))
    each = attrs.evolve(config, optim=own)  # one rank's part of a batch step
    pieces = _pieces(each, prompt, shares)
    reused = optim.num_iterations * optim.minibatches > 1
    lags = config.loss.sync_every > optim.gradient_accumulation_steps
    return Forecast(
        config=config,
        sizes=sizes,
        prompt=prompt,
        prompt_source=source,
        ranks=ranks,
        total=total,
        phases=tuple(
            phases(
                sizes.shape,
                sizes.weights,
                rollout=_decoded(_rollout(each, prompt), sizes),
                evaluation=_decoded(_evaluation(config, prompt), sizes),
                micro_batches=list(dict.fromkeys(pieces)),
                accumulates=len(pieces) > 1 or optim.gradient_accumulation_steps > 1,
                logprobs=reused or lags or spec.beta > 0,
                grad_checkpoint=system.grad_checkpoint,
                lags=lags,
            )
        ),
    )


def largest(fits: Callable[[int], bool], *, most: int) -> int:
    """The largest n in 1..most with fits(n), or 0; fits must be true up to some n and false after it."""
    if most < 1 or not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _rollout(config: Config, prompt: int) -> SampledRows:
    rollout = config.rollout
    together = config.optim.batch_size
    if rollout.max_batch:
        together = min(together, max(rollout.max_batch // rollout.num_generations, 1))
    return SampledRows(
        prompts=together,
        rows=together * rollout.num_generations,
        prompt=prompt,
        new=rollout.max_new_tokens,
        arrays=sampling_arrays(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            with_entropy=config.loss.top_entropy_quantile < 1,
        ),
        turns=config.env.answers,
    )


def _decoded(sampling: SampledRows, sizes: ModelSizes) -> SampledRows:
    """`sampling` with the caches that `generate` chooses."""
    if not sizes.shares_prefix:
        return sampling
    return attrs.evolve(sampling, prompt_copies=sampling.prompts, step=ROOM)


def _evaluation(config: Config, prompt: int) -> SampledRows:
    rows = config.rollout.max_batch or DEFAULT_ROWS
    rows = min(rows, config.eval.samples) if config.eval.samples else rows
    return SampledRows(
        prompts=rows,
        rows=rows,
        prompt=prompt,
        new=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        arrays=sampling_arrays(temperature=0.0),
        own_weights=False,
        turns=config.env.answers,
    )


def _pieces(config: Config, prompt: int, shares: bool) -> list[MicroBatch]:
    """The micro-batches of a batch step, or of its first rows, with completions of full length."""
    size, new = config.rollout.num_generations, config.rollout.max_new_tokens
    rows = min(
        max(config.optim.batch_size * size // config.optim.minibatches, 1), max(PACKED_ROWS // size, 1) * size
    )
    packer = Packer(max_tokens=config.system.micro_batch_tokens, bucketed=True)
    runs = packer.pack([Row(i, i // size, prompt, new, new) for i in range(rows)], shares)
    return [
        MicroBatch.of(
            (run.shape.prompts or run.shape.rows, run.shape.length),
            (run.shape.rows, run.shape.width),
            targets=run.shape.positions,
            shares_prompts=run.shape.prompts > 0,
        )
        for run in runs
    ]


def longest_prompt(config: Config) -> int | None:
    """Tokens of the longest training prompt if data and tokenizer are on this machine; else None.

    Raises UserError for data or a tokenizer that cannot be used.
    """
    at_hand = (
        path in SHIPPED or Path(path).expanduser().exists()
        for path in (config.model.path, config.data.source)
    )
    if not all(at_hand):
        return None
    folder = resolve_model(config.model.path, custom_loader=bool(config.model.loader))
    stated = read_json(folder / "config.json")
    tokenizer = load_tokenizer(folder, stated, config.model.trust_remote_code)
    train, _ = load_rows(config.data, config.folders)
    processor = processor_of(config.data, folder, stated)
    examples, _ = build_examples(train, config.data, tokenizer, processor=processor)
    return max(len(example.tokens) for example in examples)
