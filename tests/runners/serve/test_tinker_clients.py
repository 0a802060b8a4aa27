"""Tinker's client and its cookbook against a server, the program of its page, and what they save."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

import grpo_fn as g
from runners.cli import main
from runners.inference.inference_model import load_inference
from runners.models.adapters import read_folder
from tests.runners.serve.test_clients import SCRIPTS
from tests.runners.serve.test_serve_command import server
from tests.support.pages import ROOT, snippets
from tests.support.serving import CPU, embedded, python_with

pytest.importorskip("tinker")
from tests.support.training_server import training

COOKBOOK_S = "Qwen/Qwen3-8B-Base"  # a name by which the cookbook knows how to render


def run(client, script, *arguments, seconds=600):
    """Runs a client's program in an environment that has it."""
    command = [python_with(client), SCRIPTS / script, *map(str, arguments)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=offline)
    assert done.stdout.endswith("fine\n"), done.stdout[-2000:] + done.stderr[-4000:]


def test_tinker_s_client(tmp_path):
    """It trains, samples, saves, continues from saved weights, and receives errors in its own form."""
    loaded = embedded()
    with training(tmp_path, loaded=loaded) as caller:
        run("tinker", "tinker_train.py", caller.server.url, loaded.path)


def test_the_cookbook_s_loops(tmp_path):
    """rl_loop and sl_loop run on the embedded model with another address, model name, sizes and data."""
    loaded = embedded()
    with training(tmp_path, loaded=loaded, name=COOKBOOK_S) as caller:
        logs = tmp_path / "logs"
        run("tinker-cookbook", "tinker_cookbook_loops.py", caller.server.url, loaded.path, logs, 4)


def test_the_program_of_the_page(tmp_path):
    """The program in docs/tinker.md trains a model in at most twenty lines."""
    (program,) = [each for each in snippets(ROOT / "docs" / "tinker.md") if "tinker" in each.comments]
    assert program.line + program.text.count("\n") <= 20 + 3
    with server("--tinker", "--weights", str(tmp_path)) as (_, url):
        file = tmp_path / "program.py"
        file.write_text(program.text.replace("http://127.0.0.1:8000", url))
        done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0], done.stdout + done.stderr


def test_what_is_saved_opens_elsewhere(tmp_path, monkeypatch, capsys):
    """mlx-lm, PEFT's format and `grpo eval` read the same weights that were sampled with."""
    from mlx_lm import load

    with training(tmp_path / "weights") as caller:
        caller.train()
        caller.forward([([3, 4, 5, 6], {"target_tokens": [4, 5, 6, 7]})])
        caller.step(learning_rate=0.02)
        tokens = np.arange(20) + 30
        row = (tokens[:-1], {"target_tokens": tokens[1:]})
        (logp,), _ = caller.forward([row], forward_only=True)
        path = caller.result("save_weights_for_sampler", **caller.order(), path="one")["path"]
        caller.result("save_weights", **caller.order(), path="two")
        again = caller.result("save_weights", **caller.order(), path="two")
        assert "exists" in again["error"]
        assert "path" in caller.result("save_weights", **caller.order(), path="two", overwrite=True)
    folder = tmp_path / "weights" / path.removeprefix("tinker://")
    assert {each.name for each in folder.iterdir()} == {"adapters.safetensors", "adapter_config.json"}
    module, _ = load(str(embedded().path), adapter_path=str(folder))
    logits = module(mx.array(tokens[None, :-1]))[0].astype(mx.float32)
    logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    theirs = mx.take_along_axis(logits, mx.array(tokens[1:])[:, None], axis=1)[:, 0]
    assert np.abs(np.array(theirs) - logp).max() < 1e-3
    result = CliRunner().invoke(main, ["export", str(folder), "--peft", str(tmp_path / "peft")])
    assert result.exit_code == 0, result.output
    ours, peft = (read_folder(each).tensors for each in (folder, tmp_path / "peft"))
    assert ours.keys() == peft.keys() and all(mx.array_equal(ours[name], peft[name]) for name in ours)
    sizes = ["--samples", "4", "--max-tokens", "4"]
    result = CliRunner().invoke(main, ["eval", str(folder), "--data", "embedded", *sizes])
    assert result.exit_code == 0, result.output
    loaded = load_inference(str(folder), CPU)
    batch = g.batch_of([(tokens[:1].tolist(), tokens[1:].tolist())], [[0.0] * 19])
    again = g.make_logprob_step(loaded.policy)({}, batch)
    assert np.abs(np.array(again)[0] - logp).max() < 1e-4


def test_the_cookbook_s_check_of_numerics(tmp_path):
    """rl_numerics_check: sampler and learner agree on a document that is read page by page."""
    folder = os.environ.get("GRPO_FN_REAL_MODEL")  # with <|im_end|>, such as SmolLM2-135M-Instruct
    if not folder:
        pytest.skip("GRPO_FN_REAL_MODEL names no model's folder")
    loaded = load_inference(folder, CPU)
    with training(tmp_path, loaded=loaded, name=COOKBOOK_S, length=2048) as caller:
        logs = tmp_path / "logs"
        run("tinker-cookbook", "tinker_numerics_check.py", caller.server.url, folder, logs, "qwen3")
