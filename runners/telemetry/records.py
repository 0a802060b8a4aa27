"""A run's header and summary for the display, and a record for each completion."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runners.config.loading import Config
from runners.data.prompts import Example
from runners.files.run_files import METRICS
from runners.models.loaded_model import LoadedModel
from runners.rewards.experience import Experience
from runners.telemetry.run_statistics import combine_logged
from runners.tokenization.text import TextDecoder

LOGP_STEPS, MOVED_STEPS = 16, 64  # of a nat, in tokens.jsonl


def run_header(
    config: Config, folder: Path, loaded: LoadedModel, train: int, held_out: int
) -> dict[str, Any]:
    """The header that is shown before the first step of a run in `folder`: name -> value.

    `train` and `held_out` are numbers of examples.
    """
    return {
        "run": config.run.name,
        "model": f"{config.model.path} ({loaded.num_parameters:,} parameters, "
        f"{loaded.num_trainable:,} trained, {config.model.tune})",
        "data": f"{config.data.source} ({train:,} to train on, {held_out:,} held out)",
        "each update": f"{config.optim.batch_size * config.optim.gradient_accumulation_steps} prompts × "
        f"{config.rollout.num_generations} completions, {config.loss.preset}",
        **_length_penalty(config),
        "writes to": str(folder),
    }


def _length_penalty(config: Config) -> dict[str, str]:
    """The length penalty on a completion's reward, if there is one, as a header row."""
    overlong, limit = config.loss.overlong, config.rollout.max_new_tokens
    if overlong is None or not overlong.buffer:
        return {}
    free = limit - overlong.buffer
    text = f"0 up to {free:,} tokens, then down to -{overlong.penalty:g} at {limit:,} (loss.overlong)"
    return {"length penalty": text}


def run_summary(
    config: Config,
    final: Path,
    *,
    first: float | None,
    last: float | None,
    held_out: int,
    updates: int,
    tokens: int,
) -> dict[str, Any]:
    """The summary that is shown at the end.

    `first` and `last` are exact match on `held_out` problems, None if it was not measured.
    """
    shown: dict[str, Any] = {}
    if last is not None:
        before = f"{first:.1%} → " if first is not None else ""
        shown["exact match"] = f"{before}{last:.1%} on {held_out} held-out problems"
    shown |= {"updates": updates, "tokens sampled": f"{tokens:,}", "model": str(final)}
    if (log := final.parent / METRICS).is_file():  # not if it was deleted under the run
        shown["log"] = str(log)
    if config.log.report:
        shown["report"] = str(final.parent / "report.html")
    return shown


