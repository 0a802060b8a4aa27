"""nanochat's PyTorch checkpoints: the logits of a PyTorch forward, unknown tensors, memory, all in place."""

import shutil
import sys
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from runners.conversion.convert import convert
from runners.conversion.nanochat import find_checkpoint
from runners.conversion.packing import QuantizationOptions
from runners.errors import UserError
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from tests.support.files.nanochat_checkpoints import SIZES, make_tensors, write_checkpoint

torch = pytest.importorskip("torch", reason="of the extra `torch`")
F = torch.nn.functional

TOKENS = [[320, 5, 9, 70, 31, 300, 7, 7, 12, 328]]


def rotate(x):
    """nanochat's rotary embedding of [B,T,H,D]: the halves turned by position · 10000^(−2i/D), clockwise."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** -(torch.arange(half) / half)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def norm(x):
    """RMS norm without weights."""
    return F.rms_norm(x, (x.shape[-1],))


def forward(tensors, tokens, sizes=SIZES):
    """Logits of the architecture in PyTorch, float32: pre-norm blocks, rotary then QK norm, squared ReLU,
    grouped keys, logits softly capped at 15."""
    w = {name: tensor.float() for name, tensor in tensors.items()}
    heads, groups = sizes["n_head"], sizes["n_head"] // sizes["n_kv_head"]
    size = sizes["n_embd"] // heads
    x = norm(w["transformer.wte.weight"][torch.tensor(tokens)])
    batch, length, width = x.shape
    for layer in range(sizes["n_layer"]):
        at = f"transformer.h.{layer}."
        h = norm(x)
        q, k, v = (
            (h @ w[f"{at}attn.c_{name}.weight"].T).view(batch, length, -1, size) for name in ("q", "k", "v")
        )
        q, k = norm(rotate(q)), norm(rotate(k))
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + y.transpose(1, 2).reshape(batch, length, width) @ w[f"{at}attn.c_proj.weight"].T
        h = F.relu(norm(x) @ w[f"{at}mlp.c_fc.weight"].T).square()
        x = x + h @ w[f"{at}mlp.c_proj.weight"].T
    logits = norm(x) @ w["lm_head.weight"].T
    return (15 * torch.tanh(logits / 15))[..., : sizes["vocab_size"]].numpy()


@pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
def test_the_logits_are_those_of_pytorch(tmp_path, prefix):
    """mlx-lm's model from the new folder and the forward above, also for tensors of a compiled module."""
    tensors = make_tensors()
    folder = convert(str(write_checkpoint(tmp_path / "d3", tensors, prefix=prefix)), tmp_path / "out")
    module, config = mlx_lm.utils.load_model(folder)
    module.set_dtype(mx.float32)
    found, wanted = np.array(module(mx.array(TOKENS))), forward(tensors, TOKENS)
    assert found.shape == wanted.shape == (1, 10, 329)
    assert np.abs(found - wanted).max() < 2e-3 < 0.1 < np.abs(wanted).max()
    assert config["vocab_size"] == 329 and config["max_position_embeddings"] == 64


def test_a_converted_checkpoint_loads_in_its_own_dtypes(tmp_path):
    """The converted folder has a tokenizer, loads like any model, and keeps the dtypes on disk."""
    folder = convert(str(write_checkpoint(tmp_path / "d3")), tmp_path / "out")
    model = load_inference(str(folder), Platform(backend="cpu"))
    assert model.eos_ids == (320, 324) and model.notices == ()
    weights: Any = mx.load(str(folder / "model.safetensors"))
    assert weights["transformer.wte.weight"].dtype == mx.bfloat16
    assert weights["lm_head.weight"].dtype == mx.float32 and weights["lm_head.weight"].shape == (329, 64)
    cast = convert(str(tmp_path / "d3"), tmp_path / "cast", dtype="bfloat16")
    weights = mx.load(str(cast / "model.safetensors"))
    assert {weight.dtype for weight in weights.values()} == {mx.bfloat16}


