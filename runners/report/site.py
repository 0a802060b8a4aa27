"""The answers of the live page's server, from the files of runs.

They are for requests alone whose Host and Origin are the server's own, so that no other web page can read a
run through the browser.
"""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from runners.errors import UserError, one_line
from runners.report.live_run import LiveRun
from runners.report.page import page, small_page
from runners.report.run_record import entries, is_run_folder

LOCAL = ("127.0.0.1", "localhost", "::1")
_PATH = re.compile(
    r"/run/(?P<run>[^/]+)/"
    r"(?P<what>|data|(?P<kind>part|evaluation)/\d{1,9}-(?P<number>\d{1,9})-\d{1,9}(?:/(?P<piece>\w+))?)"
)
Answer = tuple[int, str, bytes]  # status, content type or (303) place, content


class Site:
    """The answers to requests: pages of the run in `place`, or of the runs in it."""

    def __init__(self, place: Path, hosts: Sequence[str] = LOCAL) -> None:
        """`hosts`: the names under which it is asked."""
        self._place, self._hosts = place, {host.lower() for host in hosts}
        self._known: dict[Path, LiveRun] = {}
        self._guard = threading.Lock()

    def answer(self, target: str, host: str, origin: str | None = None) -> Answer:
        """The answer to a request for `target`, with these headers."""
        if _address(f"//{host}")[0] not in self._hosts:
            return _text(
                403, f"Host: {host[:100]} is not served here; `grpo watch --allow-host NAME` adds a name"
            )
        if origin is not None and _address(origin)[1] != host.lower():
            return _text(403, "requests of other pages are refused")
        path, _, query = target.partition("?")
        try:
            found = runs_in(self._place)
            if path == "/":
                return self._index(found)
            asked = _PATH.fullmatch(path)
            folder = found.get(unquote(asked["run"])) if asked else None
            if asked is None or folder is None:
                return _text(404, "there is nothing here")
            return self._run(self._live(folder), asked, parse_qs(query))
        except UserError as error:
            return _text(503, one_line(str(error), {}))

    def _live(self, folder: Path) -> LiveRun:
        with self._guard:
            return self._known.setdefault(folder, LiveRun(folder))

    def _index(self, found: dict[str, Path]) -> Answer:
        if list(found.values()) == [self._place]:
            return 303, f"run/{quote(next(iter(found)), safe='')}/", b""
        runs = {name: self._live(folder) for name, folder in found.items()}
        return _html(list_page(self._place, runs))

    def _run(self, run: LiveRun, asked: re.Match[str], query: dict[str, list[str]]) -> Answer:
        def given(name: str) -> str:
            return query.get(name, [""])[0]

        if not asked["what"]:
            up = {} if is_run_folder(self._place) else {"list": "../../"}
            return _html(page(run.summary()[0], [], {"mode": "live", "at": "data"} | up))
        if asked["kind"] == "part":
            content = run.part(int(asked["number"]), asked["piece"] or "")
        elif asked["kind"]:
            content = run.evaluation(int(asked["number"]))
        elif given("seen") and given("seen") == run.signature():
            return 204, "", b""
        else:
            content = run.data(_whole(given("generation")), max(_whole(given("since")), 0))
        if content is None:
            return _text(404, "there is nothing here")
        return 200, "application/octet-stream", content


def runs_in(place: Path) -> dict[str, Path]:
    """The runs that are served, by name: the one in `place`, or those in its folders.

    Bytes of a folder's name that are not UTF-8 are spelt out.
    """
    inside = [place] if is_run_folder(place) else filter(is_run_folder, entries(place))
    return {path.name.encode("utf-8", "backslashreplace").decode("utf-8") or "run": path for path in inside}


def list_page(place: Path, found: dict[str, LiveRun]) -> str:
    """The page with the runs of a folder; it reloads itself, because it has no script."""
    rows = []
    for name, run in found.items():
        rows.append(f'<tr><td><a href="run/{quote(name, safe="")}/">{html.escape(name)}</a></td>')
        try:
            _, state, (em, reward, update, measured) = run.summary()
        except UserError as error:
            rows.append(f"<td colspan='4'>{html.escape(one_line(str(error), {}))}</td></tr>")
        else:
            score, mean = (("–" if each is None else f"{each:.4g}") for each in (measured, reward))
            score = score if em is None else f"{em:.1%}"  # without gold answers the rewards' mean is it
            rows.append(f"<td>{state}</td><td>{score}</td><td>{mean}</td><td>{update or 0:g}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in ("run", "state", "evaluation", "reward", "updates"))
    empty = "<p class='empty'>No run has begun here yet. This page looks again.</p>"
    table = (
        f"<table class='facts compare'><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
    return small_page(f"Runs in {place.name or place}", table if rows else empty, again=5 if rows else 1)


def _address(url: str) -> tuple[str, str]:
    """A URL's host name, and it with its port; both empty if it is none."""
    try:
        found = urlsplit(url)
        return (found.hostname or "").lower(), found.netloc.lower()
    except ValueError:
        return "", ""


def _html(text: str) -> Answer:
    return 200, "text/html; charset=utf-8", text.encode("utf-8", "backslashreplace")


def _text(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode("utf-8", "backslashreplace")


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
