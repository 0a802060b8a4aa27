"""`data.transform`: new rows, skipped rows, and faults with their place."""

import json

import pytest

from runners.config.sections import DataConfig
from runners.data.datasets import load_rows, load_split
from runners.errors import UserError

TRANSFORM = """
def problem(row):
    if row["n"] % 3 == 0:
        return None
    if row["n"] == 5:
        raise KeyError("five")
    if row["n"] == 7:
        return "seven"
    return {"question": f"What is {row['n']} + 1?", "answer": row["n"] + 1, "n": row["n"]}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder with own.py and rows that contain one number each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(12)))
    (tmp_path / "own.py").write_text(TRANSFORM)
    return tmp_path


def config_of(transform="own.py:problem", **changes):
    """[data] with these rows and a transform."""
    return DataConfig(source="rows.jsonl", transform=transform, **changes)


def test_rows_are_transformed_skipped_and_counted(folder):
    """None skips a row, a fault makes it invalid, and other rows are the function's results."""
    config = config_of(on_bad_row="skip")
    train, held_out = load_rows(config, [folder])
    assert [row["n"] for row in (*train, *held_out)] == [1, 2, 4, 8, 10, 11]
    assert train[0] == {"question": "What is 1 + 1?", "answer": 2, "n": 1}
    assert (train.dropped, len(train.faults)) == (4, 2)
    assert train.notices("train", 0, 512) == [
        "train data: 4 rows skipped by data.transform",
        f"train data: 2 invalid rows skipped (the first: {next(iter(train.faults.values()))})",
    ]
    assert len(load_split(config, "test", folders=[folder])) == 6


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("return row['five']", "rows.jsonl, line 1: data.transform failed: line 2: KeyError: 'five'"),
        ("return 'seven'", "rows.jsonl, line 1: data.transform: expected a row"),
        ("raise SystemExit(0)", "rows.jsonl, line 1: data.transform failed: line 2: SystemExit: 0"),
        ("return None", r"no usable row; its data: 12 rows skipped by data.transform"),
    ],
)
def test_a_fault_names_the_row_and_the_line_of_the_function(folder, code, fault):
    """The function raises, returns no row, ends the process, or skips all rows."""
    (folder / "odd.py").write_text(f"def odd(row):\n    {code}\n")
    with pytest.raises(UserError, match=fault):
        load_rows(config_of("odd.py:odd"), [folder])
