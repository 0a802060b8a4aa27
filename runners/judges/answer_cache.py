"""Judges' answers, cached between runs by the content of the question: judges.sqlite in the user's cache."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs

from runners.files.cache_folder import cache_folder

MOST_JUDGE_ANSWERS = 200_000  # the oldest go first
_PATIENCE = 5.0  # seconds that another process may hold the file


def question_digest(url: str, body: Mapping[str, Any]) -> str:
    """The key of a request's answer: a digest of its address and its content, without any secret."""
    content = json.dumps([url, body], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()


@attrs.define
class AnswerCache:
    """The cache file. Its faults end no run: `notices` reports them, and nothing more is saved."""

    file: Path = attrs.field(factory=lambda: cache_folder() / "judges.sqlite")
    most: int = MOST_JUDGE_ANSWERS
    notices: list[str] = attrs.field(factory=list)
    usable: bool = True

    def find(self, digests: Iterable[str]) -> dict[str, str]:
        """The cached answers for these digests."""
        found: dict[str, str] = {}

        def query(connection: sqlite3.Connection) -> None:
            for digest in digests:
                found.update(
                    connection.execute("SELECT digest, text FROM answers WHERE digest = ?", (digest,))
                )

        self._use(query)
        return found

    def keep(self, answers: Mapping[str, str]) -> None:
        """Adds answers."""

        def insert(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT OR REPLACE INTO answers (digest, text) VALUES (?, ?)", answers.items()
            )
            connection.execute(
                "DELETE FROM answers WHERE place <= (SELECT MAX(place) FROM answers) - ?", (self.most,)
            )

        if answers:
            self._use(insert)

    def _use(self, act: Callable[[sqlite3.Connection], None]) -> None:
        """Calls `act` with this thread's own connection, in a transaction."""
        if not self.usable:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.file, timeout=_PATIENCE)) as connection, connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers "
                    "(place INTEGER PRIMARY KEY AUTOINCREMENT, digest TEXT UNIQUE, text TEXT)"
                )
                act(connection)
        except (sqlite3.Error, OSError) as error:
            self.usable = False
            self.notices.append(f"{self.file}: judges' answers are not saved ({error})")
