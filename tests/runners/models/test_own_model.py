"""The documented `model.loader` is trained, saved, opened and used; faulty loaders end with one line."""

import json

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx.utils import tree_flatten

from runners import cli
from runners.config.loading import load_config
from runners.config.sections import ModelConfig
from runners.config.user_functions import resolve_function
from runners.errors import UserError
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.models.loaded_model import load_model
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.pages import ROOT, snippets
from tests.support.tiny_models import make_tokenizer, write_tokenizer
from tests.support.tiny_runs import BY_LETTERS, LETTERS, small, updates_of

CPU = Platform(backend="cpu")
TOKENS = mx.array([[5, 9, 70, 31, 12]])
SIZES = {"width": 32, "heads": 2, "blocks": 2, "vocab_size": 320}
CONFIG = small(
    run={"name": "own"},
    model={"path": "wide", "loader": "parallel.py:load"},
    reward=BY_LETTERS,
    optim={"learning_rate": 5e-3},
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder with parallel.py from docs/own-model.md, a random model, and a config."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "own-model.md"
    (text,) = [s.text for s in snippets(page) if s.comments.get("file") == "parallel.py"]
    (tmp_path / "parallel.py").write_text(text)
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "train.toml").write_text(CONFIG)
    model = tmp_path / "wide"
    model.mkdir()
    mx.random.seed(0)
    module = _model(tmp_path, SIZES)
    weights = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(model / "model.safetensors"), weights, metadata={"format": "mlx"})
    (model / "config.json").write_text(json.dumps({**SIZES, "eos_token_id": 2}))
    write_tokenizer(model, make_tokenizer())
    return tmp_path


def _model(folder, sizes):
    """The example's module with random weights."""
    load = resolve_function(str(folder / "parallel.py:load"), key="test")
    return load.__globals__["Model"](sizes)


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_the_documented_architecture_is_trained_and_opened_again(folder, tune):
    """Two updates change it, learner and sampler agree, and the same loader opens the trained final/."""
    config = load_config("train.toml", [f"model.tune={tune}"])
    result = run_training(config, report=Quiet())
    updates = updates_of(result.folder)
    assert len(updates) == 2 and all(line["grad_norm"] > 0 for line in updates)
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-3 for line in updates)
    loaded = load_model(config.model, CPU, folders=[folder])
    before = loaded.module(TOKENS)
    loaded.module.update(result.state.params)
    want = loaded.module(TOKENS)
    final = load_inference(str(result.folder / "final"), CPU, loader="parallel.py:load")
    assert mx.allclose(final.module(TOKENS), want, rtol=0, atol=1e-4)
    assert not mx.allclose(before, want, rtol=0, atol=1e-4)


def test_generate_and_eval_use_the_loader(folder):
    """grpo generate and eval open it with --loader; without it, they end with one line."""

    def grpo(*arguments):
        return CliRunner().invoke(cli.main, arguments)

    done = grpo("generate", "wide", "hi", "--loader", "parallel.py:load", "--max-tokens", "3")
    assert done.exit_code == 0, done.output
    done = grpo("eval", "wide", "--config", "train.toml", "--max-tokens", "3")
    assert done.exit_code == 0 and "reward/letters" in done.output, done.output
    for missing in (("generate", "wide", "hi"), ("check", "train.toml", "--set", "model.loader=")):
        done = grpo(*missing)
        assert done.exit_code == 2 and "model_type: expected a text" in done.stderr, done.output
    assert grpo("check", "train.toml").exit_code == 0
    done = grpo("plan", "train.toml")  # its config.json does not have Hugging Face's names
    assert done.exit_code == 2 and "cannot be predicted" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def load(folder):\n    pass", r"own.py:load.*: expected load\(folder, c"),
        ("def load(folder, config):\n    return {}", "load: expected an mlx.nn.Module with .*, found dict"),
        (
            "import mlx.nn as nn\ndef load(folder, config):\n    return nn.Linear(2, 2)",
            "expected an mlx.nn.Module with blocks as `layers`, found Linear",
        ),
        ("def load(folder, config):\n    return config['depth']", "load failed: line 2: KeyError: 'depth'"),
    ],
)
def test_a_faulty_loader_is_refused_in_one_line(folder, text, message):
    """The line names the loader, what it returned or raised, and what is expected."""
    (folder / "own.py").write_text(text + "\n")
    with pytest.raises(UserError, match=message) as caught:
        load_model(ModelConfig(path="wide", loader="own.py:load"), CPU)
    assert "\n" not in str(caught.value)
