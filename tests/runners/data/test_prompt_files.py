"""Prompts from files: lines, rows, conversations, and invalid prompts."""

import io
import json

import pytest

from runners.data.messages import read_prompts
from runners.errors import UserError

SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    """A message."""
    return {"role": "user", "content": text}


def test_lines_of_a_text_file_and_of_standard_input(tmp_path, monkeypatch):
    """Each non-blank line is a prompt after the system message."""
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n  tw\xe2\x80\xa8o \n")
    assert read_prompts(str(tmp_path / "p.txt"), "prompt") == [[user("one")], [user("tw\u2028o")]]
    monkeypatch.setattr("sys.stdin", io.StringIO("eins\nzwei\n"))
    assert read_prompts("-", "prompt", "Be brief.") == [[SYSTEM, user("eins")], [SYSTEM, user("zwei")]]


def test_rows_with_texts_or_conversations(tmp_path):
    """A file's column contains texts and lists of messages."""
    talk = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    rows = [{"q": "one"}, {"q": [SYSTEM, *talk]}, {"q": talk[:1]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read_prompts(str(tmp_path / "p.jsonl"), "q") == [[user("one")], [SYSTEM, *talk], [user("a")]]
    (tmp_path / "p.csv").write_text("q\none\n", encoding="utf-8")
    assert read_prompts(str(tmp_path / "p.csv"), "q") == [[user("one")]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"questoin": "x"}'], r'no column "question".*found questoin; did you mean questoin\?'),
        (['{"question": 7}'], r"expected a text or a list of messages, found int"),
        (['{"question": " "}'], r"is blank"),
        (['{"question": [{"role": "bot", "content": "x"}]}'], r"expected a role of"),
        ([json.dumps({"question": [SYSTEM, {"role": "user", "content": "y"}]})], r"--system"),
        ([], r"the file contains no prompts"),
    ],
)
def test_an_invalid_prompt_is_reported(tmp_path, rows, message):
    """An invalid prompt is reported with its line; a file without prompts is refused."""
    (tmp_path / "p.jsonl").write_text("\n".join(rows), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_prompts(str(tmp_path / "p.jsonl"), "question", "Be brief.")
    for name in ("none.jsonl", "none.txt"):
        with pytest.raises(UserError, match=rf"{name}:? cannot be read"):
            read_prompts(str(tmp_path / name), "question")
