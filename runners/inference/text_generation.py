"""Generates completions or conversations with tools in batches, and streams chats. Also measures
their speed.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.checks import TooLong
from grpo_fn.prng import GENERATION, fold_in
from grpo_fn.trees import on_host
from runners.data.messages import Message
from runners.data.prompts import Example, repeated
from runners.data.rendering import NO_KWARGS
from runners.engines.engine import DEFAULT_ROWS, Engine, ShouldStop, Ticket, Token, never
from runners.engines.rollouts import Cancelled, generate, requests_of
from runners.environments.environments import Player
from runners.errors import gigabytes, user_errors
from runners.images.image_files import ImageFile
from runners.images.tower import VisionPart
from runners.inference.inference_model import InferenceModel
from runners.rewards.builtin import answer_text
from runners.rewards.experience import FinishedEpisode
from runners.tokenization.text import TextDecoder, TextStream

STOP = "stop"
LENGTH = "length"
INTERRUPTED = "interrupted"


@attrs.frozen(eq=False)
class Batch:
    """Finished completions. Each example's G completions are adjacent. Conversations in the next
    batch reuse this batch's environments.
    """

    examples: Sequence[Example]
    rollout: g.Rollout
    # each row's text, including its first words; for a conversation, the last turn
    texts: list[str]
    lengths: list[int]  # number of sampled tokens in each row
    # why each row ended: STOP, by an end token or a stop string; LENGTH; INTERRUPTED
    finish: list[str]
    seconds: float
    played: Sequence[FinishedEpisode] | None  # the conversations; None: there are no environments


def sample(
    engine: Engine,
    examples: Sequence[Example],
    sampling: g.Sampling,
    *,
    key: mx.array,
    numbers: Sequence[int],
    environments: Player | None,
    vision: VisionPart | None,
    should_stop: ShouldStop,
) -> tuple[g.Rollout, list[FinishedEpisode] | None]:
    """Samples completions of the examples, or conversations if there are `environments`; see
    `sample_batches`.
    """
    if environments is not None:
        return environments.play(
            engine, examples, sampling, key=key, numbers=numbers, should_stop=should_stop
        )
    requests = requests_of(examples, sampling, key, numbers, vision)
    return generate(engine, requests, sampling, should_stop=should_stop), None


def texts_of(
    examples: Sequence[Example],
    completions: Sequence[Sequence[int]],
    decoder: TextDecoder,
    nudge: str,
) -> list[str]:
    """Returns the completions' texts, which start with the prompts' openings and the nudge."""
    size = len(completions) // len(examples)
    return [
        example.opening + nudge + decoder.decode(tokens)
        for example, tokens in zip(repeated(examples, size), completions, strict=True)
    ]


def sample_batches(
    engine: Engine,
    examples: Sequence[Example],
    sampling: g.Sampling,
    *,
    key: mx.array,
    decoder: TextDecoder,
    nudge: str = "",
    rows: int = 0,
    environments: Player | None = None,
    vision: VisionPart | None = None,
    should_stop: ShouldStop = never,
    numbered: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Yields completions of all examples, in order. Completion g of example n uses the random
    stream (key, n, g).

    Completions do not depend on `rows`, the number of completions sampled at a time; 0 means 256.
    `environments` reply to turns; if there are none, each completion is one turn. `should_stop`
    ends the current batch, which is yielded unfinished, or dropped if it contains conversations.
    `numbered` contains the examples' n; None means 0, 1, 2, …
    """
    together = max((rows or DEFAULT_ROWS) // sampling.num_generations, 1)
    cut = False
    for start in range(0, len(examples), together):
        began = time.perf_counter()
        part = examples[start : start + together]
        numbers = (numbered or range(len(examples)))[start : start + len(part)]
        played = None
        try:
            rollout, played = sample(
                engine,
                part,
                sampling,
                key=key,
                numbers=numbers,
                environments=environments,
                vision=vision,
                should_stop=should_stop,
            )
        except Cancelled as cancelled:
            if environments is not None:
                return
            rollout = cancelled.rollout
            cut = True
        if played is None:
            sampled = rollout.completions()
            texts = texts_of(part, sampled, decoder, nudge)
        else:
            sampled = [each.sampled for each in played]
            texts = [answer_text(each.messages) for each in played]
        yield Batch(
            examples=part,
            rollout=rollout,
            texts=texts,
            lengths=list(map(len, sampled)),
            finish=_ends(rollout, sampling.max_new_tokens, cut=cut),
            seconds=time.perf_counter() - began,
            played=played,
        )
        if cut:
            return


def _ends(rollout: g.Rollout, most: int, *, cut: bool) -> list[str]:
    """Returns why each row in a rollout of at most `most` tokens ended. `cut` is True if the
    rollout was interrupted.
    """

    lengths = on_host(rollout.lengths_b)
    ends = [INTERRUPTED if cut and length < most else LENGTH for length in lengths]
    finished = on_host(rollout.finished_b)
    return [STOP if done else end for done, end in zip(finished, ends, strict=True)]


@attrs.define
class Speed:
    """Tokens and seconds for one or more calls, and the peak memory since the first call."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0  # 0 if prompts and completions are not timed separately
    tokens: int = 0
    seconds: float = 0.0

    def __attrs_post_init__(self) -> None:
        mx.reset_peak_memory()

    def add(self, batch: Batch) -> None:
        """Adds a batch's tokens and seconds."""
        self.prompt_tokens += sum(map(len, batch.rollout.prompts))
        self.tokens += sum(batch.lengths)
        self.seconds += batch.seconds

    def line(self) -> str:
        """Formats the tokens, the tokens per second and the peak memory as a readable line."""
        prompts = f"prompt {self.prompt_tokens:,} tokens"
        if self.prompt_seconds:
            prompts += f" ({self.prompt_tokens / self.prompt_seconds:,.1f} tok/s)"
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (
            f"{prompts}, completion {self.tokens:,} tokens ({rate:,.1f} tok/s), "
            f"peak memory {gigabytes(mx.get_peak_memory())}"
        )


def generation_key(seed: int) -> mx.array:
    """Returns the random key for `grpo generate` and `grpo chat`."""
    return fold_in(mx.random.key(seed), GENERATION)


@attrs.define(eq=False)
class Conversation:
    """The messages of a conversation with a user.

    In each turn, all messages are rendered again with the chat template; the engine keeps keys and
    values between turns. The first reply equals the first completion of `sample_batches` for the
    same prompt, up to the rounding of batched products.
    """

    model: InferenceModel
    sampling: g.Sampling
    key: mx.array = attrs.field(kw_only=True)
    system: str = attrs.field(default="", kw_only=True)  # the system message; empty: none
    nudge: str = attrs.field(default="", kw_only=True)  # first words of each reply
    # arguments for the chat template
    template_kwargs: Mapping[str, Any] = attrs.field(default=NO_KWARGS, kw_only=True)
    # texts are continued without a chat template, as with data.prompt_form = "raw"
    raw: bool = attrs.field(default=False, kw_only=True)
    messages: list[Message] = attrs.field(init=False)
    turns: int = attrs.field(init=False)
    _last: Ticket | None = attrs.field(default=None, init=False)  # ticket for the previous turn

    def __attrs_post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Removes all turns and keeps the system message."""
        self.turns = 0
        self.messages = [{"role": "system", "content": self.system}] if self.system.strip() else []

    def reply(
        self,
        text: str,
        *,
        images: Sequence[ImageFile] = (),
        should_stop: ShouldStop = never,
        speed: Speed | None = None,
    ) -> Iterator[str]:
        """Yields the assistant's answer to a message, piece by piece.

        If `should_stop` ends the answer, the part so far stays in the conversation. If an exception
        ends the answer, the conversation does not change.
        """
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        prompt = self.model.example(
            messages,
            images=images,
            most=self.sampling.max_new_tokens,
            nudge=self.nudge,
            template_kwargs=self.template_kwargs,
            raw=self.raw,
        )
        one = attrs.evolve(self.sampling, num_generations=1)
        (first,) = requests_of([prompt], one, self.key, [self.turns], self.model.vision)
        request = attrs.evolve(first, keep=not images, continues=self._last)
        tokens: list[Token] = []
        times = [time.perf_counter()]

        def streamed() -> Iterator[str]:
            stream = TextStream(self.model.decoder)
            yield prompt.opening + self.nudge
            with user_errors(str(self.model.path), TooLong):
                self._last = self.model.engine.submit(request, one)
                for token in self.model.engine.tokens(self._last, should_stop=should_stop):
                    tokens.append(token)
                    times.append(time.perf_counter())
                    yield stream.add(token.id)
            yield stream.finish()

        pieces: list[str] = []
        for piece in filter(None, streamed()):
            pieces.append(piece)
            yield piece
        if speed is not None and tokens:
            speed.prompt_tokens += tokens[0].prompt_tokens
            speed.prompt_seconds += times[1] - times[0]
            speed.tokens += len(tokens)
            speed.seconds += times[-1] - times[1]
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        self.turns += 1
