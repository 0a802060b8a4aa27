"""The file of answers: found where it should be, whole or ignored, never an error."""

import json
import os
import sys
from pathlib import Path

import pytest

from runners.files import durable
from runners.tuning import saved_answers
from runners.tuning.saved_answers import cache_file, recall, remember

FACTS = {"device": "one", "prompts": 4}
ANSWER = {"shares_prefix": True, "notices": ["a line"]}


def test_an_answer_comes_back(tmp_path):
    """For the same facts the same answer, for other facts none; a second answer leaves the first alone."""
    file = tmp_path / "deep" / "tuning.json"
    assert recall(file, FACTS) == (None, None)
    assert remember(file, FACTS, ANSWER) is None
    assert remember(file, {**FACTS, "prompts": 8}, {"shares_prefix": False}) is None
    assert recall(file, FACTS) == (ANSWER, None)
    assert recall(file, {**FACTS, "device": "two"}) == (None, None)
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]


def answers(answer=ANSWER):
    """The text of a file with one answer for FACTS."""
    entry = {"facts": FACTS, "answer": answer}
    return json.dumps({"format": saved_answers.CACHE_FORMAT, "answers": {saved_answers._name(FACTS): entry}})


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '"x"',
        "{}",
        f'{{"format": {saved_answers.CACHE_FORMAT}}}',
        f'{{"format": {saved_answers.CACHE_FORMAT}, "answers": {{"a": 3}}}}',
        answers(3),
        answers(None),
        b"\xff\xfe",
    ],
    ids=lambda content: repr(content)[-40:],
)
def test_a_damaged_file_is_told_of_and_replaced(tmp_path, content):
    """Whatever stands in it, there is a line that names the file, and the next answer can be kept."""
    file = tmp_path / "tuning.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    answer, fault = recall(file, FACTS)
    assert answer is None and fault is not None and str(file) in fault and "damaged" in fault
    assert remember(file, FACTS, ANSWER) is None
    assert recall(file, FACTS) == (ANSWER, None)


def test_the_undamaged_twin_is_read(tmp_path):
    """The file that the cases above change is a good one."""
    file = tmp_path / "tuning.json"
    file.write_text(answers())
    assert recall(file, FACTS) == (ANSWER, None)


def test_another_format_is_forgotten(tmp_path):
    """Answers of another version are no fault and no answer."""
    file = tmp_path / "tuning.json"
    remember(file, FACTS, ANSWER)
    found = json.loads(file.read_text())
    file.write_text(json.dumps({**found, "format": saved_answers.CACHE_FORMAT + 1}))
    assert recall(file, FACTS) == (None, None)


def test_a_folder_that_cannot_be_is_told_of(tmp_path):
    """A file where the folder should be: a line, no error, from both sides."""
    (tmp_path / "taken").write_text("")
    file = tmp_path / "taken" / "tuning.json"
    assert "cannot be read" in str(recall(file, FACTS)[1])
    assert "cannot be written" in str(remember(file, FACTS, ANSWER))


def test_the_oldest_answers_go(tmp_path, monkeypatch):
    """Beyond the limit the first that was written is dropped; one written again counts as new."""
    monkeypatch.setattr(saved_answers, "MOST_ANSWERS", 2)
    file = tmp_path / "tuning.json"
    for number in (1, 2, 1, 3):
        remember(file, {"n": number}, {"value": number})
    found = [recall(file, {"n": number})[0] for number in (1, 2, 3)]
    assert [answer and answer["value"] for answer in found] == [1, None, 3]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """An error at the last moment: the old content under the name, and nothing beside it."""
    file = tmp_path / "tuning.json"
    durable.save_text(file, "old")

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        durable.save_text(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_the_users_cache_folder(monkeypatch, tmp_path):
    """GRPO_FN_CACHE, then XDG_CACHE_HOME, then ~/.cache; on macOS ~/Library/Caches."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_file() == tmp_path / "own" / "tuning.json"
    monkeypatch.delenv("GRPO_FN_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_file() == tmp_path / "xdg" / "grpo_fn" / "tuning.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_file() == tmp_path / ".cache" / "grpo_fn" / "tuning.json"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_file() == tmp_path / "Library" / "Caches" / "grpo_fn" / "tuning.json"
