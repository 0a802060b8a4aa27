"""The page in the system's Chromium: it draws what is there, runs nothing that a run says, and asks nobody.

Screenshots are left in pytest's temporary folder, under `shots`.
"""

import threading

import pytest

from runners.checkpoints.run_folder import locked
from runners.files.json_files import JsonLines
from runners.report.page import write_report
from runners.report.server import Server
from tests.support.runs.report_runs import HOSTILE, make_run, write_update

WAIT = 600_000  # ms: for what hangs


def opened(tab, path, part="overview"):
    """Opens a file at one of its sections."""
    tab.goto(f"{path.as_uri()}#{part}")
    tab.wait_for_selector("html[data-ready]", timeout=WAIT)
    if part in ("completions", "problems"):
        tab.wait_for_selector(f"#{part}[data-ready]", timeout=WAIT)


def quiet(tab):
    """Whether the page had no errors and made no requests except for itself."""
    outside = [each for each in tab.asked if not each.startswith(("file:", "data:"))]
    return tab.problems == [] and outside == []


playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'", exc_type=ImportError
)


def test_a_finished_run_is_drawn(tab, tmp_path):
    """Tiles, charts with descriptions, and events appear; nothing is requested from the network."""
    opened(tab, write_report([make_run(tmp_path / "run")], tmp_path / "page.html").path)
    assert tab.inner_text("#state") == "finished"
    assert "60.0 %" in tab.inner_text("#tiles")
    words = tab.get_attribute('[data-chart="reward"]', "aria-label")
    assert "from 0.1 to 0.6" in words
    assert tab.locator('[data-chart="em"] canvas').count() == 1
    assert quiet(tab)


def test_hostile_texts_neither_run_nor_break_the_page(tab, tmp_path):
    """Tags are shown as text, control characters are escaped, and a long text is shown in part."""
    folder = make_run(tmp_path / "run", texts=HOSTILE, group=8, name=HOSTILE[1])
    opened(tab, write_report([folder], tmp_path / "page.html").path, "completions")
    tab.wait_for_selector(".card", timeout=WAIT)
    shown = tab.inner_text(".cards")
    assert "<script>window.ran = true</script>" in shown and "␛[31mred" in shown
    assert "⟨U+202E⟩" in shown and "⟨U+D83D⟩" in shown and "Show all 1,000,000 characters" in shown
    assert tab.evaluate("window.ran") is None and tab.locator("main img, main script").count() == 0
    assert quiet(tab)


def test_completions_are_filtered_and_searched(tab, tmp_path):
    """Filters are a reward's value, the length limit, a format and a text; groups are shown together."""
    opened(tab, write_report([make_run(tmp_path / "run")], tmp_path / "page.html").path, "completions")
    status = tab.locator("#completions [role=status]")
    assert status.inner_text() == "48 of 48 completions in 12 groups"
    tab.wait_for_selector(".card", timeout=WAIT)
    assert tab.locator(".card").count() == 4
    assert tab.locator(".card .reward").all_inner_texts() == ["1", "1", "0", "0"]
    tab.click("#filter-cut")
    assert status.inner_text() == "6 of 48 completions in 6 groups"
    tab.click("#filter-cut")
    tab.select_option("#filter-key", "rewards/correct")
    tab.get_by_label("any", exact=True).fill("1")
    assert status.inner_text() == "24 of 48 completions in 12 groups"
    tab.get_by_label("any", exact=True).fill("")
    tab.fill("#query", "1 + 4?")
    playwright.expect(status).to_have_text("4 of 48 completions in 1 groups", timeout=WAIT)
    assert quiet(tab)


def test_a_conversation_is_shown_as_turns(tab, tmp_path, talks):
    """A real run with an environment shows messages with their calls."""
    opened(tab, write_report([talks], tmp_path / "page.html").path, "completions")
    tab.wait_for_selector(".card .turn", timeout=WAIT)
    card = tab.locator(".card", has=tab.locator(".turn.observed")).first
    sampled, given = card.locator(".turn.sampled"), card.locator(".turn.observed")
    assert 'check({"text":"<b>again</b>"})' in sampled.first.inner_text()
    assert given.first.locator(".text").inner_text() == "seen: <b>again</b>"
    assert "tool check" in given.first.inner_text().lower() and tab.locator("main b b").count() == 0
    assert quiet(tab)


def test_held_out_problems_that_became_right(tab, tmp_path):
    """The filter shows problems that changed from wrong to right between two evaluations."""
    opened(tab, write_report([make_run(tmp_path / "run")], tmp_path / "page.html").path, "problems")
    tab.select_option("#filter-change", "gained")
    assert "2 of 4 problems" in tab.inner_text("#problems")
    first, last = tab.locator("#problems .card").all_inner_texts()
    assert first.startswith("update 0") and "reward 0" in first and "extracted answer: read True" in last
    assert quiet(tab)


def test_without_gold_answers_a_run_is_judged_by_its_rewards(tab, tmp_path):
    """Tile, chart and held-out prompts show rewards; nothing is called wrong."""
    path = write_report([make_run(tmp_path / "run", gold=False)], tmp_path / "page.html").path
    opened(tab, path)
    assert tab.locator("#tiles .tile").first.inner_text().split("\n")[:3] == [
        "Held-out reward",
        "0.6",
        "from 0",
    ]
    assert "from 0 to 0.6" in tab.get_attribute('[data-chart="held"]', "aria-label")
    assert tab.locator('[data-chart="em"]').count() == 0
    opened(tab, path, "problems")
    tab.select_option("#filter-change", "gained")
    shown = tab.inner_text("#problems")
    assert "2 of 4 problems" in shown and "reward rose" in shown and "wrong" not in shown
    assert quiet(tab)


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_the_live_page_follows_within_two_seconds(tab, tmp_path, end):
    """It shows a new update, the end of the run, and that the server no longer answers."""
    folder = make_run(tmp_path / "run", end=None)
    with locked(folder, "run.name"), Server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab.goto(server.url)
        tab.wait_for_selector("html[data-updates='6']", timeout=WAIT)
        assert tab.inner_text("#state") == "running" and tab.inner_text("#live") == "live"
        names = ("training_log", "completions", "evaluations", "events")
        logs = {name: JsonLines(folder / f"{name}.jsonl", keep=1 << 40) for name in names}
        write_update(logs, 7)
        tab.wait_for_selector("html[data-updates='7']", timeout=WAIT)
        if end == "finished":
            logs["events"].write({"event": "end", "time": 1e9, "update": 7, "state": "finished"})
            playwright.expect(tab.locator("#state")).to_have_text("finished", timeout=WAIT)
            assert not tab.is_visible("#live")
        for file in logs.values():
            file.close()
        server.shutdown()
    if end == "killed":
        playwright.expect(tab.locator("#live")).to_contain_text("does not answer", timeout=WAIT)
        assert tab.inner_text("#state") == "running when last seen"
    assert [asked for asked in tab.asked if not asked.startswith(server.url)] == []
