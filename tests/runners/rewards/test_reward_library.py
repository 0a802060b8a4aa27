"""The reward for mathematics, by math-verify."""

import sys

import pytest

from runners.errors import UserError
from runners.rewards.library import math_verify_reward
from runners.rewards.scoring import resolve_rewards


def completions(*texts):
    """Completions as rewards receive them."""
    return [[{"role": "assistant", "content": text}] for text in texts]


def tagged(answer):
    """A completion with an answer in tags."""
    return f"<reasoning>x</reasoning><answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        *(("1/2", tagged(text), 1.0) for text in ("0.5", r"\frac{1}{2}")),
        (r"\frac12", r"so it is $\boxed{\frac{2}{4}}$.", 1.0),
        *(("x^2 + 2x + 1", tagged(text), paid) for text, paid in (("(x+1)^2", 1.0), ("(x-1)^2", 0.0))),
        *(("18", tagged(text), paid) for text, paid in (("$18", 1.0), ("17", 0.0), ("no idea", 0.0))),
        ("18", "The answer is 18", 1.0),  # without tags the whole text is searched
        *(("18", "18 is wrong, so " + tagged("17"), 0.0), ("18", "", 0.0)),  # with tags only what they hold
        *((r"\{1, 2\}", tagged(r"\{2, 1\}"), 1.0), ("(1, 2)", tagged("(2, 1)"), 0.0)),
        *((5e-5, tagged(r"5 \times 10^{-5}"), 1.0), (1e16, tagged("10000000000000000"), 1.0)),
        *((None, tagged("1"), None), ("", tagged("1"), None)),
    ],
)
def test_mathematics_is_compared_as_mathematics(gold, text, value):
    """Fractions, LaTeX, expressions and sets are compared; the reward is None without a reference answer."""
    assert math_verify_reward(completions(text), [gold]) == [value]


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("2", r"So it is \boxed{99999999^{99999999}}."),
        ("99999999^{99999999}", tagged("2")),
        ("2", tagged("(" + "10^" * 9 + "10)!")),
    ],
)
def test_one_endless_comparison_costs_only_its_own_reward(gold, text):
    """Big integers hold the GIL, so a thread could not limit them; other completions are scored."""
    rewards = math_verify_reward(completions(tagged("3"), text, tagged("0.5")), ["3", gold, "1/2"])
    assert rewards == [1.0, None, 1.0]


def test_without_math_verify_the_extra_is_named(monkeypatch):
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    # A config's rewards are resolved before its model is loaded.
    with pytest.raises(UserError, match=r"requires math-verify: .*pip install -e '\.\[math\]' in a clone"):
        resolve_rewards(["runners.rewards.library:math_verify_reward"])
