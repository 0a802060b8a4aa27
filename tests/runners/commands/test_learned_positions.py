"""Models with learned positions: what could need more of them ends with a line before it begins."""

import json

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx.utils import tree_flatten
from mlx_lm.models import gpt2

from runners import cli
from tests.support.tiny_models import make_tokenizer, write_tokenizer
from tests.support.tiny_runs import small

CONFIG = {
    "model_type": "gpt2", "n_ctx": 64, "n_positions": 64, "n_embd": 32, "n_head": 2, "n_layer": 1,
    "layer_norm_epsilon": 1e-5, "vocab_size": 320, "eos_token_id": 2,
}  # fmt: skip
TRAIN = small(
    model={"path": "model"},
    data={"source": "rows.jsonl", "eval_split": "test"},
    rollout={"max_new_tokens": 64},
    eval={"max_new_tokens": 20},
    reward={"functions": ["int_reward_func"]},
)


@pytest.fixture
def grpo(tmp_path, monkeypatch):
    """Runs a command beside a GPT-2 with 64 positions; the last line of its output, and the exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model", make_tokenizer())
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    weights = tree_flatten(gpt2.Model(gpt2.ModelArgs.from_dict(CONFIG)).parameters())
    mx.save_safetensors("model/model.safetensors", dict(weights))
    rows = [json.dumps({"question": f"{n} + {n}?", "answer": 2 * n}) + "\n" for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "train.toml").write_text(TRAIN)

    def command(*arguments):
        done = CliRunner().invoke(cli.main, arguments, input="7 + 7?\n")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stderr.strip().splitlines()[-1]

    return command


@pytest.mark.parametrize(
    "arguments",
    [
        *(("run", "train.toml"), ("generate", "model", "7 + 7?"), ("chat", "model")),
        ("eval", "model", "--config", "train.toml", "--max-tokens", "64"),
    ],
    ids=" ".join,
)
def test_too_long_a_completion_is_refused(grpo, arguments):
    """The limit of 64 or 512 tokens, with the prompt."""
    code, line = grpo(*arguments)
    assert code == 2
    assert "expected at most 64 positions, which the model has learned, found " in line
    assert "a prompt of " in line


def test_what_fits_is_sampled(grpo):
    """Up to the last position."""
    assert grpo("generate", "model", "7 + 7?", "--max-tokens", "20")[0] == 0
    assert grpo("eval", "model", "--config", "train.toml")[0] == 0


def test_gold_completions_of_a_file_are_checked_too(grpo, tmp_path):
    """Their prompts are others than the run's."""
    line = {"prompt": "7 + 7? " * 40, "completion": "14", "reward": 1.0}
    (tmp_path / "gold.jsonl").write_text(json.dumps(line) + "\n")
    settings = ("--set", "sft.completions=gold.jsonl", "--set", "rollout.max_new_tokens=8")
    code, line = grpo("sft", "train.toml", *settings)
    assert code == 2 and "at most 64 positions" in line
    assert "gold completions of the train data with their prompts, " in line
