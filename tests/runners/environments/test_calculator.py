"""nanochat's calculator: what it computes, what it refuses, and its tokens."""

import mlx.core as mx
import pytest

import grpo_fn as g
from runners.config.sections import EnvConfig
from runners.data.prompts import Example
from runners.environments.calculator import MARKS, CalculatorSession, calculate
from runners.environments.episodes import Episode
from runners.errors import UserError
from tests.support.tiny_policies import tiny_policy

LIMITS = EnvConfig(max_turns=100)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*(3+4)", "84"),
        ("1,234 * 2", "2468"),
        ("7/2", "3.5"),
        ("-3 - -4", "1"),
        ("'strawberry'.count('r')", "3"),
        ("", None),
        ("1/0", None),
        ("2**1000000", None),
        ("__import__('os').system('true')", None),
        ("'ab'.upper()", None),
        ("True", None),
        ("1e200*1e200", None),
        ("9" * 61, None),
        ("(" * 150, None),
    ],
)
def test_calculate_gives_values_and_runs_nothing(expression, value):
    """As Python writes it; no value, no exception, for anything else."""
    assert calculate(expression) == value


class Digits:
    """A tokenizer of digits, signs and the four marks; ids from 10 on are the marks and signs."""

    characters = "0123456789+-*/() ."

    def __init__(self, marks=MARKS):
        """With these marks, from id 50 on."""
        self.marks = {mark: 50 + n for n, mark in enumerate(marks)}

    def get_vocab(self):
        """All tokens."""
        return {**{c: i for i, c in enumerate(self.characters)}, **self.marks}

    def encode(self, text, add_special_tokens=False):
        """One token a character."""
        return [self.characters.index(c) for c in text]

    def decode(self, tokens):
        """The inverse."""
        return "".join(self.characters[t] for t in tokens)


def test_forced_tokens_in_the_decoding_loop():
    """A rollout of the real loop: what follows <|python_end|> is the result between its marks, unsampled."""
    policy, tokenizer = tiny_policy(), Digits()
    example = Example(({"role": "user", "content": "?"},), "?", (1, 2), "3", {})
    episodes = [Episode(example) for _ in range(8)]
    session = CalculatorSession(episodes, tokenizer, lambda tokens: str(list(tokens)), LIMITS)
    began = session.begin

    def begin(row, tokens):  # random tokens hardly spell an expression: one is put in their place
        return began(row, [50, 3, 12, 4, 51]) if tokens[-1] == 51 else began(row, tokens)

    session.begin = begin
    rollout = g.generate(
        policy,
        policy.params,
        [[1, 2]],
        g.Sampling(num_generations=8, max_new_tokens=60, eos_ids=[51, 7]),
        key=mx.random.key(0),
        replies=session,
    )
    played = session.finish(rollout)
    given = 0
    for row, (tokens, sampled) in enumerate(zip(rollout.completions(), rollout.sampled(), strict=True)):
        for n, (token, mine) in enumerate(zip(tokens, sampled, strict=True)):
            if token == 51 and mine and n + 5 < len(tokens):
                assert tokens[n + 1 : n + 5] == [52, 1, 2, 53], "3*4 is 12"
                assert sampled[n + 1 : n + 5] == [False] * 4
                given += 1
        assert played.messages[row] == ({"role": "assistant", "content": str(tokens)},)
    assert 0 < given <= played.counts["calls"].sum()
    assert played.counts["failures"].sum() == 0


def test_a_tokenizer_without_the_marks_is_refused():
    """By the names that are missing."""
    with pytest.raises(UserError, match=r"lacks <.python_start.>"):
        CalculatorSession([], Digits(MARKS[1:]), str, LIMITS)
