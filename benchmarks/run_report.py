"""The report of a run: writing and opening it, its size; what it and the live page cost the quickstart.

*large* is 1,000 updates × 128 completions of some 200 characters, *largest* 200,000 completions in 500
updates. *First paint* and *completions open* are Chromium's. *quickstart* runs it without a report, with one,
and with one and an open live page, in turn; CPU times are of all cores.

**What limits it.** Reading JSON, making columns and deflating them take a third each.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, urlsplit

import attrs
import click

from benchmarks.harness.command import benchmark, say
from benchmarks.harness.measure import Timing
from benchmarks.harness.record import Figure, ratio_figure
from benchmarks.quickstart import QUICK, command_line
from runners.errors import UserError
from runners.files.json_files import json_line
from runners.report.page import write_report

WORDS = ("apples", "and", "pears", "is", "then", "left", "minus", "each", "day", "how", "many", "are")
SIZES = {"large": (1000, 8), "largest": (500, 25)}  # updates of 16 prompts, completions of each
CASES = (*SIZES, "quickstart")


def made_run(folder: Path, updates: int, group: int, seed: int = 0) -> Path:
    """A run's files with `updates` × 16 × `group` completions of some 200 characters."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.resolved.json").write_text(json_line({"rollout": {"num_generations": group}}))
    texts = [" ".join(draw.choices(WORDS, k=36)) for _ in range(4000)]
    with (
        open(folder / "completions.jsonl", "w", encoding="utf-8") as completions,
        open(folder / "training_log.jsonl", "w", encoding="utf-8") as log,
    ):
        for update in range(1, updates + 1):
            metrics = {f"metric/{i}": draw.random() for i in range(40)}
            log.write(json_line({"update": update, "batch_step": update, "reward": draw.random(), **metrics}))
            log.write("\n")
            for prompt in range(16):
                asked = f"{update * 16 + prompt}: {draw.choice(texts)}?"
                for _ in range(group):
                    text = f"<reasoning>{draw.choice(texts)} {draw.random()}</reasoning><answer>7</answer>"
                    record = {
                        "batch_step": update, "update": update, "prompt": asked, "completion": text,
                        "answer": "7", "reward": draw.random(), "advantage": draw.gauss(0, 1),
                        "rewards": {"correct": draw.random(), "format": 0.5}, "tokens": draw.randrange(99),
                        "finished": True,
                    }  # fmt: skip
                    completions.write(json_line(record) + "\n")
    return folder


def opening(page: Path) -> tuple[float, float] | None:
    """Seconds to the first paint, and to the list of completions of a page opened there; None: no browser."""
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        return None
    with sync_playwright() as found:
        browser = found.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]")
        paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000")
        tab.goto("about:blank")
        started = time.perf_counter()
        tab.goto(f"{page.as_uri()}#completions")
        tab.wait_for_selector(".card", timeout=60_000)
        seconds = time.perf_counter() - started
        browser.close()
    return paint, seconds


