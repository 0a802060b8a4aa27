"""Reference completions from rows or a run's completions, and their tokens."""

import json
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from runners.config.loading import load_config
from runners.data.datasets import load_rows
from runners.data.gold import GoldReader
from runners.data.prompts import build_examples
from runners.data.rendering import apply_template
from runners.errors import UserError
from runners.tokenization.text import TextDecoder
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import small

ASKED = {"role": "user", "content": "7+5?"}
TURN = {"role": "assistant", "content": "It is 12."}
MESSAGES = {"prompt": "chat", "completion": "chat", "answer": ""}  # no rewards measure: sft.only


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's folder; its tokenizer ends a turn with <|im_end|>."""
    return make_model_folder(tmp_path_factory.mktemp("gold") / "model")


def read(tmp_path, model, rows, *, data=(), rollout=(), sft=()):
    """The reader, the examples, the tokenizer and the rows of a config with this data."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[-1]]))
    source = {"source": "rows.jsonl", "eval_split": "test", "nudge": "", "system_prompt": "", **dict(data)}
    sft = {**dict(sft), "only": True}
    more = {} if source.get("answer", "answer") else {"answer": {"form": "none"}}
    tables = {**more, "data": source, "rollout": {"max_new_tokens": 40, **dict(rollout)}, "sft": sft}
    (tmp_path / "run.toml").write_text(small(model={"path": str(model)}, **tables))
    config = load_config(str(tmp_path / "run.toml"))
    tokenizer = load_tokenizer(model)
    loaded, _ = load_rows(config.data)
    reader = GoldReader(config, tokenizer, TextDecoder(tokenizer).find_stop(config.rollout.stop))
    return reader, build_examples(loaded, config.data, tokenizer)[0], tokenizer, loaded


@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"question": "7+5?", "answer": "It is 12."}, {}),
        ({"question": "7+5?", "answer": "#### 12", "text": "It is 12."}, {"completion": "text"}),
        ({"chat": [ASKED, TURN]}, MESSAGES),
        ({"question": "7+5?", "answer": "#### 12", "text": [ASKED, TURN]}, {"completion": "text"}),
        ({"question": "7+5?", "answer": "\nIt is 12. \n"}, {}),
    ],
    ids=["the answer", "a text", "messages", "messages beside a question", "a text with blanks around it"],
)
def test_reference_tokens_equal_the_chat_template(tmp_path, model, row, data):
    """Prompt and completion together are the template's conversation, up to the token that ends the turn."""
    reader, examples, tokenizer, rows = read(tmp_path, model, [row], data=data)
    (example,), notices = reader.of_rows(examples, rows, "train")
    whole = apply_template(tokenizer, [ASKED, TURN], add_generation_prompt=False)
    assert tokenizer.decode([*example.tokens, *example.gold]) == whole.rstrip("\n")
    assert example.gold[-1] in tokenizer.eos_token_ids and not notices


@pytest.mark.parametrize(
    ("answer", "data", "rollout", "prompt", "gold"),
    [
        ("<r>\n7+5</r> thanks", {"nudge": "<r>"}, {"stop": ["</r>"]}, "<r>", "\n7+5</r>"),
        (" = 12", {"prompt_form": "raw"}, {}, "7+5", " = 12"),
    ],
)
def test_a_reference_completion_has_the_tokens_of_a_sampled_one(
    tmp_path, model, answer, data, rollout, prompt, gold
):
    """Tokens start after the nudge and end at a stop string or the end token; raw texts keep their spaces."""
    row = {"question": "7+5", "answer": answer}
    reader, examples, tokenizer, rows = read(tmp_path, model, [row], data=data, rollout=rollout)
    (example,), _ = reader.of_rows(examples, rows, "train")
    assert example.text.endswith(prompt)
    tokens = example.gold if rollout else example.gold[:-1]
    assert tokenizer.decode(tokens) == gold and (rollout or example.gold[-1] in tokenizer.eos_token_ids)


def test_long_and_missing_reference_completions_are_skipped(tmp_path, model):
    """Long completions are skipped with a message; missing ones are invalid rows; none left is an error."""
    rows = [{"question": "7+5?", "answer": "12", "text": text} for text in ("12", "12 " * 40, None)]
    data = {"completion": "text", "on_bad_row": "skip"}
    reader, examples, _, loaded = read(tmp_path, model, rows, data=data)
    found, notices = reader.of_rows(examples, loaded, "train")
    assert len(found) == 1
    assert notices == [
        "train data: 1 of 3 rows left out: no reference completion",
        "train data: 1 of 3 rows left out: "
        "reference completions longer than rollout.max_new_tokens = 40 tokens",
    ]
    reader, examples, _, loaded = read(tmp_path, model, rows, data={"completion": "text"})
    with pytest.raises(UserError, match=r"line 3: no reference completion in text \(data.on_bad_row"):
        reader.of_rows(examples, loaded, "train")
    reader, examples, _, loaded = read(tmp_path, model, rows[:2], rollout={"max_new_tokens": 1})
    with pytest.raises(UserError, match=r"is 1, but the shortest of 2 reference completions .* has 2"):
        reader.of_rows(examples, loaded, "train")


def test_completions_of_a_run_are_kept_by_their_reward(tmp_path, model):
    """Finished completions are used once; the nudge at their start is part of the prompt."""
    right = {"prompt": "7+5?", "completion": "So 12", "reward": 1.0, "finished": True}
    context = [{"role": "system", "content": "Be short."}]
    changes = ({}, {}, {"reward": 0.9}, {"finished": False, "completion": "So 1"})
    changes += ({"reward": None, "completion": "So"}, {"context": context})
    lines = [{**right, **each} for each in changes]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"question": "a?", "answer": "1"}]
    how: dict[str, Any] = {"data": {"nudge": "So", "system_prompt": "Unused."}, "sft": {"completions": "run"}}
    reader, _, tokenizer, _ = read(tmp_path, model, rows, **how)
    (one, other), notices = reader.of_file()
    assert [one.messages, other.messages] == [(ASKED,), (*context, ASKED)]
    assert one.text.endswith("So") and tokenizer.decode(one.gold[:-1]) == " 12"
    assert "2 of 6 completions of" in notices[0]
    how["sft"] = {"completions": "run", "min_reward": 2.0}
    with pytest.raises(UserError, match=r"none of 6 completions .* a reward of at least sft.min_reward = 2"):
        read(tmp_path, model, rows, **how)[0].of_file()


def test_a_prompt_that_ends_with_the_assistant_names_data_completion(tmp_path, model):
    """The message about a row names `data.completion`, also if that key names another column."""
    for data in ({"prompt": "chat"}, {"prompt": "chat", "completion": "text"}):
        with pytest.raises(UserError, match=r'data\.completion = "chat" uses that turn'):
            read(tmp_path, model, [{"chat": [ASKED, TURN], "text": "x", "answer": "12"}], data=data)
    with pytest.raises(UserError) as caught:
        read(tmp_path, model, [{"chat": [], "answer": "12"}], data={"prompt": "chat"})
    assert "data.completion" not in str(caught.value)
