"""`python -m benchmarks.picture PAGE OUT.png`: a picture of a report. Needs the extra `browser`."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.errors import UserError
from runners.machine.terminal import echo

PARTS = ("overview", "completions", "problems", "config")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@click.command(context_settings=HELP)
@click.argument("page", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--part", type=click.Choice(["overview", "completions", "problems", "config"]), default="overview"
)
@click.option("--dark", is_flag=True, help="In dark colours.")
@click.option("--width", type=click.IntRange(200), default=1280)
@click.option("--height", type=click.IntRange(200), default=800)
@ends_with_a_line
def main(page: Path, out: Path, part: str, dark: bool, width: int, height: int) -> None:
    """Take a picture of one part of a report in the system's Chromium."""
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("a picture needs playwright: `pip install playwright`") from error
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise UserError(f"a picture needs a browser: none of {', '.join(BROWSERS)} was found")
    with sync_playwright() as found:
        browser = found.chromium.launch(executable_path=program, args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        tab = context.new_page()
        tab.goto(f"{page.resolve().as_uri()}#{part}")
        tab.wait_for_selector("html[data-ready]")
        if part in ("completions", "problems"):
            tab.wait_for_selector(f"#{part}[data-ready]")
        tab.wait_for_timeout(500)
        tab.screenshot(path=out)
        browser.close()
    echo(f"{out}: {width} × {height}")


if __name__ == "__main__":
    main()
