"""Small files that expand enormously are refused in one line, within four seconds and a gigabyte."""

import json
import os
import shutil
import time
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runners.data.row_files import read_file
from runners.errors import UserError
from runners.machine import bounded_process
from runners.machine.bounded_process import BoundedFunction
from runners.tokenization import tokenizer_check
from runners.tokenization.text import MAX_TEXT, encode
from runners.tokenization.tokenizer_check import check_tokenizer
from tests.support.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A valid model folder, to be copied and damaged."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(sound, tmp_path):
    """A copy of the model folder for one test."""
    return shutil.copytree(sound, tmp_path / "model")


@pytest.fixture(autouse=True)
def _unseen(tmp_path, monkeypatch):
    """An empty cache, so no file has passed the check."""
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "cache"))


def changed(file, **values):
    """Rewrites a JSON file with these keys."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLE = (
    "{% set n = namespace(x='xx') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
)
LIMITS = r"its tokenizer or chat template needs more than [\d.]+ s or \d+ MB for a short text"
TEMPLATES = {
    "a product": ("{{ 'x' * 10**9 }}", 10.0),
    "doubling": (DOUBLE, 10.0),
    "a loop": (LOOP, 0.5),
    "a power": ("{{ 10**(10**9) }}", 0.5),
    "a power of one of several": ({"default": "{{ 10**(10**9) }}"}, 0.5),
    "a long template": ("{{ messages }}" * 100_000, 0.5),
}


@pytest.mark.parametrize(("template", "seconds"), TEMPLATES.values(), ids=TEMPLATES)
def test_templates_without_end(folder, monkeypatch, template, seconds):
    """A template that exceeds the limit of time or memory is ended with its process."""
    changed(folder / "tokenizer_config.json", chat_template=template)
    monkeypatch.setattr(tokenizer_check, "_SECONDS", seconds)
    with pytest.raises(UserError, match=LIMITS):
        check_tokenizer(folder)


def test_tokenizers_without_end(folder):
    """A growing normalizer is refused, even if the template is invalid."""
    changed(folder / "tokenizer_config.json", chat_template="{% if %}")
    (folder / "chat_template.json").write_text("[")
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    changed(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [step] * 6})
    with pytest.raises(UserError, match="its tokenizer or chat template needs more than"):
        check_tokenizer(folder)


def test_what_has_passed_is_remembered_by_its_content(folder, monkeypatch, tmp_path):
    """Each content is checked once. Refused files are checked again, and the shipped model never."""
    runs, real = [], tokenizer_check.BoundedFunction

    def counted(*arguments, **limits):
        runs.append(arguments)
        return real(*arguments, **limits)

    monkeypatch.setattr(tokenizer_check, "BoundedFunction", counted)
    check_tokenizer(folder)
    check_tokenizer(folder)
    assert len(runs) == 1
    (folder / "chat_template.jinja").write_text("{{ 10**(10**9) }}")
    monkeypatch.setattr(tokenizer_check, "_SECONDS", 0.2)
    for _ in range(2):
        with pytest.raises(UserError):
            check_tokenizer(folder)
    assert len(runs) == 3
    (folder / "chat_template.jinja").unlink()
    check_tokenizer(folder)
    check_tokenizer(tokenizer_check.MODEL_DIR)
    assert len(runs) == 3
    monkeypatch.setenv("GRPO_FN_CACHE", "/proc/nowhere")  # cannot be written to: looked at each time
    check_tokenizer(folder)
    assert len(runs) == 4


def hoard(size):
    """Allocates this many bytes, then sleeps."""
    held = b"x" * size
    time.sleep(60)
    return len(held)


@pytest.mark.parametrize(("size", "patience"), [(600_000_000, 60.0), (10, 1.0)], ids=["memory", "asleep"])
def test_the_parent_ends_what_the_system_does_not_limit(monkeypatch, size, patience):
    """macOS cannot limit the address space, so the parent reads the child's memory and limits its time."""
    monkeypatch.setattr(bounded_process, "_CAN_LIMIT", False)
    monkeypatch.setattr(bounded_process, "_PATIENCE", patience)
    with closing(BoundedFunction(f"{__name__}:hoard", seconds=0.1, memory=10**9)) as call:
        monkeypatch.setattr(call, "_most", 500_000_000)
        began = time.monotonic()
        assert call(size) is None and time.monotonic() - began < 30


def test_a_model_is_used_unchecked_if_no_child_can_start(folder, monkeypatch):
    """The model is not refused, and is not recorded as checked."""
    monkeypatch.setattr(bounded_process.sys, "executable", "/bin/false")
    check_tokenizer(folder)
    assert not (Path(os.environ["GRPO_FN_CACHE"]) / "checked").exists()


class Panic(BaseException):
    """Like a panic in Rust, this is not an Exception."""


Panic.__name__ = "PanicException"


class Failing:
    """A tokenizer that raises the given exception."""

    def __init__(self, error):
        self.error = error

    def encode(self, text, **options):
        raise self.error


@pytest.mark.parametrize("error", [Panic("broken\nmore"), ValueError("broken")])
def test_a_tokenizer_that_fails_later_is_reported_in_a_line(error):
    """A failure on a text that the check did not contain."""
    with pytest.raises(UserError, match=r"^the tokenizer fails on a text: broken$"):
        encode(Failing(error), "hello")


def test_long_prompts_are_not_tokenized():
    """A tokenizer needs hundreds of bytes per character."""
    with pytest.raises(UserError, match=f"at most {MAX_TEXT:,} characters, found {MAX_TEXT + 1:,}"):
        encode(Failing(AssertionError()), "x" * (MAX_TEXT + 1))


def write_parquet(path, table, **options):
    """Writes a compressed Parquet file."""
    pq.write_table(table, path, compression="zstd", **options)


def one_string(path):
    """4,000 letters, a million times, in a few hundred kilobytes."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), pa.array(["q" * 4000]))
    write_parquet(path, pa.table({"question": texts, "answer": texts}))
    assert path.stat().st_size < 1_000_000


def page(path):
    """A string of 100 MB in a few kilobytes."""
    table = pa.table({"question": ["z" * 100_000_000, "q"], "answer": ["5"] * 2})
    write_parquet(path, table, use_dictionary=False)


def nulls(path):
    """A list of thirty million nulls."""
    lists = pa.array([[None] * 30_000_000, None], pa.list_(pa.null()))
    write_parquet(path, pa.table({"question": ["q"] * 2, "answer": ["5"] * 2, "l": lists}))


def refusal(path):
    """The error for a data file, or the number of its rows."""
    try:
        return f"read {len(list(read_file(Path(path))))} rows"
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("write", [one_string, page, nulls])
def test_data_without_end(tmp_path, write):
    """Data that expands too much is refused in one line, within 4 s and a gigabyte."""
    write(tmp_path / "a.parquet")
    with closing(BoundedFunction(f"{__name__}:refusal", seconds=4, memory=10**9)) as call:
        line = call(str(tmp_path / "a.parquet"))
    assert line and "bytes after unpacking" in line and "\n" not in line
