"""`grpo convert`: Hugging Face folders, quantization, and existing folders."""

import json
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from tests.support.commands import grpo
from tests.support.tiktoken_files import make_nanochat_folder
from tests.support.tiny_models import make_model_folder

TOKENS = mx.array([[5, 9, 70, 31]])


@pytest.fixture
def source(tmp_path):
    """A model of two layers of width 32, bfloat16."""
    return make_model_folder(tmp_path / "model", dtype="bfloat16")


def convert(source, *more, code=0):
    """`grpo convert SOURCE --out TARGET …`."""
    return grpo("convert", source, "--out", *more, code=code)


def logits_of(folder):
    """The logits from mlx-lm's own loader, including the tokenizer."""
    module: Any = mlx_lm.load(str(folder))[0]
    return np.array(module(TOKENS).astype(mx.float32)), module


@pytest.mark.parametrize(
    ("options", "bits", "group_size", "mode"),
    [
        *((("--bits", str(bits), "--group-size", "32"), bits, 32, "affine") for bits in (3, 8)),
        (("--mode", "mxfp4"), 4, 32, "mxfp4"),
    ],
)
def test_quantization_of_every_kind(source, tmp_path, options, bits, group_size, mode):
    """mlx-lm loads the folder, its layers have the requested format, and stdout is one line."""
    result = convert("model", "out", *options)
    assert result.stdout.startswith("out: ") and result.stdout.count("\n") == 1
    found, module = logits_of(tmp_path / "out")
    layer = module.model.layers[1].mlp.up_proj
    assert (layer.bits, layer.group_size, layer.mode) == (bits, group_size, mode)
    full = logits_of(source)[0]
    assert np.abs(found - full).mean() < np.abs(full).mean()


def test_calibrated_weights_are_nearer_and_open_as_any_others(source, tmp_path):
    """Format and size are those of rounding to nearest, the numbers differ; other modes are refused."""
    (tmp_path / "prompts.txt").write_text("".join(f"{n} and {n}\n" for n in range(12)))
    how = ("--bits", "3", "--group-size", "32")
    convert("model", "nearest", *how)
    result = convert("model", "calibrated", *how, "--calibrate", "prompts.txt")
    assert "calibrating: prompts 9 to 12 of 12" in result.stderr
    full, nearest, calibrated = (logits_of(tmp_path / n)[1] for n in ("model", "nearest", "calibrated"))
    inputs = full.model.embed_tokens(mx.arange(300)[None])

    def off(module) -> Any:
        return mx.abs(module.model.layers[0](inputs) - full.model.layers[0](inputs)).mean().item()

    assert off(calibrated) < off(nearest)
    files = [tmp_path / name / "model.safetensors" for name in ("nearest", "calibrated")]
    assert len({file.stat().st_size for file in files}) == 1
    for more in ([], ["--mode", "mxfp4"]):
        refused = convert("model", "other", *more, "--calibrate", "prompts.txt", code=2)
        assert "--calibrate requires --bits or --recipe" in refused.stderr


def test_without_options_the_weights_stay(source, tmp_path):
    """Logits and dtype stay; --dtype changes the dtype; --dequantize unpacks quantized weights."""
    convert("model", "same")
    assert np.array_equal(logits_of(tmp_path / "same")[0], logits_of(source)[0])
    convert("model", "cast", "--dtype", "float32")
    assert logits_of(tmp_path / "cast")[1].model.embed_tokens.weight.dtype == mx.float32
    convert("model", "packed", "--bits", "4", "--group-size", "32")
    convert("packed", "back", "--dequantize")
    found, module = logits_of(tmp_path / "back")
    assert not any(hasattr(part, "bits") for _, part in module.named_modules())
    packed = logits_of(tmp_path / "packed")[0]  # the same numbers, to the rounding of bfloat16
    assert np.abs(found - packed).mean() < 0.25 * np.abs(packed - logits_of(source)[0]).mean()


def test_own_code_runs_only_when_trusted_and_is_copied(source, tmp_path):
    """An error in that code is reported in one line."""
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    code = "from mlx_lm.models.llama import Model, ModelArgs\n"
    for text, options, message in (
        (code, (), "contains its own model code"),
        (f"{code}1 / 0\n", ("--trust-remote-code",), "division by zero"),
    ):
        (source / "own.py").write_text(text)
        result = convert("model", "out", *options, code=2)
        assert message in result.stderr and result.stderr.count("\n") == 1
    (source / "own.py").write_text(code)
    convert("model", "out", "--trust-remote-code")
    assert (tmp_path / "out" / "own.py").read_text() == code


def test_an_existing_folder_is_replaced_by_force_only(source, tmp_path):
    """Without --force, it is unchanged; with --force, the new folder is complete."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    assert "out: this already exists; --force replaces it" in convert("model", "out", code=2).stderr
    assert (tmp_path / "out" / "precious").read_text() == "x"
    broken = convert("model", "out", "--force", "--recipe", "mixed_2_6", "--group-size", "128", code=2)
    assert "nothing was quantized" in broken.stderr
    assert (tmp_path / "out" / "precious").exists()
    convert("model", "out", "--force")
    assert not (tmp_path / "out" / "precious").exists() and logits_of(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope/nope/x", "out"], 'SOURCE = "nope/nope/x": there is no such folder'),
        (["model", "model", "--force"], "is inside this folder; expected a different folder"),
        (["model", "out", "--group-size", "32"], "--group-size requires --bits"),
        (["model", "out", "--bits", "4", "--group-size", "48"], "nothing was quantized"),
        (["model", "out", "--recipe", "mixed_2_6", "--bits", "4"], "--recipe sets the bits"),
        (["model", "out", "--step", "3"], "model: no step 3; found none"),
        (["model", "out", "--bits", "4", "--calibrate", "p.txt"], "p.txt: cannot be read as text"),
        (["model", "out", "--bits", "7"], "Invalid value for '--bits'"),
    ],
)
def test_faults_end_with_code_2_and_a_line(source, tmp_path, arguments, message):
    """Nothing is written."""
    make_nanochat_folder(tmp_path / "nano")
    result = convert(*arguments, code=2)
    assert not result.stdout and message in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "nano"]
