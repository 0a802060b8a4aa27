"""The first page's figures: filled from results, and never out of nothing."""

import pytest

from benchmarks.harness import headlines, record
from benchmarks.harness.record import Figure
from runners.errors import UserError

PAGE = """above
<!-- quickstart:begin -->
old
<!-- quickstart:end -->
between
<!-- figures:begin -->
<!-- figures:end -->
below
"""
PRINTED = [
    "run          quickstart",
    "model        embedded (3 parameters)",
    "writes to    outputs/quickstart",
    "eval before training: exact match 1.0%",
    *(f"update {n}/9" for n in (1, 2, 3)),
    "eval after update 3: exact match 5.0%",
    *(f"update {n}/9" for n in (4, 5, 6, 7, 8, 9)),
    "eval after update 9: exact match 9.0%",
    "finished in 0:09",
    "tokens sampled  9",
    "model        outputs/quickstart/final",
    "log          outputs/quickstart/training_log.jsonl",
]
VALUES = {
    "from command to end": 30.0,
    "exact match before": 45.5,
    "exact match after": 97.0,
    "held-out problems": 200.0,
}


@pytest.fixture
def results(tmp_path):
    """A folder with a quickstart of two seeds and what it printed."""
    (tmp_path / "quickstart.txt").write_text("\n".join(PRINTED))
    save(tmp_path, "quickstart", [(f"seed {s}: {what}", x + s) for s in (0, 1) for what, x in VALUES.items()])
    return tmp_path


def save(folder, name, values, backend="cpu"):
    """A record of figures given as (name, value)."""
    figures = [Figure(name=figure, value=value) for figure, value in values]
    machine = {"cores": 2, "device": "a device"}
    record.save_record(
        folder, backend, record.make_record(name, figures, quick=False, machine=machine, rates={})
    )


def test_both_places_are_filled(results):
    """What is printed loses folders and most updates; each record gives a line; twice is once."""
    text = headlines.rendered(PAGE, results)
    assert headlines.rendered(text, results) == text
    assert text.startswith("above\n") and "\nbetween\n" in text and text.endswith("below\n")
    assert "old" not in text and "outputs" not in text
    shown = text.split("```")[1].strip().split("\n")
    assert shown[0] == PRINTED[1] and shown[-1] == "tokens sampled  9" and shown.count("…") == 2
    assert [line for line in shown if line.startswith("update")] == [f"update {n}/9" for n in (1, 2, 3, 9)]
    words = " ".join(text.split())
    assert "2 CPU cores, from command to end: 30–31 s" in words and "from 45.5–46.5 % to 97–98 %" in words
    assert text.count("\n- ") == 1


def test_every_line_is_of_a_figure_that_its_benchmark_has(results):
    """Each line of the real page can be made from the committed results, and says one of their numbers."""
    found = headlines.headlines(record.RESULTS)
    assert found.count("\n- ") + 1 == len(headlines.LINES)
    assert all(f"benchmarks.{name}" in found for name, _, _ in headlines.LINES)
    assert all(len(line) <= 118 and line.count("`") % 2 == 0 for line in found.split("\n"))


def test_what_is_missing_is_named(results):
    """A figure, the output, a whole output, a place in the page."""
    save(results, "peers", [("lora: step, TRL / ours", 2.0)])
    with pytest.raises(UserError, match="result of peers has no figure 'lora: step, mlx-lm-lora"):
        headlines.rendered(PAGE, results)
    (results / "peers.json").unlink()
    with pytest.raises(UserError, match="expected <!-- figures:begin -->"):
        headlines.rendered(PAGE.replace("figures:begin", "figures"), results)
    (results / "quickstart.txt").write_text("\n".join(PRINTED[:10]))
    with pytest.raises(UserError, match="not what a whole quickstart prints"):
        headlines.rendered(PAGE, results)
    (results / "quickstart.txt").unlink()
    with pytest.raises(UserError, match=r"quickstart\.txt is missing"):
        headlines.rendered(PAGE, results)
