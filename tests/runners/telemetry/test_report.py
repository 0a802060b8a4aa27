"""The display: lines on a terminal and in a file, and their numbers."""

import io
import math
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from runners.errors import gigabytes
from runners.telemetry.events import Advanced, Evaluated, Finished, Note, Started, Status, Updated
from runners.telemetry.live import LiveReport
from runners.telemetry.report import PlainReport, duration_text, number_text
from runners.training.start import make_report
from tests.support.processes.terminal import Screen, Session

ROOT = Path(__file__).resolve().parents[3]


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self):
        return self.now


def story(report, clock):
    """Sends the events of a run: evaluations, updates of two seconds each, a checkpoint, the end."""
    with report:
        report.handle(
            Started(110, {"run": "quickstart", "model": "embedded", "folder": "outputs/quickstart"})
        )
        report.handle(Status("evaluating"))
        clock.now += 4
        report.handle(Evaluated("start", 0.52, 104, 200, 4.0))
        for update in range(1, 43):
            clock.now += 2
            metrics = {
                "update": update, "reward": update / 100, "loss": -0.0123 if update != 5 else math.nan,
                "kl": 0.00031, "grad_norm": 0.4219, "completions/mean_length": 48.2, "entropy": 0.61,
                "tokens_per_second": 2500.0, "step_time": 2.0, "memory/peak_gb": 0.312,
            }  # fmt: skip
            report.handle(Updated(metrics))
        report.handle(Note("checkpoint outputs/quickstart/checkpoint-42"))
        clock.now += 4
        report.handle(Evaluated("end", 0.915, 183, 200, 4.0))
        report.handle(Finished({"exact match": "52.0% -> 91.5%", "model": "outputs/quickstart/final"}))


def terminal(width=80, clock=None):
    """A live display and its output stream."""
    stream = io.StringIO()
    console = Console(force_terminal=True, width=width, file=stream)
    return LiveReport(console=console, clock=clock or Clock()), stream


def current(report):
    """The current line."""
    return report.render().plain


def test_plain_lines_say_everything_once():
    """Header, evaluations, updates, checkpoint and summary appear, with the right times and rates."""
    clock, stream = Clock(), io.StringIO()
    story(PlainReport(stream, clock=clock, every=10), clock)
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["run     quickstart", "model   embedded", "folder  outputs/quickstart"]
    assert lines[3] == "eval start: exact match 52.0% (104 of 200) in 4.0 s"
    # 90 updates of 2 s are left; the gradient's norm has no room.
    assert lines[5] == (
        "update  20/110  reward 0.200  em 52.0%  2.5k tok/s  0.31 GB  3:00 left  loss -0.0123  kl 3.1e-04"
    )
    assert [line for line in lines if line.startswith("update")] == lines[4:8]
    assert lines[8:] == [
        "checkpoint outputs/quickstart/checkpoint-42",
        "eval end: exact match 91.5% (183 of 200) in 4.0 s",
        "finished in 1:32",
        "exact match  52.0% -> 91.5%",
        "model        outputs/quickstart/final",
    ]


@pytest.mark.parametrize("width", [30, 60, 200])
def test_a_terminal_has_the_lines_of_a_file_and_a_current_one(width):
    """The lines fit the terminal and show brackets; the current line shows the progress."""
    clock = Clock()
    report, stream = terminal(width, clock)
    report.handle(Note("[red] /a[0]"))
    assert current(report) == ""
    story(report, clock)
    assert current(report)[:26] == "update 42/110  2:12 left"[: width - 2]
    lines = Screen(stream.getvalue().replace("\n", "\r\n"), width).lines
    if width == 200:
        assert lines[1:4] == ["run     quickstart", "model   embedded", "folder  outputs/quickstart"]
        assert "checkpoint outputs/quickstart/checkpoint-42" in lines and "finished in 1:32" in lines
    updates = [line for line in lines if "reward 0.200" in line]
    assert len(updates) == 1 and "[red] /a[0]" in lines
    assert max(len(line) for line in lines if line.startswith("update")) <= width - 2


def test_a_resumed_run_is_shown_from_where_it_was():
    """The display starts with the last evaluation's score and the update that was reached."""
    report, stream = terminal()
    report.handle(Started(100, {"run": "quickstart"}, done=25, score=0.89))
    assert current(report).startswith("update 25/100  0:00 so far")
    report.handle(Status("sampling"))
    assert current(report) == "update 25/100  0:00 so far  sampling 0:00"
    report.handle(Updated({"update": 26, "reward": 0.5}))
    assert "update  26/100  reward 0.500  em 89.0%" in stream.getvalue()
    report.__exit__()


