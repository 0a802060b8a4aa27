"""No control character from a model, tokenizer, reward or data set reaches a terminal."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from runners.machine.terminal import OutputLost, echo, echo_output, echo_text, visible
from runners.telemetry import events
from runners.telemetry.live import LiveReport
from runners.telemetry.report import PlainReport, Quiet
from runners.training.start import make_report
from tests.support.processes.new_process import python

CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {0x0A, 0x09}
EVIL = "\x1b]0;evil\x07\x9b31m\x7f\r\x00\x85"
SHOWN = "\\x1b]0;evil\\x07\\x9b31m\\x7f\\r\\x00\\x85"


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def harmless(text):
    """Whether a text contains no control character except line feed and tab."""
    return not any(ord(letter) in CONTROLS for letter in text)


@given(st.text(st.characters(codec=None) | st.sampled_from(sorted(map(chr, CONTROLS)))))
def test_every_control_character_is_escaped(text):
    """All other characters are unchanged, and the result can be encoded."""
    shown = visible(text)
    assert harmless(shown.encode().decode())
    if text.isprintable() or set(text) <= {"\n", "\t", "a"}:
        assert shown == text


@pytest.mark.parametrize("err", [False, True])
@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_lines_and_texts_are_escaped_wherever_they_go(monkeypatch, err, kind):
    """`echo` writes one line; `echo_text` keeps line feeds and tabs."""
    for show, wanted in ((echo, f"a\\n{SHOWN}\n"), (echo_text, f"a\n{SHOWN}\n")):
        monkeypatch.setattr(sys, "stderr" if err else "stdout", stream := kind())
        show(f"a\n{EVIL}", err=err)
        assert stream.getvalue() == wanted


def test_output_is_escaped_on_a_terminal_alone(monkeypatch):
    """A pipe receives a command's result unchanged."""
    for stream, wanted in ((Terminal(), SHOWN), (io.StringIO(), EVIL)):
        monkeypatch.setattr(sys, "stdout", stream)
        echo_output(EVIL)
        assert stream.getvalue() == wanted


def test_logs_and_warnings_of_libraries_are_escaped():
    """Libraries quote a model's files in messages that they write themselves."""
    code = (
        "import logging, warnings\nfrom runners.machine.terminal import escape_logs\nescape_logs()\n"
        f"logging.warning('type %s', {EVIL!r} + chr(10))\nwarnings.warn({EVIL!r} + chr(10) + 'b')"
    )
    done = python("-c", code)
    assert harmless(done.stderr) and done.stderr.count("\\x1b]0;evil") >= 2
    assert f"type {SHOWN}\\n\n" in done.stderr and "\nb" not in done.stderr


class Full(io.StringIO):
    """A stream that cannot be written."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_stream_that_fails(monkeypatch):
    """A failing standard output is an error; a failing standard error cannot be reported and is ignored."""
    monkeypatch.setattr(sys, "stderr", Full())
    echo("x", err=True)
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OutputLost, match="standard output: No space left on device") as caught:
        echo("x")
    assert caught.value.exit_code == 2 and OutputLost(BrokenPipeError(32, "Broken pipe")).exit_code == 141
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    with pytest.raises(OutputLost):
        echo("x")


def test_a_report_whose_stream_fails_continues(monkeypatch):
    """It records the fault, and writes later notes to standard error."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    for report in (PlainReport(Full()), LiveReport(Full())):
        with report:
            for event in (
                events.Started(2, {"run": "r"}),
                events.Updated({"update": 1}),
                events.Status("x"),
                events.Note("saved"),
                events.Finished({}),
            ):
                report.handle(event)
        assert isinstance(report.fault, OSError)
    assert errors.getvalue() == "saved\n" * 2
    monkeypatch.setattr(sys, "stdout", None)
    assert isinstance(make_report(), Quiet)


def test_displays_escape_control_characters():
    """The live line, all lines above it (rich does not escape them), and plain lines."""
    live, plain, file = io.StringIO(), Terminal(), io.StringIO()
    console = Console(file=live, width=100, color_system=None)
    for report in (LiveReport(console=console), PlainReport(plain), PlainReport(file)):
        with report:
            for event in (
                events.Status(EVIL),
                events.Started(2, {"run": EVIL, EVIL: EVIL, "model": EVIL}),
                events.Evaluated(EVIL, 0.5, 1, 2, 1.0),
                events.Note(EVIL),
                events.Status(EVIL),
                events.Finished({EVIL: EVIL}),
            ):
                report.handle(event)
                if isinstance(report, LiveReport):
                    console.print(report.render())
    assert harmless(live.getvalue()) and live.getvalue().count("evil") >= 9
    for lines in (plain.getvalue(), file.getvalue()):
        assert harmless(lines) and "\\x1b]0;evil" in lines
