"""Plays an episode before a run, with a script in place of the model: a call, then the gold answer.

It shows what the model will see and learn from, and faults of the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from runners.answers.values import parse_number
from runners.data.prompts import Example
from runners.environments.calculator import MARKS
from runners.environments.environments import Environments
from runners.environments.tool_calls import END, START, CallReader
from runners.rewards.functions import Reward
from runners.rewards.scoring import Scorer
from runners.tokenization.text import encode

PROMPT, GIVEN, SAMPLED = "prompt", "given", "sampled"


@attrs.frozen
class Span:
    """Tokens of one origin in a row."""

    kind: str  # "prompt", "given" (by a tool) or "sampled" (by the model): only these are learned from
    tokens: tuple[int, ...]
    text: str


@attrs.frozen(eq=False)
class ScriptedEpisode:
    """The result of the episode."""

    spans: tuple[Span, ...]
    rewards: Mapping[str, float]  # NaN: none
    problems: tuple[str, ...]  # a line each


def play_script(
    environments: Environments, example: Example, answer: str, rewards: Sequence[Reward]
) -> ScriptedEpisode:
    """One episode: `answer` is the model's last turn. A call of the first tool comes before it.

    The call's arguments are made from the gold answer, as far as their types allow.
    """
    tokenizer, problems = environments.tokenizer, []
    begun = environments.begin([example])
    (episode,) = begun.session.episodes
    spans = [_span(environments, PROMPT, begun.prompts[0])]
    if episode.fault:
        return ScriptedEpisode(tuple(spans), {}, (f"the environment: {episode.fault}",))
    end = next(iter(begun.stops), None)
    if environments.is_calculator:
        turns = [[*_ids(tokenizer, MARKS[0]), *encode(tokenizer, example.answer, add_special_tokens=False)]]
    else:
        end = _end_of_turn(environments)
        text = _call_text(environments, example.answer, problems)
        turns = [encode(tokenizer, text, add_special_tokens=False)] if text else []
    for turn in turns:
        tokens = (*turn, *([] if end is None else [end]))
        spans.append(_span(environments, SAMPLED, tokens))
        if not begun.session.begin(0, tokens):
            problems.append("the call ends the episode: env.max_turns leaves no turn after it")
            break
        given = None
        for given in begun.session.collect(1).values():
            if given:
                spans.append(_span(environments, GIVEN, given))
        if given is None:
            problems.append(f"the environment: {episode.fault}")
    if not episode.fault:
        last = (*encode(tokenizer, answer, add_special_tokens=False), *_ended(environments))
        spans.append(_span(environments, SAMPLED, last))
        begun.session.begin(0, last)
        if environments.is_calculator:
            played = "".join(span.text for span in spans[1:])
            episode.messages.append({"role": "assistant", "content": environments.nudge + played})
    problems += [
        f"a call fails: {message['content']}"
        for message in episode.messages
        if message["role"] == "tool" and episode.counts["failures"]
    ]
    environments.release(begun)
    if not rewards:
        return ScriptedEpisode(tuple(spans), {}, tuple(problems))
    columns = {name: [value] for name, value in example.columns.items()}
    completion = [token for span in spans[1:] for token in span.tokens]
    scores = Scorer(rewards, environments.config.timeout).score(
        [answer],
        [list(example.messages)],
        columns,
        [completion],
        conversations=[episode.messages],
        environments=[episode.environment],
    )
    values = scores.values_kb[:, 0] if not episode.fault else np.full(len(rewards), np.nan)
    named = {reward.name: float(value) for reward, value in zip(rewards, values, strict=True)}
    return ScriptedEpisode(tuple(spans), named, (*problems, *scores.problems))


def _span(environments: Environments, kind: str, tokens: Sequence[int]) -> Span:
    text = environments.decoder.part(tokens)
    return Span(kind, tuple(tokens), text)


def _end_of_turn(environments: Environments) -> int | None:
    return next(iter(_ended(environments)), None)


def _ended(environments: Environments) -> list[int]:
    """The token that ends a turn, from the tokenizer; empty if it has none."""
    eos = getattr(environments.tokenizer, "eos_token_id", None)
    known = sorted(environments.end_ids)
    return [eos] if eos in environments.end_ids else known[:1]


def _ids(tokenizer: Any, mark: str) -> list[int]:
    return [int(tokenizer.get_vocab()[mark])]


def _call_text(environments: Environments, gold: str, problems: list[str]) -> str:
    """The text of a call, in the chat template's form if the call reader reads that, else the plain one."""
    schemas = environments.schemas
    if not schemas:
        problems.append("there are no tools: the environment has no public method besides reset")
        return ""
    function = schemas[0]["function"]
    arguments = _arguments(function.get("parameters", {}), gold)
    plain = f"{START}{json.dumps({'name': function['name'], 'arguments': arguments})}{END}"
    reader = CallReader.of(environments.tokenizer, schemas)
    for text in (environments.chat.call_text(function["name"], arguments), plain):
        calls = reader.read(text).calls if text else ()
        if len(calls) == 1 and (calls[0].name, calls[0].arguments) == (function["name"], arguments):
            return text
    problems.append("the tokenizer's tool parser reads neither the calls of its chat template nor plain ones")
    return plain


def _arguments(parameters: Mapping[str, Any], gold: str) -> dict[str, Any]:
    """A value for each required argument."""
    number = parse_number(gold)
    found: dict[str, Any] = {}
    for name in parameters.get("required", ()):
        schema = parameters.get("properties", {}).get(name, {})
        kind = schema.get("type", "string")
        kind = kind[0] if isinstance(kind, list) else kind
        if schema.get("enum"):
            found[name] = schema["enum"][0]
        elif kind == "integer":
            found[name] = 1 if number is None else int(number)
        elif kind == "number":
            found[name] = 1.0 if number is None else float(number)
        else:
            found[name] = {"boolean": True, "array": [], "object": {}}.get(kind, gold)
    return found
