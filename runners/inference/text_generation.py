"""One completion as a stream of text, and how fast completions are."""

from __future__ import annotations

import time
from collections.abc import Iterator

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.prng import GENERATION, fold_in
from runners.engines.engine import Engine, Requests, ShouldStop, never
from runners.errors import gigabytes
from runners.inference.batches import INTERRUPTED, LENGTH, STOP, Batch
from runners.tokenization.text import TextDecoder


@attrs.frozen
class Completion:
    """One completion of one prompt."""

    text: str  # without the token that ended it
    tokens: tuple[int, ...]  # including the token that ended it
    finish: str  # as in `Batch`


@attrs.define
class Speed:
    """Tokens and seconds of one or several calls, and the peak of memory since `start`."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0  # 0 if prompts and completions are not timed separately
    tokens: int = 0
    seconds: float = 0.0

    def start(self) -> None:
        """Starts to watch the memory."""
        mx.reset_peak_memory()

    def add(self, batch: Batch) -> None:
        """A batch's tokens and seconds."""
        self.prompt_tokens += sum(map(len, batch.rollout.prompts))
        self.tokens += sum(batch.lengths)
        self.seconds += batch.seconds

    def line(self) -> str:
        """One line for people: tokens, tokens a second, peak memory."""
        prompts = f"prompt {self.prompt_tokens:,} tokens"
        if self.prompt_seconds:
            prompts += f" ({self.prompt_tokens / self.prompt_seconds:,.1f} tok/s)"
        rate = self.tokens / self.seconds if self.seconds else 0.0
        peak = gigabytes(mx.get_peak_memory())
        return f"{prompts}, completion {self.tokens:,} tokens ({rate:,.1f} tok/s), peak memory {peak}"


def generation_key(seed: int) -> mx.array:
    """The key of `grpo generate` and `grpo chat`."""
    return fold_in(mx.random.key(seed), GENERATION)


def stream(
    engine: Engine,
    request: Requests,
    sampling: g.Sampling,
    *,
    key: mx.array,
    decoder: TextDecoder,
    should_stop: ShouldStop = never,
    speed: Speed | None = None,
) -> Iterator[str | Completion]:
    """One completion, piece by piece; the last item is the whole Completion.

    It equals the first completion that `sample_batches` gives for the same prompt and number, to the rounding
    of batched products. `speed` gets the tokens and seconds added.
    """
    pieces, tokens, text = decoder.stream(), list[int](), ""
    began, first, prompt_tokens = time.perf_counter(), 0.0, 0
    for token in engine.stream(request, sampling, key=key, should_stop=should_stop):
        first = first or time.perf_counter()
        tokens.append(token.id)
        prompt_tokens = token.prompt_tokens
        if piece := pieces.add(token.id):
            text += piece
            yield piece
    if rest := pieces.finish():
        yield rest
    ended = bool(tokens) and sampling.end_of(tokens, len(tokens) - 1) is not None
    full = len(tokens) == sampling.max_new_tokens
    if speed is not None and tokens:
        speed.prompt_tokens += prompt_tokens
        speed.prompt_seconds += first - began
        speed.tokens += len(tokens)
        speed.seconds += time.perf_counter() - first
    yield Completion(text + rest, tuple(tokens), STOP if ended else LENGTH if full else INTERRUPTED)
