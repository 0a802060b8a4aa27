"""The walk through docs/nanochat.md, command by command, on a small random checkpoint."""

import json
import shlex

import pytest
from click.testing import CliRunner

from runners import cli
from tests.support.files.nanochat_checkpoints import SIZES, make_tensors, write_checkpoint
from tests.support.pages import ROOT, snippets

pytest.importorskip("torch", reason="of the extra `torch`")

PAGE = ROOT / "docs/nanochat.md"
SMALL = {
    "data.source": "embedded",
    "data.split": "train",
    "data.eval_split": "valid",
    "rollout.num_generations": "2",
    "rollout.max_new_tokens": "4",
    "rollout.max_batch": "8",
    "rollout.launch": "eval",
    "rollout.check_every": "8",
    "rollout.group_size": "32",
    "optim.batch_size": "2",
    "optim.max_steps": "2",
    "eval.samples": "2",
}
EXTRA = {
    **{key: [f"--set={key}={value}" for key, value in SMALL.items()] for key in ("check", "plan", "run")},
    "generate": ["--max-tokens", "4"],
    "chat": ["--max-tokens", "4"],
    "eval": ["--samples", "2"],
    "convert": [],
}


def test_the_walk(tmp_path, monkeypatch):
    """Each command ends well, with what the page says it shows; only sizes and data are other ones."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sizes = SIZES | {"sequence_len": 1024}
    folder = tmp_path / ".cache/nanochat/chatsft_checkpoints/d20"
    write_checkpoint(folder, make_tensors(sizes=sizes), sizes=sizes)
    pages = list(snippets(PAGE))
    (config,) = [s for s in pages if s.comments.get("file") == "nanochat.toml"]
    (tmp_path / "nanochat.toml").write_text(config.text)
    lines = [line for s in pages if "walk" in s.comments for line in s.text.splitlines()]
    shown = {}
    for line in lines:
        program, *arguments = shlex.split(line.replace("grpo-run", "grpo run"))
        assert program == "grpo", line
        arguments += EXTRA[arguments[0]]
        result = CliRunner().invoke(cli.main, arguments, input="What is 7 plus 5?\n")
        assert result.exit_code == 0, (line, result.stderr, result.exception)
        shown.setdefault(arguments[0], []).append(result.stdout)
    assert list(shown) == ["convert", "generate", "check", "plan", "run", "eval", "chat"]
    assert "<|user_start|>" in shown["check"][0] and "<|assistant_start|><reasoning>" in shown["check"][0]
    assert "exact match" in shown["eval"][0] and "pass@8" in shown["eval"][0]
    assert shown["generate"][1].startswith("<reasoning>") and shown["chat"][0].startswith("<reasoning>")
    final = tmp_path / "outputs/nanochat-gsm8k/final"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {file.name for file in final.iterdir()}
    assert json.loads((tmp_path / "nanochat-d20-4bit/config.json").read_text())["quantization"]["bits"] == 4
