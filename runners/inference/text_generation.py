"""Generating text: one completion as a stream, or many prompts in batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.checks import check_positions, check_token_ids
from grpo_fn.prng import GENERATION, completion_keys, fold_in
from grpo_fn.rollout.sampling import FindStop, compiled_draw, draw_bits, mark_seen, penalize, seen_tokens
from grpo_fn.trees import on_host
from runners.errors import UserError, gigabytes
from runners.images.tower import HasImages
from runners.inference.inference_model import InferenceModel
from runners.machine.launch_modes import launch_keywords
from runners.tokenization.text import TextDecoder

DEFAULT_ROWS = 256  # completions decoded together by default
STOP, LENGTH, INTERRUPTED = "stop", "length", "interrupted"

Tokens = Sequence[int]


@attrs.frozen(kw_only=True)
class Sampling:
    """How completions are drawn; the first five as in `g.Sampling`."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    purpose: int = GENERATION  # of the random draws, see `grpo_fn.prng`
    max_tokens: int = 512

    @property
    def key(self) -> mx.array:
        """The PRNG key of all completions."""
        return fold_in(mx.random.key(self.seed), self.purpose)

    def core(
        self, eos_ids: Iterable[int] = (), find_stop: FindStop | None = None, num_generations: int = 1
    ) -> g.Sampling:
        """For `g.generate`."""
        return g.Sampling(
            num_generations=num_generations,
            max_new_tokens=self.max_tokens,
            eos_ids=eos_ids,
            find_stop=find_stop,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


@attrs.frozen
class Completion:
    """One completion of one prompt."""

    text: str  # without the token that ended it
    tokens: tuple[int, ...]  # including the token that ended it
    finish: str  # "stop": an end token or stop string; "length"; "interrupted"


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

    def line(self) -> str:
        """One line for people: tokens, tokens a second, peak memory."""
        prompts = f"prompt {self.prompt_tokens:,} tokens"
        if self.prompt_seconds:
            prompts += f" ({self.prompt_tokens / self.prompt_seconds:,.1f} tok/s)"
        rate = self.tokens / self.seconds if self.seconds else 0.0
        peak = gigabytes(mx.get_peak_memory())
        return f"{prompts}, completion {self.tokens:,} tokens ({rate:,.1f} tok/s), peak memory {peak}"


def stream(
    model: InferenceModel,
    prompt: Tokens,
    sampling: Sampling,
    *,
    decoder: TextDecoder,
    find_stop: FindStop | None = None,
    cache: list[Any] | None = None,
    cached: int = 0,
    number: int = 0,
    drawn: int = 0,
    stops: Collection[int] = (),
    stopped: Callable[[], bool] = lambda: False,
    speed: Speed | None = None,
) -> Iterator[str | Completion]:
    """One completion, piece by piece, in mlx-lm's loop; the last item is the whole Completion.

    It equals the first completion that `generate_batches` gives for prompt `number` (to the rounding of
    batched products), because the draws use the same keys.

    Args:
        prompt: token ids.
        cache: mlx-lm's prompt cache, which has the first `cached` tokens and is extended; None: a new one.
        number: of the prompt, for its random key.
        drawn: tokens of the prompt that were drawn with this key before, in earlier turns.
        stops: tokens that end it besides the model's own.
        stopped: asked after each token whether to end here.
        speed: gets the tokens and seconds added.
    """
    from mlx_lm import stream_generate

    _check_prompts(model, [prompt], sampling.max_tokens)
    responses = stream_generate(
        model.module,
        model.tokenizer,
        list(prompt[cached:]),
        max_tokens=sampling.max_tokens,
        sampler=draws(sampling, number, drawn),
        logits_processors=[] if sampling.repetition_penalty == 1 else [penalty(sampling, prompt)],
        prompt_cache=cache,
    )
    ends = {*model.eos_ids, *stops}
    yield from follow(responses, ends, decoder=decoder, find_stop=find_stop, stopped=stopped, speed=speed)


def follow(
    responses: Generator[Any, None, None],
    eos_ids: Collection[int],
    *,
    decoder: TextDecoder,
    find_stop: FindStop | None,
    stopped: Callable[[], bool],
    speed: Speed | None,
) -> Iterator[str | Completion]:
    """A completion's pieces, and then all of it, from the responses of mlx-lm's loop, or of mlx-vlm's.

    Each response has a token, and for the call so far `prompt_tokens`, `prompt_tps` and `generation_tps`.
    """
    pieces, tokens, text, finish = decoder.stream(), [], "", LENGTH
    response = None
    for response in responses:
        tokens.append(response.token)
        piece = pieces.add(response.token)
        if piece:
            text += piece
            yield piece
        if response.token in eos_ids or (
            find_stop is not None and find_stop(tokens, len(tokens) - 1) is not None
        ):
            finish = STOP
            break
        if stopped():
            finish = INTERRUPTED
            break
    responses.close()
    rest = pieces.finish()
    if rest:
        yield rest
    if speed is not None and response is not None:
        speed.prompt_tokens += response.prompt_tokens
        speed.prompt_seconds += response.prompt_tokens / response.prompt_tps
        speed.tokens += len(tokens)
        speed.seconds += len(tokens) / response.generation_tps
    yield Completion(text + rest, tuple(tokens), finish)


def _check_prompts(model: InferenceModel, prompts: Sequence[Tokens], most: int) -> None:
    """Raises UserError for tokens without an embedding in the model, as a tokenizer may have added some, and
    for a prompt that is too long for the model's learned positions if `most` tokens follow."""
    longest = max(map(len, prompts), default=0)
    both = f"a prompt of {longest} tokens and a length limit of {most}"
    try:
        check_token_ids(prompts, model.policy.vocabulary)
        check_positions(both, longest + most - 1, model.policy.positions)
    except ValueError as error:
        raise UserError(f"{model.path}: {error}") from error


def draws(sampling: Sampling, number: int = 0, drawn: int = 0) -> Callable[[mx.array], mx.array]:
    """A sampler for mlx-lm: the n-th call draws token `drawn` + n of completion 0 of a prompt."""
    key_12 = completion_keys(sampling.key, mx.array([number]), mx.array([0]))
    draw = compiled_draw(sampling.core())
    words = _words(key_12, drawn)
    return lambda logits_1v: draw(logits_1v, next(words))["tokens"]


def _words(key_12: mx.array, drawn: int) -> Iterator[mx.array]:
    """The random bits [1,W] of each draw after the first `drawn`."""
    for first in itertools.count(drawn, step=256):
        yield from draw_bits(key_12, first, 256)


def penalty(sampling: Sampling, prompt: Tokens | None) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor for mlx-lm; it is called with the tokens so far, of which only the last one is new.

    If `prompt` is None, the tokens of the first call are the prompt.
    """
    seen_1v: mx.array | None = None

    def process(tokens: mx.array, logits_1v: mx.array) -> mx.array:
        nonlocal seen_1v
        if seen_1v is None:
            first = on_host(tokens) if prompt is None else prompt
            seen_1v = seen_tokens([first], logits_1v.shape[-1])
        seen_1v = mark_seen(seen_1v, tokens[-1:])
        return penalize(logits_1v, seen_1v, sampling.repetition_penalty)

    return process


def generate_batches(
    model: InferenceModel,
    prompts: Sequence[Tokens],
    sampling: Sampling,
    *,
    decoder: TextDecoder,
    num_generations: int = 1,
    find_stop: FindStop | None = None,
    max_batch: int = 0,
    stopped: Callable[[], bool] = lambda: False,
    speed: Speed | None = None,
    shown: Sequence[HasImages] | None = None,
) -> Iterator[list[Completion]]:
    """Each prompt's completions in the order of the prompts, when their batch is done.

    A completion depends on the seed, its prompt's number, its own number, and the model, but not on
    `max_batch`, the number of completions decoded together (0: 256). When `stopped()` is true, the current
    completions end at once, and no others follow. `shown` are the prompts with their images, if the model has
    a vision part.
    """

    def end(tokens: Tokens, start: int) -> int | None:
        if stopped():
            return len(tokens)
        return None if find_stop is None else find_stop(tokens, start)

    def is_whole(tokens: Tokens) -> bool:
        """Whether the tokens end with an end token or a stop string."""
        if tokens[-1] in model.eos_ids:
            return True
        return find_stop is not None and find_stop(tokens, len(tokens) - 1) is not None

    _check_prompts(model, prompts, sampling.max_tokens)
    together = max((max_batch or DEFAULT_ROWS) // num_generations, 1)
    # On a CPU, checking which rows have ended costs nothing, and their steps are saved.
    check_every = 8 if model.launch == "async" else 1
    decoding = g.Decoding(check_every=check_every, **launch_keywords(model.launch))
    for start in range(0, len(prompts), together):
        part = prompts[start : start + together]
        began = time.perf_counter()
        rollout = g.generate(
            model.policy,
            {},
            part,
            sampling.core(model.eos_ids, end, num_generations),
            key=sampling.key,
            prompt_numbers=range(start, start + len(part)),
            decoding=decoding,
            images=model.vision.see(shown[start : start + together]) if shown and model.vision else None,
        )
        found = rollout.completions()
        if speed is not None:
            speed.prompt_tokens += sum(map(len, part))
            speed.tokens += sum(map(len, found))
            speed.seconds += time.perf_counter() - began
        done = []
        for tokens, finished in zip(found, on_host(rollout.finished_b), strict=True):
            # After a request to stop, every row counts as finished; only those at their real end are
            # complete.
            finish = STOP if is_whole(tokens) else INTERRUPTED if finished else LENGTH
            done.append(Completion(decoder.decode(tokens), tuple(tokens), finish))
        for row in range(0, len(done), num_generations):
            yield done[row : row + num_generations]
        if stopped():
            return
