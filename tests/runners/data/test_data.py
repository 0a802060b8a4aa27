"""Rows from files, folders and the Hub: reading, held-out rows, and reports of faults."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.config.sections import DataConfig
from runners.data.datasets import epoch_order, load_rows
from runners.data.prompts import gold_answer, reward_columns
from runners.data.row_files import Rows
from runners.errors import UserError

ROWS = [
    {"question": f"What is {n} + 1?", "answer": f"So {n}+1.\n#### {n + 1}", "level": n % 3} for n in range(25)
]


def jsonl(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON lines; a str is written unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def load(source: object, **changes: Any) -> tuple[Rows, Rows]:
    """The rows of a source under a config with a few changes."""
    return load_rows(DataConfig(source=str(source), **changes))


def refused(source: object, **changes: Any) -> str:
    """The one-line message about a refused source."""
    with pytest.raises(UserError) as caught:
        load(source, **changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


LINES = b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, ROWS)).encode()  # Windows line ends, blank lines
CELLS = "".join(f'"{row["question"]}","{row["answer"]}",{row["level"]}\n' for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("rows.jsonl", LINES), ("lines.json", LINES)),
        ("rows.json", json.dumps(ROWS, indent=2).encode()),
        *(("rows.CSV", f"\nquestion,answer,level\n{CELLS}".encode()), ("rows.parquet", None)),
    ],
)
def test_every_file_format_is_read(tmp_path: Path, name: str, content: bytes | None) -> None:
    """A file's rows keep their order and columns; the last tenth is held out for evaluation."""
    path = tmp_path / name
    if content is None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        path.write_bytes(content)
    train, evaluation = load(path)
    # CSV has no types: its columns are text, as they stand.
    rows = [{**row, "level": str(row["level"])} for row in ROWS] if name.endswith("CSV") else ROWS
    assert train == rows[:-2]
    assert evaluation == rows[-2:]
    assert train.faults == evaluation.faults == {}


def test_a_folder_of_splits(tmp_path: Path) -> None:
    """A folder has a file for each split, in any format; validation has several names."""
    jsonl(tmp_path / "train.jsonl", ROWS[:10])
    (tmp_path / "dev.json").write_text(json.dumps(ROWS[10:15]), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "test.parquet")
    (tmp_path / "README.md").write_text("about", encoding="utf-8")
    assert load(tmp_path) == (ROWS[:10], ROWS)
    for name in ("dev", "valid", "validation", "val"):
        assert load(tmp_path, eval_split=name) == (ROWS[:10], ROWS[10:15])
    assert load(tmp_path, split="test", eval_split="train") == (ROWS, ROWS[:10])
    assert load(tmp_path, split="test", eval_split="test") == (ROWS[:-2], ROWS[-2:])
    assert load(tmp_path, max_samples=3) == (ROWS[:3], ROWS)


def test_shards_are_joined_in_order(tmp_path: Path) -> None:
    """Shards may be in the folder `data`, have a digest, lack zeros, or start at 1."""
    (tmp_path / "hub" / "data").mkdir(parents=True)
    jsonl(tmp_path / "hub" / "data" / "test-00000-of-00001-a09b74b3ef9c3b56.jsonl", ROWS)
    for n in range(12):
        jsonl(tmp_path / "hub" / "data" / f"train-{n + 1}-of-12.jsonl", ROWS[2 * n : 2 * n + 2])
    assert load(tmp_path / "hub") == (ROWS[:24], ROWS)
    jsonl(tmp_path / "train-00001-of-00002.jsonl", ROWS[10:])
    jsonl(tmp_path / "train-00000-of-00002.jsonl", [*ROWS[:10], {"question": "?"}])
    jsonl(tmp_path / "test.jsonl", ROWS)
    train, _ = load(tmp_path, on_bad_row="skip")
    assert train == ROWS
    assert list(train.faults) == [f"{tmp_path / 'train-00000-of-00002.jsonl'}, line 11"]
    jsonl(tmp_path / "train.jsonl", ROWS)
    assert f'expected one complete copy of "train" in {tmp_path}, found' in refused(tmp_path)
    (tmp_path / "train-00001-of-00002.jsonl").unlink()
    assert refused(tmp_path).endswith("found train-00000-of-00002.jsonl, train.jsonl")
    (tmp_path / "train.jsonl").unlink()
    assert refused(tmp_path).endswith("found train-00000-of-00002.jsonl")


