"""`python -m tests.campaigns.fuzz` finds what it looks for."""

import contextlib
import os
import time

import pytest
from hypothesis import strategies as st

from runners.errors import UserError
from tests.campaigns import fuzz


class Reader(fuzz.Target):
    """Does with a number what a faulty reader would."""

    def inputs(self):
        return st.integers(0, 9)

    def feed(self, value):
        self.act(value)


def reader(act):
    return type("Faulty", (Reader,), {"act": lambda self, value: act(self.folder, value)})


def refuse(folder, value):
    raise UserError("no")


def write_outside(folder, value):
    if value == 7:
        (folder.parent.parent / "outside").write_text("x")


def remove_outside(folder, value):
    with contextlib.suppress(FileNotFoundError):
        os.remove(folder.parent.parent / "there")


def run_something(folder, value):
    os.system("true")


def hang(folder, value):
    try:
        time.sleep(5)
    except Exception as error:
        raise UserError("swallowed") from error


def fail(folder, value):
    assert value < 8


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (refuse, None),
        (lambda folder, value: (folder / "inside").write_text("x"), None),
        (write_outside, (AssertionError, "outside of the folder.*outside")),
        (remove_outside, (AssertionError, r"outside of the folder.*os\.remove.*there")),
        (run_something, (AssertionError, r"outside of the folder.*os\.system")),
        (hang, (fuzz.TooLong, "")),
        (fail, (AssertionError, "")),
    ],
)
def test_what_it_looks_for_is_found(tmp_path, monkeypatch, capsys, act, error):
    """A UserError and a file of its own are fine; all else is raised."""
    (tmp_path / "there").write_text("x")
    if act is hang:  # the others need not be as quick
        monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setitem(fuzz.TARGETS, "faulty", reader(act))
    if error is None:
        fuzz.run_target("faulty", 20, 0, tmp_path / "sandbox")
        assert "faulty: " in capsys.readouterr().out
        return
    with pytest.raises(error[0], match=error[1]):
        fuzz.run_target("faulty", 60, 0, tmp_path / "sandbox")


def test_a_process_that_dies_is_a_failure(monkeypatch):
    """Its exit code and the last input are told."""
    lines = []
    (text,) = fuzz.fuzz([["nothing of this name"]], 1, 0, lines.append)
    assert "exit code 2" in text and lines == [text]
