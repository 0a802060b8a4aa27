"""The system's Chromium (tests are skipped without it), and a run with conversations."""

import shutil

import pytest

from tests.support.runs.talking_runs import talking_run

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")  # while it lives, no other event loop can run
def browser():
    """Chromium without a window."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'", exc_type=ImportError
    )
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as found:
        started = found.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def talks(tmp_path_factory):
    """The folder of a run with an environment."""
    with pytest.MonkeyPatch.context() as patch:
        return talking_run(tmp_path_factory.mktemp("talks"), patch)


@pytest.fixture
def tab(browser, tmp_path):
    """A page that records its errors in `problems` and its requests in `asked`, with a last screenshot."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = context.new_page()
    found.problems, found.asked = [], []
    found.on("pageerror", lambda error: found.problems.append(str(error)))
    found.on("console", lambda said: found.problems.append(said.text) if said.type == "error" else None)
    found.on("request", lambda request: found.asked.append(request.url))
    yield found
    (tmp_path / "shots").mkdir()
    found.screenshot(path=tmp_path / "shots" / "last.png")
    context.close()
