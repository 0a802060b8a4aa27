"""mlx-lm's commands load the results of a run, each in a separate process."""

import os
import re
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest

from tests.support.tiny_runs import train

PROMPT = "Anna bakes 48 rolls."
TOKENS = mx.array([[5, 9, 70, 31, 12]])
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A full run, a LoRA run, and their base model."""
    folder = tmp_path_factory.mktemp("runs")
    found = {tune: train(folder, tune, tune) for tune in ("full", "lora")}
    return {**found, "base": folder / "base-lora"}


def mlx(*arguments):
    """The output of a successful `python -m mlx_lm …`."""
    command = [sys.executable, "-m", "mlx_lm", *map(str, arguments)]
    done = subprocess.run(command, env=OFFLINE, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(folder, adapter=None, count=8):
    """The greedy reply of a model as mlx-lm's library loads it, by whole forward passes."""
    module, tokenizer = mlx_lm.load(str(folder), adapter_path=None if adapter is None else str(adapter))[:2]
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
    )
    start = len(tokens)
    while len(tokens) < start + count:
        token = int(module(mx.array([tokens]))[0, -1].argmax())
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[start:])


def generate(folder, *options):
    """The greedy reply of `mlx_lm generate`, between the rules that it draws."""
    output = mlx("generate", "--model", folder, "--prompt", PROMPT, "--max-tokens", 8, "--temp", 0, *options)
    return re.findall(r"={10}\n(.*?)\n={10}", output, re.DOTALL)[0]


def test_mlx_lm_generates_from_a_run(runs):
    """The reply is the greedy reply of the trained weights, which differ from the base."""
    folder = runs["full"] / "final"
    assert generate(folder) == expected(folder)
    trained, base = (mlx_lm.load(str(path))[0](TOKENS) for path in (folder, runs["base"]))
    assert not mx.allclose(trained, base, rtol=0, atol=1e-3)


def test_mlx_lm_generates_with_the_adapters_of_a_checkpoint(runs):
    """--adapter-path accepts the checkpoint folder unchanged."""
    adapter = runs["lora"] / "checkpoint-2"
    assert generate(runs["base"], "--adapter-path", adapter) == expected(runs["base"], adapter)


def test_mlx_lm_fuses_the_adapters(runs, tmp_path):
    """`mlx_lm fuse` produces the model that final/ contains."""
    adapter, fused = runs["lora"] / "final", tmp_path / "fused"
    mlx("fuse", "--model", runs["base"], "--adapter-path", adapter, "--save-path", fused)
    fused, final = (mlx_lm.load(str(path))[0](TOKENS) for path in (fused, adapter))
    assert mx.allclose(fused, final, rtol=0, atol=1e-4)