def page_figures(title: str, folder: Path, *, quick: bool) -> list[Figure]:
    """Writing and opening the page of a made-up run; targets only where it has its full size."""
    updates, group = SIZES[title]
    updates = max(updates // 50, 1) if quick else updates
    say(f"{title}: {updates * 16 * group:,} completions")
    made_run(folder, updates, group)
    started, spent = time.perf_counter(), time.process_time()
    written = write_report([folder], folder / "report.html", most_bytes=1 << 40)
    spent = time.process_time() - spent
    figures = [
        Figure(
            name=f"{title}: written",
            value=time.perf_counter() - started,
            unit="s",
            at_most=3.0,
            note=f"{updates:,} updates, {written.completions:,} completions",
        ),
        Figure(name=f"{title}: written, CPU time", value=spent, unit="s"),
        Figure(name=f"{title}: size", value=written.size / 1e6, unit="MB", at_most=15.0),
    ]
    if times := opening(written.path):
        figures += [
            Figure(name=f"{title}: first paint", value=times[0], unit="s", at_most=2.0),
            Figure(name=f"{title}: completions open", value=times[1], unit="s", at_most=3.0),
        ]
    else:
        say(f"{title}: without playwright and Chromium the page is not opened, and these figures are missing")
    if title == "largest":  # targets are of 1,000 updates; of 200,000 completions one alone
        figures = [f if f.name.endswith("open") else attrs.evolve(f, at_most=None) for f in figures]
    return [attrs.evolve(f, at_most=None) for f in figures] if quick else figures


@attrs.frozen
class Spent:
    """What one quickstart took."""

    seconds: float  # from command to end
    cpu: float  # CPU seconds of its process
    watch_cpu: float = 0.0  # and of the live page's
    looks: int = 0  # how often the open page fetched what was new
    report: float = 0.0  # seconds from the run's end to its report; 0: there is none


class OpenPage:
    """A live page that is open: every second it asks for what is new, as a browser does."""

    def __init__(self, url: str) -> None:
        """`url` is what `grpo watch` prints."""
        self.looks = 0
        self._place, self._seen = urlsplit(url), ""
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when the server has ended."""
        self._thread.join(20)

    def _follow(self) -> None:
        with suppress(OSError, http.client.HTTPException):  # the server ends with the run
            while True:
                self._look()
                time.sleep(1)

    def _look(self) -> None:
        if found := self._body(f"/data?{quote(self._seen)}"):
            self._seen = json.loads(zlib.decompress(found))["seen"]
            self.looks += 1

    def _body(self, path: str) -> bytes:
        line = http.client.HTTPConnection(self._place.hostname or "", self._place.port, timeout=60)
        line.request("GET", path)
        body = line.getresponse().read()
        line.close()
        return body


def run_quickstart(folder: Path, *, watch: bool, settings: Sequence[str]) -> Spent:
    """One quickstart, `watch`: with the live page beside it, and open.

    Raises UserError where one of the two does not end well.
    """
    run = folder / "quickstart"
    shutil.rmtree(run, ignore_errors=True)
    words = [word for each in (f"run.output_dir={folder}", *settings) for word in ("--set", each)]
    started = time.perf_counter()
    with open(folder / "printed.txt", "w") as printed:
        process = subprocess.Popen([*command_line(), "quickstart", *words], stdout=printed, stderr=printed)
        live = page = None
        try:
            if watch:
                while not (run / "training_log.jsonl").is_file() and process.poll() is None:
                    time.sleep(0.05)
                script = "from runners.cli import main; main()"
                live = subprocess.Popen(
                    [sys.executable, "-c", script, "watch", str(run), "--port", "0"],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert live.stdout is not None
                said = live.stdout.readline()
                if not said.startswith("http"):
                    raise UserError(f"grpo watch said {said!r}: wanted the page's address")
                page = OpenPage(said.split()[0])
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
            if live is not None:
                live.send_signal(signal.SIGINT)
    seconds = time.perf_counter() - started
    watch_cpu = 0.0
    if live is not None and page is not None:
        page.close()
        _, ended, watch_usage = os.wait4(live.pid, 0)
        live.returncode = os.waitstatus_to_exitcode(ended)
        if live.returncode:
            raise UserError(f"grpo watch ended with code {live.returncode}")
        watch_cpu = watch_usage.ru_utime + watch_usage.ru_stime
    if process.returncode:
        raise UserError(f"grpo-run quickstart ended:\n{(folder / 'printed.txt').read_text()[-2000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    return Spent(seconds, cpu, watch_cpu, page.looks if page else 0, _report_seconds(run))


def _report_seconds(run: Path) -> float:
    """From the run's last event, its end, to the last byte of its report."""
    page = run / "report.html"
    if not page.is_file():
        return 0.0
    last = json.loads((run / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return max(page.stat().st_mtime - last["time"], 0.0)


def quickstart_figures(folder: Path, repeats: int, overrides: Sequence[str], *, judged: bool) -> list[Figure]:
    """The quickstart without a report, with one, and with one and an open live page: in turn."""
    ways = {"none": (False, ("log.report=false",)), "report": (False, ()), "watch": (True, ())}
    spent: dict[str, list[Spent]] = {name: [] for name in ways}
    folder.mkdir()
    for turn in range(repeats):
        names = list(ways)
        for name in names[turn % 3 :] + names[: turn % 3]:
            watch, settings = ways[name]
            say(f"quickstart: round {turn + 1} of {repeats}, {name}")
            found = run_quickstart(folder, watch=watch, settings=[*settings, *overrides])
            say(f"quickstart: {found}")
            spent[name].append(found)
    seconds = {name: Timing(tuple(each.seconds for each in found)) for name, found in spent.items()}
    cpu = {name: Timing(tuple(each.cpu for each in found)) for name, found in spent.items()}
    pages = Timing(tuple(each.report for each in (*spent["report"], *spent["watch"])))
    beside = Timing(tuple(each.watch_cpu for each in spent["watch"]))
    looks = min(each.looks for each in spent["watch"])

    def of(name: str, timing: Timing, **more: float | None) -> Figure:
        span = {"low": timing.low, "high": timing.high, "samples": len(timing.samples)}
        return Figure(name=f"quickstart: {name}", value=timing.median, unit="s", **span, **more)  # pyright: ignore

    report = seconds["report"] / seconds["none"], cpu["report"] / cpu["none"]
    watch = seconds["watch"] / seconds["report"], cpu["watch"] / cpu["report"]
    return [
        of("from command to end, no report", seconds["none"]),
        of("its CPU time, no report", cpu["none"]),
        of("its report", pages, at_most=1.0 if judged else None),
        ratio_figure("quickstart: with a report / without", report[0]),
        ratio_figure("quickstart: with a report / without, CPU time", report[1]),
        ratio_figure(
            "quickstart: with an open live page / without", watch[0], at_most=1.02 if judged else None
        ),
        ratio_figure("quickstart: with an open live page / without, CPU time of the run", watch[1]),
        of("CPU time of the live page", beside),
        Figure(name="quickstart: what the page fetched", value=looks, unit="times"),
    ]


@benchmark("run_report", parts=("chosen",))
@click.option("--case", "chosen", multiple=True, type=click.Choice(CASES), help="Only this one.")
@click.option(
    "--repeats", default=3, show_default=True, type=click.IntRange(1), help="Rounds of quickstarts."
)
@click.option("--set", "overrides", multiple=True, help="SECTION.KEY=VALUE, handed on to every quickstart.")
def main(quick: bool, chosen: Sequence[str], repeats: int, overrides: Sequence[str]) -> Sequence[Figure]:
    """The report of a run: writing it, opening it, its size; what it and a live page cost the quickstart."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="run-report-") as scratch:
        for title in chosen or CASES:
            folder = Path(scratch) / title
            if title == "quickstart":
                settings = [*(QUICK if quick else ()), *overrides]
                figures += quickstart_figures(folder, 1 if quick else repeats, settings, judged=not settings)
            else:
                figures += page_figures(title, folder, quick=quick)
    return figures


if __name__ == "__main__":
    main()
