"""llama.cpp itself reads what `grpo export --gguf` writes: the same tokens, logits and text."""

import json
import os
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from tokenizers import pre_tokenizers, trainers

from runners.conversion.gguf import tokenizers
from runners.conversion.gguf.families import FAMILIES
from runners.models.model_reader import load_tokenizer
from tests.support.commands import grpo
from tests.support.gguf_files import cut_words
from tests.support.tiny_models import make_model_folder, make_tokenizer, sentence_tokenizer

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf")

REAL = os.environ.get("GRPO_REAL_MODEL", "")
TEXTS = [
    "In 2024 it's 1234567 and 12 apples, isn't it? DON'T YOU'LL see.",
    "  two  spaces\n\n and\tlines  \r\n end ",
    "CamelCaseWords and snake_case(x, y) { return x+y; } // ok!",
    "Größe, naïve café; 你好世界 привет 😀",
]
TEXT = "<|im_start|>user\nWhat is 17 times 3, and why?\n\n  It's half.<|im_end|>\n<|im_start|>assistant\n"


def opened(file, **more):
    """llama.cpp with an exact cache and without AMX kernels, which crash on some virtual machines."""
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
    grpo("export", folder, "--gguf", file, "--type", kind, "--force")
    return opened(file)


def logits_of(llama, tokens):
    llama.reset()
    llama.eval(tokens)
    return np.array(llama.scores[: len(tokens)])


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_family_computes_the_same(tmp_path, arch):
    """In float32, tokens and end of text are equal, and logits up to rounding, beyond the window's length."""
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


@pytest.mark.parametrize("cut", tokenizers._CUTS)
def test_every_cutting_into_words_is_llama_cpps(tmp_path, cut):
    """With many merges over digits, words and spaces, the name that we write leads to the same tokens."""
    folder = make_model_folder(tmp_path / "m")
    backend = cut_words(make_tokenizer(), cut)
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(TEXTS * 3, trainer)
    cut_words(backend, cut).save(str(folder / "tokenizer.json"))
    llama, ours = exported(folder, tmp_path / "m.gguf", "f16"), load_tokenizer(folder)
    for text in TEXTS:
        assert llama.tokenize(text.encode(), add_bos=False, special=True) == ours.encode(text), text


def test_sentences_are_cut_as_by_llama_cpp(tmp_path):
    """A BPE like SentencePiece's with byte fallback, with and without a space before the text."""
    for prefix in (True, False):
        folder = make_model_folder(tmp_path / f"m{prefix}", vocab_size=384)
        sentence_tokenizer(TEXTS, prefix, 384).save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        llama, ours = exported(folder, tmp_path / "m.gguf", "f16"), load_tokenizer(folder)
        for text in TEXTS:
            found = llama.tokenize(text.encode(), add_bos=False, special=True)
            assert found == ours.encode(text), text


@pytest.mark.skipif(not REAL, reason="GRPO_REAL_MODEL names no folder")
@pytest.mark.parametrize(
    ("kind", "room"), [("f16", 0.002), ("bf16", 0.02), ("q8_0", 0.06), ("q4_1", 0.1), ("q4_0", 0.5)]
)
def test_a_real_model_computes_the_same(tmp_path, kind, room):
    """Logits differ by the type's rounding, relative to the largest; 40 greedy tokens are equal in float16.

    With packed weights, llama.cpp also rounds the activations to eight bits.
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
