"""llama.cpp itself reads what `grpo export --gguf` writes: the same tokens, logits and text."""

import os
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from click.testing import CliRunner

from runners import cli
from runners.conversion.gguf.families import FAMILIES
from tests.support.tiny_models import make_model_folder

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf")

REAL = os.environ.get("GRPO_REAL_MODEL", "")
TEXT = "<|im_start|>user\nWhat is 17 times 3, and why?\n\n  It's half.<|im_end|>\n<|im_start|>assistant\n"


def opened(file, **more):
    """llama.cpp with its plain kernels and an exact cache; its AMX ones crash on some virtual machines."""
    parameters = llama_cpp.llama_model_default_params

    def plain():
        found = parameters()
        found.use_extra_bufts = False
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", plain)
        exact = {"type_k": 0, "type_v": 0}
        return llama_cpp.Llama(
            str(file), n_ctx=256, n_threads=2, logits_all=True, verbose=False, **exact | more
        )


def exported(folder, file, kind):
    done = CliRunner().invoke(
        cli.main, ["export", str(folder), "--gguf", str(file), "--type", kind, "--force"]
    )
    assert done.exit_code == 0, done.output
    return opened(file)


def logits_of(llama, tokens):
    llama.reset()
    llama.eval(tokens)
    return np.array(llama.scores[: len(tokens)])


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_family_computes_the_same(tmp_path, arch):
    """float32: tokens as ours, logits to rounding, over more tokens than a window has; the end of text."""
    folder = make_model_folder(tmp_path / "m", arch, tie=arch.startswith("gemma"))
    module, tokenizer = mlx_lm.load(str(folder))[:2]
    llama = exported(folder, tmp_path / "m.gguf", "f32")
    tokens = llama.tokenize(TEXT.encode(), add_bos=True, special=True)
    assert tokens == tokenizer.encode(TEXT) and llama.token_eos() == 2
    if arch == "gemma2":  # mlx-lm's has no windows
        tokens = tokens[:8]
    want = np.array(module(mx.array([tokens])))[0]
    assert np.abs(logits_of(llama, tokens) - want).max() < 2e-3 * np.abs(want).max()
    assert llama.metadata["tokenizer.chat_template"] == tokenizer.chat_template


@pytest.mark.skipif(not REAL, reason="GRPO_REAL_MODEL names no folder")
@pytest.mark.parametrize(
    ("kind", "room"), [("f16", 0.002), ("bf16", 0.02), ("q8_0", 0.06), ("q4_1", 0.1), ("q4_0", 0.5)]
)
def test_a_real_model_computes_the_same(tmp_path, kind, room):
    """To the type's rounding, as a share of the largest logit; in float16 the same 40 tokens, greedily.

    On packed weights llama.cpp rounds the activations to eight bits as well.
    """
    module, tokenizer = mlx_lm.load(REAL)[:2]
    module.set_dtype(mx.float32)
    llama = exported(Path(REAL), tmp_path / "m.gguf", kind)
    tokens = llama.tokenize(TEXT.encode(), add_bos=True, special=True)
    assert tokens == tokenizer.encode(TEXT)
    want = np.array(module(mx.array([tokens])))[0]
    found = logits_of(llama, tokens)
    assert np.abs(found - want).max() < room * np.abs(want).max()
    if kind != "f16":
        return
    reply = list(tokens)
    for _ in range(40):
        reply.append(int(mx.argmax(module(mx.array([reply]))[0, -1]).item()))
    llama.reset()
    stream = llama.generate(tokens, temp=0.0, top_k=1)
    assert [next(stream) for _ in range(40)] == reply[len(tokens) :]