TERMINAL = """
from runners.telemetry.events import Started, Status, Updated
from runners.training.start import make_report
with make_report() as report:
    report.handle(Status("loading the model"))
    report.handle(Started(3, {"run": "tiny"}))
    report.handle(Updated({"update": 1, "reward": 0.5}))
    print("a reward function prints")
    raise KeyboardInterrupt
"""


def on_a_terminal(**environment):
    """Runs the report in a process on a pseudo-terminal; returns its output."""
    with Session([sys.executable, "-c", TERMINAL], 80, PYTHONPATH=str(ROOT), **environment) as session:
        session.read_until()
        return session.output


def test_an_interrupt_leaves_the_terminal_as_it_was():
    """The cursor is visible again; NO_COLOR removes colours; TERM=dumb gives plain lines."""
    output, colour = on_a_terminal(), re.compile(r"\x1b\[[0-9;]*[349][0-7]m")
    assert output.rfind("\x1b[?25h") > output.find("\x1b[?25l") >= 0
    assert "a reward function prints" in output and "loading the model 0:00" in output
    assert colour.search(output) and not colour.search(on_a_terminal(NO_COLOR="1"))
    dumb = on_a_terminal(TERM="dumb")
    assert "\x1b" not in dumb and "update 1/3  reward 0.500" in dumb
    assert isinstance(make_report(stream=io.StringIO()), PlainReport)


def test_the_first_update_does_not_spoil_the_time_left():
    """The first update compiles for 60 s; 8 updates of 2 s are then 16 s."""
    run = PlainReport(io.StringIO(), clock=(clock := Clock()))
    run.handle(Started(10, {}))
    for update, seconds, left in ((1, 60.0, 9 * 60), (2, 2.0, 8 * 2)):
        run.handle(Updated({"update": update, "step_time": seconds}))
        assert run.seconds_left() == left
    clock.now += 1
    assert run.seconds_left() == 8 * 2 - 1
    clock.now += 100
    assert run.seconds_left() == 0


def test_an_activity_shows_how_far_it_is():
    """It shows its time so far and ends with the update; plain lines show it every 30 s."""
    clock, stream = Clock(), io.StringIO()
    report = PlainReport(stream, clock=clock)

    def after(seconds, event):
        clock.now += seconds
        report.handle(event)
        return report.activity()

    assert after(0, Started(10, {})) == ""
    assert after(0, Status("evaluating")) == "evaluating 0:00"
    assert after(2, Advanced("prompt tokens", 100, 400)) == "evaluating: prompt tokens 100 of 400, 0:02"
    assert after(40, Advanced("tokens", 5, 64)) == "evaluating: tokens 5 of 64, 0:42"
    assert after(0, Status("learning")) == "learning 0:00"
    assert after(0, Updated({"update": 1})) == ""
    assert stream.getvalue().splitlines()[0] == "evaluating: tokens 5 of 64, 0:42"


def test_an_activity_without_events_shows_that_it_goes_on(monkeypatch):
    """While loading or during a long step, a line appears every 30 s; none appears after the end."""
    monkeypatch.setattr("runners.telemetry.report._LOOK", 0.001)
    clock, stream = Clock(), io.StringIO()

    def lines_after(seconds, count):
        clock.now += seconds
        end = time.monotonic() + 10
        while stream.getvalue().count("\n") < count and time.monotonic() < end:
            time.sleep(0.001)
        return stream.getvalue().splitlines()

    with PlainReport(stream, clock=clock) as report:
        report.handle(Status("loading the model"))
        assert lines_after(29, 0) == []
        assert lines_after(1, 1) == ["loading the model 0:30"]
        assert lines_after(30, 2)[1:] == ["loading the model 1:00"]
        report.handle(Status("sampling"))
        report.handle(Advanced("tokens", 8, 64))
        assert lines_after(31, 3)[2:] == ["sampling: tokens 8 of 64, 0:31"]
    time.sleep(0.02)
    assert len(lines_after(100, 3)) == 3


@pytest.mark.parametrize(
    ("spell", "texts"),
    [
        (number_text, {0.0: "0", 2.0: "2.00", -0.01234: "-0.0123", 0.00031: "3.1e-04", 123.4: "123"}),
        (number_text, {1e7: "1.00e+07", math.nan: "nan", -math.inf: "-inf", None: "-"}),
        (gigabytes, {999: "1 kB", 740_000: "740 kB", 2_740_000: "2.7 MB", 99e6: "99 MB", 12.4e9: "12.4 GB"}),
        (duration_text, {None: "-", 41.4: "0:41", 725: "12:05", 3723: "1:02:03"}),
    ],
)
def test_numbers_sizes_and_times_are_short(spell, texts):
    """Numbers have three digits; bytes and seconds have readable units."""
    assert [spell(value) for value in texts] == list(texts.values())