def completion_records(
    experience: Experience, batch_step: int, update: int, pieces: PieceLengths | None = None, given: int = 0
) -> Iterator[dict[str, Any]]:
    """One record for each completion, for completions.jsonl; docs/rewards.md lists the keys.

    With `pieces`, a conversation's record says which parts of the text the model sampled; `given` is the
    nudge's number of characters. Records are made one by one, as they are read.
    """
    size = experience.rollout.num_generations
    rewards = experience.rewards_pg.reshape(-1).tolist()
    advantages = np.array(experience.advantages_pg).reshape(-1).tolist()
    lengths = experience.sampled_lengths.tolist()
    played = experience.played
    finished = np.array(experience.rollout.finished_b).tolist()
    penalties = None if experience.penalty_b is None else experience.penalty_b.tolist()
    metrics = {name: combine_logged(name, values) for name, values in experience.logged.items()}
    turns = [] if played is None or pieces is None else _turns(experience, pieces, given)
    for row, text in enumerate(experience.texts):
        example = experience.examples[row // size]
        values = zip(experience.reward_names, experience.values_kb[:, row].tolist(), strict=True)
        extra = {column: values[row] for column, values in experience.extras.items()}
        yield {
            "batch_step": batch_step,
            "update": update,
            "prompt": _asked(example),
            **({"images": [image.name for image in example.images]} if example.images else {}),
            "completion": text,
            "answer": example.answer,
            "reward": rewards[row],
            "rewards": {name: None if math.isnan(value) else value for name, value in values},
            **({"length_penalty": penalties[row]} if penalties else {}),
            "advantage": advantages[row],
            "tokens": lengths[row],
            "finished": finished[row],
            **({"metrics": metrics} if metrics else {}),
            **({"extra": extra} if extra else {}),
            **({"messages": list(played.messages[row])} if played else {}),
            **({"turns": turns[row]} if turns else {}),
        }


def _asked(example: Example) -> str:
    """The user's last message; without one, the last message."""
    asked = [message["content"] for message in example.messages if message["role"] == "user"]
    return asked[-1] if asked else example.messages[-1]["content"]


def _turns(experience: Experience, pieces: PieceLengths, given: int) -> list[list[dict[str, Any]]]:
    """The sampled and given stretches of each completion: their tokens, and characters of the text.

    The nudge (`given` characters, no token) belongs to the first stretch.
    """
    rollout, rows = experience.rollout, []
    for tokens, sampled, text in zip(rollout.completions(), rollout.sampled(), experience.texts, strict=True):
        characters = pieces.of(tokens, text[given:])
        found: list[dict[str, Any]] = []
        for count, mine in zip(characters, sampled, strict=True):
            if not found or found[-1]["sampled"] != bool(mine):
                found.append({"sampled": bool(mine), "tokens": 0, "characters": 0})
            found[-1]["tokens"] += 1
            found[-1]["characters"] += count
        if found:
            found[0]["characters"] += len(text) - sum(characters)
        rows.append(found)
    return rows


def evaluation_records(
    examples: Sequence[Example], texts: Sequence[str], correct: Sequence[bool], update: int
) -> Iterator[dict[str, Any]]:
    """One record for each held-out problem, for evaluations.jsonl; docs/report.md lists the keys."""
    for index, (example, text, right) in enumerate(zip(examples, texts, correct, strict=True)):
        yield {
            "update": update,
            "problem": index,
            "prompt": _asked(example),
            **({"images": [image.name for image in example.images]} if example.images else {}),
            "completion": text,
            "answer": example.answer,
            "correct": bool(right),
        }


def token_record(
    experience: Experience,
    mask_bt: np.ndarray,
    batch_step: int,
    update: int,
    pieces: PieceLengths,
    given: int,
) -> dict[str, Any]:
    """A batch step's tokens, for tokens.jsonl; docs/report.md has the format.

    `mask_bt` is True on tokens that count in the loss; `given` is the number of characters of the nudge.
    """
    lengths = np.array(experience.rollout.lengths_b)
    logp_bt = np.array(experience.rollout.logp_bt)
    steps = np.clip(np.rint(-logp_bt * LOGP_STEPS), 0, 255).astype(np.uint8)
    rows = zip(experience.rollout.completions(), experience.texts, strict=True)
    return {
        "batch_step": batch_step,
        "update": update,
        "kind": "sampled",
        "given": given,
        "characters": [_bytes(_laced(pieces.of(tokens, text[given:]))) for tokens, text in rows],
        "logp": [_bytes(row[:length]) for row, length in zip(steps, lengths, strict=True)],
        "masked": [_bytes(~row[:length]) for row, length in zip(mask_bt, lengths, strict=True)]
        if not all(row[:length].all() for row, length in zip(mask_bt, lengths, strict=True))
        else None,
    }


def moved_record(experience: Experience, logp_bt: np.ndarray, batch_step: int, update: int) -> dict[str, Any]:
    """How far an update has moved the log-prob of each token of a batch step, for tokens.jsonl."""
    lengths = np.array(experience.rollout.lengths_b)
    moved_bt = logp_bt - np.array(experience.rollout.logp_bt)
    steps = np.clip(np.rint(moved_bt * MOVED_STEPS), -128, 127).astype(np.int8)
    return {
        "batch_step": batch_step,
        "update": update,
        "kind": "moved",
        "moved": [_bytes(row[:length]) for row, length in zip(steps, lengths, strict=True)],
    }


class PieceLengths:
    """How many characters each token of a completion gave.

    Most tokens always give the same characters, so their numbers are cached. If the cached numbers do not add
    up to the text, because a character has several tokens, the completion is decoded token by token.
    """

    def __init__(self, decoder: TextDecoder) -> None:
        """Nothing is known yet."""
        self._decoder = decoder
        self._following: dict[int, int] = {}
        self._first: dict[int, int] = {}

    def of(self, tokens: Sequence[int], text: str) -> list[int]:
        """Characters (Unicode code points) of each token; their sum is that of the text, or nearly so."""
        kept = self._decoder.without_end(tokens)
        return [*self._of(kept, text), *[0] * (len(tokens) - len(kept))]

    def _of(self, tokens: Sequence[int], text: str) -> list[int]:
        if not tokens:
            return []
        decode = self._decoder.part
        first = _cached(self._first, tokens[0], lambda token: len(decode([token])))
        inside = [
            _cached(self._following, token, lambda token: len(decode([token, token])) - len(decode([token])))
            for token in tokens[1:]
        ]
        found = [first, *inside]
        if sum(found) == len(text) and "\ufffd" not in text:
            return found
        stream = self._decoder.stream()
        exact = [len(stream.add(token)) for token in tokens]
        return [*exact[:-1], exact[-1] + len(stream.finish())]


def _cached(known: dict[int, int], token: int, make: Callable[[int], int]) -> int:
    if token not in known:
        known[token] = make(token)
    return known[token]


def _laced(numbers: Sequence[int]) -> np.ndarray:
    """Numbers as bytes: the byte 255 means 255 plus the next byte."""
    parts: list[int] = []
    for number in numbers:
        whole, rest = divmod(max(number, 0), 255)
        parts += [255] * whole + [rest]
    return np.array(parts, np.uint8)


def _bytes(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")
