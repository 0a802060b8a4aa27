"""Judges' answers, cached between runs by the content of the question: judges.sqlite in the user's cache."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs

from runners.files.cache_folder import cache_folder

MOST_JUDGE_ANSWERS = 200_000  # the oldest go first
_COLUMNS = "place INTEGER PRIMARY KEY AUTOINCREMENT, digest TEXT UNIQUE, text TEXT"


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
        query = "SELECT digest, text FROM answers WHERE digest = ?"
        return dict(self._run(query, [(digest,) for digest in digests]))

    def keep(self, answers: Mapping[str, str]) -> None:
        """Adds answers."""
        if answers:
            self._run("INSERT OR REPLACE INTO answers (digest, text) VALUES (?, ?)", [*answers.items()])
            oldest = "DELETE FROM answers WHERE place <= (SELECT MAX(place) FROM answers) - ?"
            self._run(oldest, [(self.most,)])

    def _run(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The results of a statement for each row, by this thread's own connection, in a transaction."""
        if self.usable:
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with closing(sqlite3.connect(self.file)) as connection, connection:
                    connection.execute(f"CREATE TABLE IF NOT EXISTS answers ({_COLUMNS})")
                    return [found for row in rows for found in connection.execute(statement, row)]
            except (sqlite3.Error, OSError) as error:
                self.usable = False
                self.notices.append(f"{self.file}: judges' answers are not saved ({error})")
        return []