def test_missing_splits_list_those_found(tmp_path: Path) -> None:
    """The message about a missing split names its key and lists the existing splits."""
    assert "found no data file" in refused(tmp_path)
    jsonl(tmp_path / "train.jsonl", ROWS)
    jsonl(tmp_path / "tests.jsonl", ROWS)
    message = refused(tmp_path)
    assert "data.eval_split: expected test.jsonl" in message and "found tests, train; did you mean" in message
    (tmp_path / "tests.jsonl").unlink()
    assert "data.split: expected trian.jsonl" in refused(tmp_path, split="trian", eval_split="train")
    assert 'is a file, so its only split is "train"' in refused(tmp_path / "train.jsonl", split="test")
    assert 'data.name is "x", a configuration on the Hub, but data.sourc' in refused(tmp_path, name="x")


@given(n=st.integers(2, 40), cap=st.integers(0, 50))
def test_held_out_rows_are_never_trained_on(n: int, cap: int, tmp_path_factory: Any) -> None:
    """For any number of rows, training and evaluation share none, and only max_samples drops rows."""
    rows = [{"question": f"{k}?", "answer": k} for k in range(n)]
    path = jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows)
    train, evaluation = load(path, max_samples=cap)
    trained, evaluated = [row["answer"] for row in train], [row["answer"] for row in evaluation]
    assert evaluated == list(range(n - max(n // 10, 1), n))
    assert trained == list(range(n - len(evaluated)))[: cap or None]


GOOD = {"question": "1+1?", "answer": "2"}


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ('{"question": "a", "answer": 1', "not JSON: Expecting ',' delimiter"),
        *(("[" * 100_000, "not JSON"), ('{"question": "a", "answer": ' + "1" * 5000 + "}", "not JSON")),
        ('["question"]', "expected an object with named fields, found list"),
        *(({"answer": "2"}, "no question"), ({"question": " \n", "answer": "2"}, "question is blank")),
        ({"question": 7, "answer": "2"}, "question: expected text, found int"),
        ({"question": "a"}, 'expected an answer in "answer", found'),
        ({"question": "a", "answer": ""}, 'an answer in "answer", found ""'),
        ({"question": "a", "answer": "So 5.\n#### "}, 'an answer in "answer", found "So 5.\\n#### "'),
        ({"question": "half \ud800", "answer": "2"}, "half of a surrogate pair, '\\ud800'"),
    ],
)
def test_bad_rows(tmp_path: Path, bad: Any, fault: str) -> None:
    """An invalid row is reported with its line, or skipped and counted, depending on the config."""
    path = jsonl(tmp_path / "train.jsonl", [GOOD, "", bad, GOOD, bad, GOOD])
    message = refused(path)
    assert message.startswith(f"{path}, line 3: ")
    assert fault in message
    assert 'data.on_bad_row = "skip"' in message
    train, evaluation = load(path, on_bad_row="skip")
    assert (train, evaluation) == ([GOOD] * 2, [GOOD])
    assert list(train.faults) == [f"{path}, line 3", f"{path}, line 5"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.jsonl", b"", "contains no usable row"),
        ("rows.jsonl", b'{"question": "a", "answer": 1}', "expected at least two usable rows"),
        (
            "rows.jsonl",
            b'{"question": "", "answer": 1}\n{\n{',
            "no usable row; its data: 3 invalid rows skipped",
        ),
        ("rows.jsonl", b'{"question": "a"}\n{"question": "caf\xe9"}\n', "line 2: byte 0xe9 is not UTF-8"),
        ("rows.json", b'[{"question": "a"', "is not JSON: Expecting"),
        ("rows.parquet", b"PAR1 no", "is not a usable Parquet file"),
        ("rows.txt", b"a", 'expected one of .jsonl, .json, .csv, .parquet, found ".txt"'),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    """An empty or damaged file, or one in another encoding, is refused regardless of on_bad_row."""
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name, on_bad_row="skip")
    assert str(tmp_path / name) in message
    assert expected in message


def test_missing_fields(tmp_path: Path) -> None:
    """A missing field is reported with its key, the existing fields and the nearest name."""
    path = jsonl(tmp_path / "rows.jsonl", [{"qestion": "a", "gold": 1}] * 3)
    message = refused(path, on_bad_row="skip")
    assert 'no field named "question" (data.question); found qestion, gold; did' in message
    message = refused(path, question="qestion", answer="golt")
    assert '"golt" (data.answer); found qestion, gold; did' in message
    train, evaluation = load(path, question="qestion", answer="gold")
    assert (len(train), len(evaluation)) == (2, 1)


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """load_dataset receives a Hub name and its configuration, once for each split."""
    source, calls = "openai/gsm8k", []

    def load_dataset(path, config=None, *, split):
        calls.append((path, config, split))
        return datasets.Dataset.from_list(ROWS[:20] if split == "train" else ROWS[20:])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name, asked in (("", "main"), ("socratic", "socratic")):
        assert load(source, name=name, max_samples=4) == (ROWS[:4], ROWS[20:])
        assert calls[-2:] == [(source, asked, "train"), (source, asked, "test")]


def test_hub_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error of load_dataset becomes a message with source and split; an invalid row has its number."""
    bad = datasets.Dataset.from_list([ROWS[0], {**ROWS[1], "question": None}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split, **__: {"train": bad}[split])
    message = refused("a/b", on_bad_row="skip")
    assert message.startswith(
        'data.source is "a/b", data.eval_split "test", which could not be downloaded: Key'
    )
    assert refused("a/b").startswith("a/b (train), row 2: no question")


@pytest.mark.parametrize(
    ("field", "gold"),
    [
        *(("So.\n#### 1,234 ", "1,234"), ("#### 1\n#### 2", "2"), (" 72 ", "72"), ("####", None), ("", None)),
        *((72, "72"), (0, "0"), (10**400, f"1{'0' * 400}"), (Decimal("3.10"), "3.10"), (0.00005, "0.00005")),
        *((1e16, "1" + "0" * 16), (18.0, "18"), (-0.0, "0"), (np.float32(0.1), "0.1"), (np.int64(7), "7")),
        ("Tiny.\n#### 5e-05", "0.00005"),  # as pandas writes a column of floats into CSV
        *(("5e-05 m", "5e-05 m"), (np.bool_(True), "true"), (np.float64("nan"), None)),
        *((Decimal("sNaN"), None), (float("inf"), None), (None, None), ([], None)),
        (["assert f() == 1"], '["assert f() == 1"]'),
    ],
)
def test_gold_answer(field: object, gold: str | None) -> None:
    """The answer is the text after the last mark or the whole field, with numbers as plain decimals."""
    assert gold_answer(field) == gold and gold_answer(10**5000) is None


@given(st.integers(0, 200), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_epoch_order(n: int, seed: int, epoch: int) -> None:
    """Each epoch contains every example once, in a reproducible order."""
    order = epoch_order(n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    np.testing.assert_array_equal(order, epoch_order(n, seed, epoch))
    orders = [tuple(epoch_order(50, seed + k, epoch + e).tolist()) for k in range(3) for e in range(3)]
    assert len(set(orders)) == 9


def test_data_without_answers(tmp_path):
    """Rows need no answer if `data.answer` is empty or only the default column is missing."""
    rows = [{"question": f"Go {n} steps.", "level": n} for n in range(20)]
    source = jsonl(tmp_path / "maze.jsonl", rows)
    assert refused(source, answer="x").endswith(
        '; set data.answer = "" if only your own rewards score completions'
    )
    assert load(source) == load(source, answer="")
    train, held_out = load(source, answer="")
    assert len(train) + len(held_out) == 20
    assert "answer" not in reward_columns(train, "")
    bad = jsonl(tmp_path / "bad.jsonl", [*rows, {"question": " ", "level": 1}])
    assert "question is blank" in refused(bad, answer="")


def test_narrow_floats_are_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float32 0.1 is 0.1 for rewards and as an answer, not 0.10000000149011612."""
    answers = pyarrow.array([0.1, None, 5e-5], pyarrow.float32())
    table = pyarrow.table({"question": ["a"] * 3, "answer": answers, "half": answers.cast(pyarrow.float16())})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    hub = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: hub)
    for source in (tmp_path / "rows.parquet", "a/b"):
        rows = [*load(source, on_bad_row="skip", eval_split="train")[0], *load(source, on_bad_row="skip")[1]]
        assert [row["answer"] for row in rows][:1] == [0.1] and rows[-1]["answer"] == 5e-5
        assert rows[0]["half"] == 0.1
    pyarrow.parquet.ParquetWriter(tmp_path / "none.parquet", table.schema).close()  # not even a row group
    assert "contains no usable row" in refused(tmp_path / "none.parquet")