def test_it_can_be_quantized_at_once_or_later(tmp_path):
    """Packing the checkpoint or the MLX folder has the same result, near the full model's logits."""
    quantization = QuantizationOptions(bits=3, group_size=32)
    source = write_checkpoint(tmp_path / "d3")
    full = convert(str(source), tmp_path / "full")
    once = convert(str(source), tmp_path / "once", quantization=quantization)
    later = convert(str(full), tmp_path / "later", quantization=quantization)
    modules: Any = [mlx_lm.utils.load_model(folder)[0] for folder in (full, once, later)]
    assert modules[1].lm_head.bits == 3
    logits = [np.array(module(mx.array(TOKENS)).astype(mx.float32)) for module in modules]
    assert np.array_equal(logits[1], logits[2])
    assert 0 < np.abs(logits[1] - logits[0]).mean() < 0.5 * np.abs(logits[0]).mean()
    with pytest.raises(UserError, match="already quantized"):
        convert(str(once), tmp_path / "twice", quantization=quantization)


def spoil(tensors, **changes):
    """The tensors with some replaced, or removed if None."""
    return {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": torch.ones(3), "b.1.weight": torch.ones(2)}, "cannot be loaded: Received 2 parameters not in"),
        ({"lm_head.weight": None, "transformer.h.1.mlp.c_fc.weight": None}, "loaded: Missing 2 parameters"),
        ({"transformer.h.0.attn.c_k.weight": torch.ones(64, 64)}, r"received shape \(64, 64\)"),
        ({"lm_head.weight": torch.ones(320, 64)}, r"Expected shape \(329, 64\) but received shape \(320, 64"),
    ],
)
def test_tensors_that_do_not_fit_are_listed(tmp_path, changes, message):
    """Unknown and missing tensors and other shapes are refused, and nothing is written."""
    source = write_checkpoint(tmp_path / "d3", spoil(make_tensors(), **changes))
    with pytest.raises(UserError, match=message):
        convert(str(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["d3"]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"n_layer": "3"}, 'model_config.n_layer: expected a positive integer, found "3"'),
        ({"n_head": 3}, "Expected shape"),
        ({"window_pattern": "SSSL"}, "model_config contains window_pattern, which"),
        ({"vocab_size": 300}, "the tokenizer has .*, but the model's embedding has only 300 rows"),
    ],
)
def test_another_architecture_is_refused(tmp_path, meta, message):
    """Invalid sizes, and settings that mlx-lm's model does not support."""
    with pytest.raises(UserError, match=message):
        convert(str(write_checkpoint(tmp_path / "d3", **meta)), tmp_path / "out")


def test_a_file_that_runs_code_is_refused(tmp_path):
    """Reading with weights_only refuses a pickle that contains more than tensors."""
    source = write_checkpoint(tmp_path / "d3")
    torch.save({"x": __import__("collections").Counter, "y": print}, source / "model_000650.pt")
    with pytest.raises(UserError, match=r"model_000650\.pt: cannot be read as a checkpoint with tensors"):
        convert(str(source), tmp_path / "out")


def test_the_last_step_or_the_one_asked_for(tmp_path):
    """--step selects a step; the tokenizer may be in nanochat's own folder."""
    base = tmp_path / "nanochat"
    folder = write_checkpoint(base / "chatsft_checkpoints" / "d3", step=9)
    write_checkpoint(folder, step=650)
    (base / "tokenizer").mkdir()
    shutil.move(folder / "tokenizer.pkl", base / "tokenizer")
    assert find_checkpoint(base) is None
    names = [[file.name for file in found] for step in (None, 9) if (found := find_checkpoint(folder, step))]
    assert names == [[f"model_{n}.pt", f"meta_{n}.json", "tokenizer.pkl"] for n in ("000650", "000009")]
    with pytest.raises(UserError, match="no step 10; found 9, 650"):
        find_checkpoint(folder, 10)
    (base / "tokenizer" / "tokenizer.pkl").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.pkl is missing, both here and in"):
        find_checkpoint(folder)


def test_without_pytorch_the_extra_is_named(tmp_path, monkeypatch):
    """The message contains the command that installs it."""
    source = write_checkpoint(tmp_path / "d3")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[torch\]' in a clone"):
        convert(str(source), tmp_path / "out")
