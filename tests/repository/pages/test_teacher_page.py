"""The commands of docs/teacher.md run, shortened, and do what the page says."""

import json
import shlex
from pathlib import Path

from click.testing import CliRunner

from runners.cli import main
from tests.support.pages import ROOT, snippets

PAGE = ROOT / "docs" / "teacher.md"
FEW = ["--set", "optim.max_steps=8", "--set", "eval.samples=2", "--set", "eval.at_start=false"]


def test_the_student_of_the_page_approaches_its_teacher(tmp_path, monkeypatch):
    """The config and the three commands; the KL falls in the first updates already."""
    monkeypatch.chdir(tmp_path)
    toml, commands, *_ = snippets(PAGE)
    Path(toml.comments["file"]).write_text(toml.text)
    for line in commands.text.strip().splitlines():
        program, *arguments = shlex.split(line)
        assert program == "grpo"
        found = CliRunner().invoke(main, arguments + (FEW if arguments[0] == "run" else []))
        assert found.exit_code == 0, found.output
    lines = Path("outputs/distilled/training_log.jsonl").read_text().splitlines()
    kl = [line["teacher/kl"] for line in map(json.loads, lines) if "loss" in line]
    assert len(kl) == 8 and sum(kl[-3:]) < sum(kl[:3])
