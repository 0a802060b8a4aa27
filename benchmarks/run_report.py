"""The report of a run: writing it, its size, opening it in Chromium, and what it adds to the quickstart."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.command import benchmark, say
from benchmarks.harness.record import Figure
from runners.files.json_lines import json_line
from runners.report import write_report

WORDS = ("apples", "and", "pears", "is", "then", "left", "minus", "each", "day", "how", "many", "are")


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


@benchmark("run_report")
def main(quick: bool) -> Sequence[Figure]:
    """Pages of 1,000 updates × 128 completions, and of 200,000 completions."""
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, updates, group in (("128,000", 1000, 8), ("200,000", 500, 25)):
            updates = max(updates // 50, 1) if quick else updates
            say(f"run_report: {updates * 16 * group:,} completions")
            folder = made_run(Path(scratch) / name.replace(",", ""), updates, group)
            started = time.perf_counter()
            written = write_report([folder], folder / "report.html", most_bytes=1 << 40)
            seconds = time.perf_counter() - started
            is_first = name == "128,000"
            figures += [
                Figure(name=f"{name}: written", value=seconds, unit="s", at_most=3.0 if is_first else None),
                Figure(
                    name=f"{name}: size",
                    value=written.size / 1e6,
                    unit="MB",
                    at_most=15.0 if is_first else None,
                ),
            ]
            if times := opening(written.path):
                figures += [
                    Figure(name=f"{name}: first paint", value=times[0], unit="s", at_most=2.0),
                    Figure(name=f"{name}: completions open", value=times[1], unit="s", at_most=3.0),
                ]
    return figures


if __name__ == "__main__":
    main()
