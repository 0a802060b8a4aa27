"""Thoughts are not answers: the splitter, all forms, and all built-in rewards."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.answers.forms import PLACE, answer_form
from runners.answers.thoughts import TAGS, split_thoughts
from runners.config.loading import load_config
from runners.errors import ConfigError
from runners.evaluation.measurement import evaluator_of
from runners.rewards.builtin import built_in
from runners.rewards.scoring import Scorer, resolve_rewards

PARTS = st.sampled_from([*TAGS, "18", "\n", "<answer>"])


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        *(("18", "", "18"), ("", "", ""), ("<think>a</think>18", "<think>a</think>", "18")),
        *(("a</think>18", "a</think>", "18"), ("<think>18", "<think>18", None)),
        ("18<think>", "18<think>", None),
        *(("<think>a</think>", "<think>a</think>", ""), ("1<think>a</think>2", "1<think>a</think>", "2")),
        ("<think>a</think>1<think>b</think>2", "<think>a</think>1<think>b</think>", "2"),
        ("<think>a<think>b</think>18", "<think>a<think>b</think>", "18"),
        ("<think>a</think>18<think>b", "<think>a</think>18<think>b", None),
    ],
)
def test_where_thoughts_end(text, thoughts, answer):
    """The answer follows the last closing tag; an open thought has no answer."""
    assert split_thoughts(text) == (thoughts, answer)


@given(st.lists(PARTS, max_size=8).map("".join))
def test_no_character_is_lost(text):
    """Thoughts and answer together are the text; no answer has a tag; without tags the text is the answer."""
    thoughts, answer = split_thoughts(text)
    assert thoughts + (answer or "") == text and split_thoughts(text, ()) == ("", text)
    assert answer is None or not any(tag in answer for tag in TAGS)


FORMS = (
    *("xml", "last_number", "boxed", "gsm8k", "letter", "json:x", "exact", "code"),
    "regex:is (\\d+)",
    "own",
)


@pytest.mark.parametrize("spec", FORMS)
def test_every_form_reads_behind_the_thoughts(spec, tmp_path):
    """A form reads no answer inside thoughts; a text may start inside them or end inside them."""
    (tmp_path / "read.py").write_text("def whole(text):\n    return text\n")
    spec = spec.replace("own", f"{tmp_path}/read.py:whole")
    form: Any = answer_form(spec, thoughts=("[T]", "[/T]"))
    right, wrong = (
        {"code": f"```python\n{each}\n```", "regex:is (\\d+)": f"is {each}"}.get(spec)
        or (form.right or PLACE).replace(PLACE, "AB"[each == 7] if spec == "letter" else str(each))
        for each in (18, 7)
    )
    found = form.read(right)
    assert found and found != form.read(wrong)
    assert form.read(f"[T]{wrong}[/T]{right}") == form.read(f"{wrong}[/T]{right}") == found
    assert form.read(f"[T]{right}[/T]") is form.read(f"[T]{right}") is form.read(f"{right}[T]") is None
    whole: Any = answer_form(spec, thoughts=())
    assert whole.read(right) == found


def test_a_nudge_may_open_the_thoughts():
    """The nudge is removed from an exact answer unless it opens the thoughts."""
    form: Any = answer_form("exact", given="<think>\n")
    assert form.read("<think>\nso it is</think>18") == "18" and form.read("<think>\nit is 18") is None


RIGHT = "<reasoning>a</reasoning><answer>18</answer>"


@pytest.mark.parametrize("tags", [TAGS, ("[T]", "[/T]")])
def test_every_built_in_reward_reads_behind_the_thoughts(tags):
    """The scorer passes the configured tags to the rewards."""
    rewards = resolve_rewards([*built_in()], form=answer_form("xml", thoughts=tags))
    opening, closing = tags
    opened = (f"{opening}7{closing}{RIGHT}", f"7{closing}{RIGHT}")
    texts = [RIGHT, *opened, f"{opening}{RIGHT}", f"{RIGHT}{closing}"]
    scores = Scorer(rewards, thoughts=tags).score(texts, [[]] * 5, {"answer": ["18"] * 5})
    assert scores.values_kb.sum(axis=0).tolist() == [4.0, 4.0, 4.0, 0.0, 0.0]


def test_custom_rewards_receive_the_tags():
    """The tags are an argument; `completions` includes the thoughts."""
    given = []
    (reward,) = resolve_rewards(["xmlcount_reward_func"])
    function = lambda completions, thought_tags: given.append((completions, thought_tags)) or [0.0]  # noqa: E731
    Scorer([type(reward)("mine", function)], thoughts=("a", "b")).score(["a1b2"], [[]], {})
    assert given == [([[{"role": "assistant", "content": "a1b2"}]], ("a", "b"))]


def test_the_config_s_tags_reach_evaluation():
    """Forms and rewards use the tags; test_key_effects.py tests training."""
    config = load_config(None, ["model.path=embedded", 'data.thoughts=["a","b"]'])
    decoder: Any = SimpleNamespace(find_stop=lambda stops: None)
    model: Any = SimpleNamespace(engine=None, decoder=decoder, vision=None, eos_ids=frozenset())
    evaluator, _ = evaluator_of(model, config, resolve_rewards(["xmlcount_reward_func"]), None)
    assert evaluator.scorer and evaluator.form
    assert evaluator.scorer.thoughts == evaluator.form.thoughts == ("a", "b")


@pytest.mark.parametrize("tags", ['["<t>"]', '["a", "a"]', '["", "b"]', '["a", "b", "c"]'])
def test_tags_are_an_opening_and_a_closing_one(tags):
    """Tags are an opening and a closing tag, or an empty list."""
    with pytest.raises(ConfigError, match=r"data\.thoughts: expected a list of strings: an opening and"):
        load_config(None, ["model.path=embedded", f"data.thoughts={tags}"])
    assert load_config(None, ["model.path=embedded", "data.thoughts=[]"]).data.thoughts == ()
