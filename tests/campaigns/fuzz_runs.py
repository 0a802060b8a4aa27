"""More of the campaign of `fuzz.py`: a foreign run's folder, through the commands that read one."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from runners.errors import UserError
from tests.campaigns.fuzz_inputs import EVIL, Target, changed_json, dumped, mutated, near_keys

_COMMANDS: dict[str, list[str]] = {
    "generate": ["hi", "--max-tokens", "1"],
    "chat": ["--max-tokens", "1"],
    "eval": ["--data", "embedded", "--samples", "1", "--max-tokens", "1"],
    "export": ["--out", "exported", "--force"],
    "report": [],
    "runs": [],
}


# The keys of a config that name code.
_CODE = (
    ("env", "tools"),
    ("env", "factory"),
    ("reward", "functions"),
    ("model", "loader"),
    ("data", "transform"),
)


def _named(parts: tuple[str, str, str, bool]) -> dict[str, Any]:
    """A config in which a key that is nearly right names code, alone or in a list."""
    section, key, file, alone = parts
    return {section: {key: file if alone else [file]}}


class Runs(Target):
    """A foreign run's folder, through every command that reads one: code in it never runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from runners.config.loading import load_config
        from tests.support.runs.report_runs import make_run
        from tests.support.tiny_models import make_model_folder

        self.run = make_run(folder / "runs" / "one")
        make_model_folder(self.run / "final", layers=1)
        self.config = load_config("quickstart_tools").check().to_dict()
        self.config["env"] |= {"factory": f"{self.run}/{EVIL}:tool", "tools": [f"{self.run}/{EVIL}"]}
        (self.run / "config.resolved.json").write_bytes(dumped(self.config))
        (self.run / EVIL).write_text(
            f"open({str(folder / 'ran')!r}, 'w')\ndef tool(x: int) -> int:\n    return x\n"
        )
        self.kept = {path.name: path.read_bytes() for path in self.run.iterdir() if path.is_file()}

    def inputs(self) -> st.SearchStrategy[Any]:
        plain = self.config | {"env": self.config["env"] | {"factory": "calculator", "tools": []}}
        few = {name: plain[name] for name in ("env", "model", "reward")}
        log, events = (self.kept[name] for name in ("training_log.jsonl", "events.jsonl"))
        rows = [json.loads(text.splitlines()[-1]) for text in (log, events)]
        code = st.sampled_from(_CODE).flatmap(
            lambda place: st.tuples(
                st.just(place[0]) | near_keys(place[0]),
                near_keys(place[1]),
                st.sampled_from([f"{self.run}/{EVIL}", f"{self.run}/{EVIL}:tool"]),
                st.booleans(),
            )
        )
        files = st.one_of(
            st.tuples(st.just("config.resolved.json"), code.map(_named).map(dumped)),
            st.tuples(st.just("config.resolved.json"), (changed_json(plain) | changed_json(few)).map(dumped)),
            st.tuples(st.just("config.resolved.json"), changed_json(self.config).map(dumped)),
            st.tuples(st.just("config.resolved.json"), mutated([dumped(plain)])),
            st.tuples(st.just("training_log.jsonl"), changed_json(rows[0]).map(dumped) | mutated([log])),
            st.tuples(st.just("events.jsonl"), changed_json(rows[1]).map(dumped) | mutated([events])),
        )
        return st.tuples(st.sampled_from(sorted(_COMMANDS)), files)

    def feed(self, value: tuple[str, tuple[str, bytes]]) -> None:
        from click.testing import CliRunner

        from runners.cli import main

        command, (name, content) = value
        (self.run / name).write_bytes(content + b"\n")
        try:
            with contextlib.chdir(self.folder):
                place = "runs" if command == "runs" else str(self.run)
                result = CliRunner().invoke(main, [command, place, *_COMMANDS[command]], input="hi\n")
        finally:
            (self.run / name).write_bytes(self.kept[name])
        assert not (self.folder / "ran").exists(), "code of the folder has run"
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code:
            assert result.exit_code == 2
            raise UserError(result.stderr)

    def warm(self) -> None:
        for command in _COMMANDS:
            with contextlib.suppress(UserError):
                self.feed((command, ("events.jsonl", self.kept["events.jsonl"])))
