"""Every supported architecture is loaded, trained for two updates, saved, and used to generate."""

import json

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as mlx_lm_load

from runners.config.sections import ModelConfig
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.models.loaded_model import load_model
from runners.tokenization.text import TextDecoder
from tests.support.commands import grpo
from tests.support.tiktoken_files import make_nanochat_folder
from tests.support.tiny_models import ARCHITECTURES, make_model_folder
from tests.support.tiny_runs import BY_LETTERS, LETTERS, small, updates_of

CPU = Platform(backend="cpu")
TOKENS = mx.array([[5, 9, 70, 31, 12, 40, 41, 42, 43, 44, 45, 46]])  # longer than gemma3's window here
CONFIG = small(
    run={"name": "two", "output_dir": "."},
    model={"path": "model"},
    rollout={"max_new_tokens": 8},
    reward=BY_LETTERS,
)


@pytest.fixture(params=[*ARCHITECTURES, "nanochat"])
def folder(request, tmp_path, monkeypatch):
    """The current folder, with a model of two blocks, a config and a reward."""
    monkeypatch.chdir(tmp_path)
    make = make_nanochat_folder if request.param == "nanochat" else make_model_folder
    make(tmp_path / "model", **({} if request.param == "nanochat" else {"arch": request.param}))
    (tmp_path / "train.toml").write_text(CONFIG)
    (tmp_path / "letters.py").write_text(LETTERS)
    return tmp_path


def greedy(module, prompt, count, ends):
    """The greedy continuation, computed by whole forward passes until an end token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(module(mx.array([tokens]))[0, -1].argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


def test_an_architecture_from_end_to_end(folder):
    """Learner and sampler agree on log-probs, training changes the model, and mlx-lm opens final/. Greedy
    generation equals the greedy tokens of mlx-lm's forward pass."""
    start = load_model(ModelConfig(path="model"), CPU).module(TOKENS)
    result = grpo("run", "train.toml")
    updates = updates_of(folder / "two")
    assert len(updates) == 2 and all(line["grad_norm"] > 0 for line in updates)
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-3 for line in updates)
    module, _ = mlx_lm_load(folder / "two" / "final")
    end = module(TOKENS)
    assert mx.isfinite(end).all() and mx.abs(end - start).max().item() > 1e-4
    loaded = load_inference("two/final", CPU)
    assert mx.allclose(loaded.module(TOKENS), end, atol=1e-4)
    prompt = "Anna has 7 pens."
    options = ("--temperature", "0", "--max-tokens", "8", "--num", "2", "--no-prompt-file")
    result = grpo("generate", "two/final", prompt, *options)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    tokens = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    want = greedy(module, tokens, 8, loaded.eos_ids)
    assert [row["tokens"] for row in rows] == [len(want)] * 2
    assert rows[0]["completion"] == rows[1]["completion"]
    assert rows[0]["completion"] == TextDecoder(loaded.tokenizer).decode(want)
