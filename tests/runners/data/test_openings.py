"""Text of the chat template that starts each completion, such as an opening tag of thoughts."""

import json

import pytest

from runners.config.loading import load_config
from runners.data.rendering import opening
from runners.evaluation.reward_check import GOLD, check_rewards
from runners.files.json_files import read_lines
from runners.machine.startup import Platform
from runners.training.setup import SetUp
from tests.runners.data.test_prompts import NO_SYSTEM, TEMPLATE, tokenizer
from tests.support.tiny_runs import ran, small

USER = "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}{% else %}"
READY = "{% endif %}{% endfor %}{% if add_generation_prompt %}"
# As families of models do: an earlier turn of the assistant, the start of a reply, its opening.
FAMILIES = {
    "DeepSeek-R1": ("<A>{{ m.content.split('</think>')[-1] }}</s>", "<A><think>\n", "<think>\n"),
    "Qwen3, thinking": (
        "<A>\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}</s>",
        "<A>\n<think>\n",
        "<think>\n",
    ),
    "GLM, thinking": ("<A></think>{{ m.content }}</s>", "<A><think>", "<think>"),
    "GLM, not thinking": ("<A></think>{{ m.content }}</s>", "<A></think>", ""),
    "empty thoughts": ("<A><think>\n\n</think>\n\n{{ m.content }}</s>", "<A><think>\n", "<think>\n"),
    "Qwen3, not thinking": ("<A>\n{{ m.content }}</s>", "<A>\n<think>\n\n</think>\n\n", ""),
    "gpt-oss": ("<A><|channel|>final<|message|>{{ m.content }}</s>", "<A>", ""),
    "Llama 3": ("<A>\n\n{{ m.content }}</s>", "<A>\n\n", ""),
    "Mistral": (" {{ m.content }}</s>", "", ""),
    "words": ("<A>{{ m.content }}</s>", "<A>Here are my steps:\n", "Here are my steps:\n"),
    "another header": ("<B>{{ m.content }}</s>", "<A>", ""),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_opening_is_what_follows_the_header(family):
    """The opening is a tag or words, without the header and without a pair of tags that is already closed."""
    turn, start, expected = FAMILIES[family]
    wrapped = tokenizer(USER + turn + READY + start + "{% endif %}")
    assert opening(wrapped, {}) == expected
    assert opening(wrapped, {}, raw=True) == ""


@pytest.mark.parametrize("template", [None, TEMPLATE, NO_SYSTEM, "{{ raise_exception('no') }}", "x"])
def test_a_template_without_a_known_header_has_no_opening(template):
    """A failing template and a missing one have no opening either."""
    assert opening(tokenizer(template), {}) == ""


PREFILLED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|><thoughts>\n{% endif %}"
)
REWARDS = """
def opened(completions, **_):
    return [float(each[0]["content"].startswith("<thoughts>\\nSo ")) for each in completions]


def closed(completions, **_):
    return [float("</thoughts>" in each[0]["content"]) for each in completions]
"""


@pytest.fixture
def prefilled(tmp_path, monkeypatch):
    """A config whose chat template opens each reply with a tag, followed by a nudge."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prefilled.jinja").write_text(PREFILLED)
    text = small(
        data={"chat_template": "prefilled.jinja", "nudge": "So "},
        reward={"functions": ["rewards.py:opened"], "timeout": 0},
        optim={"max_steps": 1},
        eval={"at_start": True},
    )
    (tmp_path / "train.toml").write_text(text)
    return text


def test_rewards_and_evaluations_read_the_templates_opening(tmp_path, prefilled):
    """The opening precedes the nudge in training, evaluation and log."""
    run = ran(tmp_path, text=prefilled)
    assert run.updates[0]["rewards/opened/mean"] == 1.0
    assert [record["eval/reward"] for record in run.log if "eval/reward" in record] == [1.0, 1.0]
    lines = list(read_lines(run.result.folder / "completions.jsonl"))
    assert lines and all(line["completion"].startswith("<thoughts>\nSo ") for line in lines)
    assert all("So <thoughts>" not in line["completion"] for line in lines)


def test_grpo_check_scores_completions_that_close_the_opening(prefilled):
    """The correct completion continues the opening."""
    checked = check_rewards(load_config("train.toml", ['reward.functions=["rewards.py:closed"]']).check())
    assert checked.values_kan[0, list(checked.kinds).index(GOLD)].tolist() == [1.0] * 8


def test_supervised_completions_leave_the_opening_to_the_prompt(tmp_path, prefilled):
    """A reference completion with the tag has the same tokens as one without it."""
    rows = [
        {"question": f"q{n}", "answer": "1", "gold": start + "2+2</thoughts>4"}
        for n, start in enumerate(["<thoughts>\nSo ", "<thoughts>", "So ", ""] * 3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = small(
        data={
            "chat_template": "prefilled.jinja", "nudge": "So ", "source": "rows.jsonl", "completion": "gold",
            "eval_split": "train",
        },
        rollout={"max_new_tokens": 64},
        sft={"only": True},
        optim={"max_steps": 1},
    )  # fmt: skip
    (tmp_path / "sft.toml").write_text(text)
    run = SetUp(load_config("sft.toml").check(), Platform("cpu")).build()
    assert len({example.gold for example in run.data.gold}) == 1
