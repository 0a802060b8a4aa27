"""Export to GGUF and conversion back, for every family and tokenizer, and with transformers' own loader."""

import inspect
import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import attrs
import gguf
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from runners.conversion.gguf import tokenizers, writing
from runners.conversion.gguf.families import FAMILIES, config_of, metadata_of
from runners.conversion.gguf.header import GGUF
from runners.conversion.gguf.writing import TYPES
from runners.errors import UserError
from runners.models.model_reader import load_tokenizer
from tests.support import gguf_files
from tests.support.commands import grpo
from tests.support.properties.strategies import examples
from tests.support.tiny_models import make_model_folder, make_tokenizer, sentence_tokenizer

TOKENS = [5, 9, 70, 31, 12]
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40)
SENTENCES = ["Anna bakes 48 rolls, and it's half as many.", "  two  spaces\n\nand lines\t", "7+5=12 üñ 你好"]


def logits_of(folder):
    module: Any = mlx_lm.load(str(folder))[0]
    return np.array(module(mx.array([TOKENS])).astype(mx.float32)), module


def folder_of(tmp_path, arch, **more):
    """A tiny model with random norms, so that a wrong offset changes its logits."""
    folder = make_model_folder(tmp_path / arch, arch, **more)
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    for i, (name, weight) in enumerate(weights.items()):
        noise = 0.2 * mx.random.normal(weight.shape, key=mx.random.key(i)).astype(weight.dtype)
        weights[name] = weight + noise if weight.ndim == 1 else weight
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    return folder


SHAPES = st.fixed_dictionaries({
    "num_hidden_layers": st.integers(2, 4), "hidden_size": st.sampled_from([32, 64]),
    "intermediate_size": st.sampled_from([32, 96]), "num_attention_heads": st.sampled_from([2, 4]),
    "num_key_value_heads": st.sampled_from([1, 2]), "head_dim": st.sampled_from([8, 16]),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-5]), "rope_theta": st.sampled_from([1e4, 5e5]),
    "max_position_embeddings": st.sampled_from([64, 512]),
})  # fmt: skip
KINDS = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_family_goes_there_and_back(tmp_path_factory, arch):
    """For any sizes, float32 weights keep their bits and half-precision weights are rounded once.

    GGUF stores gemma's norms plus one, so they are equal up to the rounding of that sum.
    """

    @settings(max_examples=examples(5))
    @given(SHAPES, st.sampled_from([*KINDS]), st.booleans(), st.booleans())
    def same(sizes, kind, tie, biases):
        place = tmp_path_factory.mktemp(arch)
        if arch in ("qwen2", "phi3"):  # they have no other
            sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
        more = {"attention_bias": biases, "mlp_bias": biases} if arch == "llama" else {}
        if gemma := arch.startswith("gemma"):
            more = {"query_pre_attn_scalar": sizes["head_dim"]}
        folder = folder_of(place, arch, tie=tie or gemma, **sizes, **more)
        grpo("export", folder, "--gguf", place / "m.gguf", "--type", kind)
        grpo("convert", place / "m.gguf", "--out", place / "back")
        config = json.loads((place / "back" / "config.json").read_text())
        assert sizes.items() <= config.items()
        read: Any = mx.load
        back, ours = (read(str(at / "model.safetensors")) for at in (place / "back", folder))
        for name, weight in ours.items():
            found = back.pop(name.removeprefix("language_model."))
            want = weight.astype(KINDS[kind])
            if gemma and "norm" in name:
                assert mx.allclose(found, want, rtol=2 * mx.finfo(want.dtype).eps, atol=2**-22), name
            else:
                assert found.dtype == want.dtype and mx.array_equal(found, want), name
        assert not back
        want = logits_of(folder)[0]
        room = {"f32": 1e-5, "f16": 0.02, "bf16": 0.1}[kind]
        assert np.abs(logits_of(place / "back")[0] - want).max() <= room * np.abs(want).max()

    same()


def test_a_tokenizer_goes_there_and_back(tmp_path):
    """Tokens, texts, end tokens and the template are kept."""
    folder = make_model_folder(tmp_path / "m")
    grpo("export", folder, "--gguf", tmp_path / "m.gguf")
    grpo("convert", tmp_path / "m.gguf", "--out", tmp_path / "back")
    ours, theirs = (load_tokenizer(place) for place in (folder, tmp_path / "back"))
    assert ours.get_vocab() == theirs.get_vocab()
    assert theirs.eos_token_ids == {*ours.eos_token_ids, ours.convert_tokens_to_ids("<|endoftext|>")}
    assert ours.chat_template == theirs.chat_template
    for text in (*SENTENCES, "<reasoning>x</reasoning><|im_end|>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text))


def numbers_of(file, name="blk.1.ffn_up.weight"):
    """A tensor's numbers, as read by the gguf package."""
    (stored,) = [tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == name]
    return gguf.quants.dequantize(stored.data, stored.tensor_type)


@pytest.mark.parametrize(("kind", "bits"), [("q8_0", 8), ("q4_0", 4), ("q4_1", 4)])
def test_few_bits_stay_as_they_are(tmp_path, kind, bits):
    """Packed layers have exactly the numbers that the gguf package reads, and --dequantize unpacks them."""
    file = tmp_path / "m.gguf"
    grpo("export", folder_of(tmp_path, "llama", tie=False), "--gguf", file, "--type", kind)
    grpo("convert", file, "--out", tmp_path / "packed")
    grpo("convert", file, "--out", tmp_path / "plain", "--dequantize", "--dtype", "float32")
    logits, module = logits_of(tmp_path / "packed")
    layer = module.model.layers[1].mlp.up_proj
    assert (layer.bits, layer.group_size) == (bits, 32) and module.model.embed_tokens.bits == 8
    want = numbers_of(file)
    scales, biases = (layer[name].astype(mx.float32) for name in ("scales", "biases"))
    found = mx.dequantize(layer.weight, scales, biases, group_size=32, bits=bits)
    assert np.array_equal(np.array(found), want)
    plain, module = logits_of(tmp_path / "plain")
    weight = np.array(module.model.layers[1].mlp.up_proj.weight)
    assert np.abs(weight - want).max() < 1e-3 * np.abs(want).max() and np.abs(plain - logits).max() < 0.05
    grpo("export", tmp_path / "packed", "--gguf", tmp_path / "again.gguf", "--type", kind, "--force")
    found = numbers_of(tmp_path / "again.gguf")
    assert np.abs(found - want).max() < 2e-3 * np.abs(want).max()
    assert kind != "q4_0" or np.array_equal(found, want)


def test_other_quants_are_unpacked(tmp_path, monkeypatch):
    """The gguf package unpacks formats that MLX does not support."""
    monkeypatch.setitem(TYPES, "q5_1", 9)
    file = tmp_path / "m.gguf"
    grpo("export", folder_of(tmp_path, "llama"), "--gguf", file, "--type", "q5_1")
    grpo("convert", file, "--out", tmp_path / "out")
    weight = np.array(logits_of(tmp_path / "out")[1].model.layers[1].mlp.up_proj.weight.astype(mx.float32))
    assert np.abs(weight - numbers_of(file)).max() < 2e-3


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_file_of_other_quants_becomes_wholly_unpacked(tmp_path, monkeypatch, dequantize):
    """Most Q4_K_M files are like this: the head is Q8_0, and MLX does not support the other matrices."""
    monkeypatch.setitem(TYPES, "q5_1", 9)
    leaves_of = writing._leaves

    def mixed(*arguments, **more):
        return [
            attrs.evolve(leaf, kind="Q8_0") if leaf.name == "output.weight" else leaf
            for leaf in leaves_of(*arguments, **more)
        ]

    monkeypatch.setattr(writing, "_leaves", mixed)
    file = tmp_path / "m.gguf"
    grpo("export", folder_of(tmp_path, "llama", tie=False), "--gguf", file, "--type", "q5_1")
    grpo("convert", file, "--out", tmp_path / "out", *["--dequantize"] * dequantize)
    assert "quantization" not in json.loads((tmp_path / "out" / "config.json").read_text())
    head: Any = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert head["lm_head.weight"].dtype == mx.float16
    want = numbers_of(file, "output.weight")
    assert np.abs(np.array(head["lm_head.weight"].astype(mx.float32)) - want).max() < 1e-3


ROPES = [
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "linear", "type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
]  # fmt: skip


@pytest.mark.parametrize("scaling", ROPES, ids=lambda scaling: scaling["rope_type"])
def test_rotations_of_long_contexts_are_kept(scaling):
    """config.json -> GGUF -> config.json keeps them, including the tensor of Llama 3's factors."""
    sizes = {"max_position_embeddings": 512, "hidden_size": 128, "intermediate_size": 64, "head_dim": 64,
             "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    config = {**sizes, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "rope_scaling": scaling}
    metadata, factors = metadata_of(FAMILIES["llama"], config)
    back = config_of("llama", GGUF(Path(), metadata, {}).get, False, factors)
    assert {key: back[key] for key in config if key != "rope_scaling"} == {
        key: each for key, each in config.items() if key != "rope_scaling"
    }
    assert scaling.items() <= back["rope_scaling"].items()
    if factors:
        with pytest.raises(UserError, match="the factors of Llama 3"):
            config_of(
                "llama", GGUF(Path(), metadata, {}).get, False, {k: f * 1.1 for k, f in factors.items()}
            )


def wrapped(backend, **names):
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend, **names))


def there_and_back(tokenizer, folder, rows):
    folder.mkdir(exist_ok=True)
    metadata = tokenizers.tokenizer_metadata(tokenizer, rows, sorted(tokenizer.eos_token_ids))
    metadata = {
        k: np.array(v) if isinstance(v, list) and not isinstance(v[0], str) else v
        for k, v in metadata.items()
    }
    tokenizers.write_tokenizer(GGUF(Path("m.gguf"), metadata, {}), folder)
    return metadata, Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", tokenizers._CUTS)
def test_every_cutting_into_words_is_kept(tmp_path, name):
    """It keeps its name in GGUF, and any text has the same tokens."""
    backend = gguf_files.cut_words(make_tokenizer(), name)
    metadata, back = there_and_back(wrapped(backend, eos_token="<|im_end|>"), tmp_path, 320)
    assert metadata["tokenizer.ggml.pre"] == name

    @given(TEXTS)
    def same(text):
        assert back.encode(text).ids == backend.encode(text).ids

    same()


def words_of(expression):
    regex = pytest.importorskip("regex", reason="regex is not installed")  # another engine than ours
    return lambda text: [match.span() for match in regex.finditer(expression, text)]


def published(name, monkeypatch):
    """The regular expression of one of OpenAI's encodings, without its vocabulary."""
    openai_public = pytest.importorskip("tiktoken_ext.openai_public", reason="tiktoken has moved it")
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *_, **__: {})
    return words_of(getattr(openai_public, name)()["pat_str"])


def words_by(*steps):
    own = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return lambda text: [span for _, span in own.pre_tokenize_str(text)]


TEKKEN = (  # "config" / "pattern" of tekken_240911.json in mistral-common
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = inspect.signature(TikTokenConverter).parameters["pattern"].default
OWN = {  # llama.cpp's name -> how the family's own tokenizer cuts
    "gpt-2": lambda patch: published("gpt2", patch),
    "smollm": lambda patch: words_by(pre_tokenizers.Digits(individual_digits=True)),
    "qwen2": lambda patch: words_of(PRETOKENIZE_REGEX),
    "llama-bpe": lambda patch: words_of(LLAMA3),
    "smaug-bpe": lambda patch: words_of(LLAMA3),  # Smaug is a Llama 3
    "gpt-4o": lambda patch: published("o200k_base", patch),
    "tekken": lambda patch: words_of(TEKKEN),
}


@pytest.mark.parametrize("name", tokenizers._CUTS)
def test_every_cutting_into_words_is_the_familys_own(monkeypatch, name):
    """300 texts have the words of the published tokenizer; qwen2 composes accents first."""
    own = OWN[name](monkeypatch)
    backend: Any = gguf_files.cut_words(make_tokenizer(), name)
    for text in gguf_files.many_texts():
        if name == "qwen2":
            composed = unicodedata.normalize("NFC", text)
            assert backend.normalizer.normalize_str(text) == composed
            text = composed
        assert [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)] == own(text), text


def test_a_qwen2_has_the_tokens_of_transformers(tmp_path):
    """The tokens of 300 texts are equal, with composed and decomposed accents."""
    backend = gguf_files.cut_words(make_tokenizer(), "qwen2")
    _, back = there_and_back(wrapped(backend, eos_token="<|im_end|>"), tmp_path, 320)
    stated = json.loads(backend.to_str())["model"]
    merges: Any = [tuple(pair) for pair in stated["merges"]]
    own = Qwen2Tokenizer(vocab=stated["vocab"], merges=merges)
    for text in gguf_files.many_texts():
        assert back.encode(text).ids == own.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces_have_the_tokens_of_sentencepiece(tmp_path, prefix):
    """With the scores of a model trained by SentencePiece, 300 texts have the same tokens."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    (tmp_path / "texts").write_text("\n".join(" ".join(text.split()) for text in gguf_files.many_texts()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts"), model_prefix=str(tmp_path / "m"), model_type="bpe", vocab_size=700,
        byte_fallback=True, add_dummy_prefix=prefix, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    rows = range(own.vocab_size())
    kinds = [2 if own.is_unknown(i) else 3 if own.is_control(i) else 6 if own.is_byte(i) else 1 for i in rows]
    stated = {
        "model": "llama", "tokens": [own.id_to_piece(i) for i in rows], "token_type": np.array(kinds),
        "scores": np.array([own.get_score(i) for i in rows], np.float32), "unknown_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": prefix,
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in stated.items()}
    tokenizers.write_tokenizer(GGUF(Path("m.gguf"), metadata, {}), tmp_path)
    back = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in gguf_files.many_texts():
        assert back.encode(text, add_special_tokens=False).ids == own.encode(text), text


def end_ids(tmp_path, tokens, **keys):
    metadata = {**gguf_files.LLAMA, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
    del metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.eos_token_id"] = 0
    metadata |= {f"tokenizer.ggml.{key}_token_id": i for key, i in keys.items()}
    tokenizers.write_tokenizer(GGUF(Path("m.gguf"), metadata, {}), tmp_path)
    return json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]


def test_a_generation_ends_where_llama_cpp_ends_it(tmp_path):
    """End tokens are found by keys, then by names; a key replaces its names. The first list is Qwen's."""
    qwen = ["<|im_end|>", "a", "</s>", "<|endoftext|>", "<|im_start|>", "<|fim_pad|>", "<|fim_prefix|>",
            "<|repo_name|>", "<|file_sep|>"]  # fmt: skip
    assert end_ids(tmp_path, qwen) == [0, 2, 3, 5, 7, 8]
    assert end_ids(tmp_path, ["x", "a", "b", "<fim_pad>"], eot=2, fim_pad=1) == [0, 2, 1]
    assert end_ids(tmp_path, ["x", "<|eot_id|>", "<|eom_id|>"], eom=2) == [0, 2, 1]


def test_ends_that_llama_cpp_does_not_know_are_written():
    """End tokens that llama.cpp knows by name need no key."""
    backend = make_tokenizer()
    backend.add_tokens(["</answer>"])
    end: Any = backend.token_to_id("</answer>")
    tokenizer = wrapped(backend, eos_token="<|im_end|>")
    stated = tokenizers.tokenizer_metadata(tokenizer, 321, [0, 2, end])
    assert stated["tokenizer.ggml.eos_token_id"] == 2 and stated["tokenizer.ggml.eot_token_id"] == end
    assert "tokenizer.ggml.eom_token_id" not in stated


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_stand_for_merges(tmp_path, prefix):
    """Any text has the same tokens with a BPE like SentencePiece's and byte fallback."""
    backend = sentence_tokenizer(SENTENCES, prefix, 400)
    rows = backend.get_vocab_size() + 5  # a padded embedding
    ours = wrapped(backend, eos_token="</s>", bos_token="<s>", unk_token="<unk>")
    metadata, back = there_and_back(ours, tmp_path, rows)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{rows - 1}]"

    @given(TEXTS | st.sampled_from(SENTENCES))
    def same(text):
        want = backend.encode(text).ids
        assert back.encode(text).ids == want and back.decode(want) == backend.decode(want)

    same()


@pytest.mark.parametrize("name", ["<s:1>", "$A"])
def test_any_name_begins_a_text(tmp_path, name):
    """Names that have a meaning in the tokenizers library's own templates are accepted."""
    more = {
        "tokens": ["a", "b", "<end>", name],
        "token_type": np.array([1, 1, 3, 3]),
        "merges": [],
        "bos_token_id": 3,
    }
    stated = {f"tokenizer.ggml.{key}": value for key, value in (more | {"add_bos_token": True}).items()}
    tokenizers.write_tokenizer(GGUF(tmp_path / "m.gguf", gguf_files.LLAMA | stated, {}), tmp_path)
    assert Tokenizer.from_file(f"{tmp_path}/tokenizer.json").encode("ab").ids == [3, 0, 1]


def test_other_tokenizers_are_refused(tmp_path):
    """A pre-tokenizer without a name in llama.cpp, and a model that is not a BPE."""
    backend = make_tokenizer()
    stated = json.loads(backend.to_str())
    stated["pre_tokenizer"] = {"type": "Whitespace"}
    with pytest.raises(UserError, match=r"pre-tokenizer \[.*Whitespace"):
        there_and_back(wrapped(Tokenizer.from_str(json.dumps(stated))), tmp_path, 320)
    with pytest.raises(UserError, match=r"type BPE, found .*WordLevel"):
        there_and_back(wrapped(Tokenizer(models.WordLevel({"a": 0}, "a"))), tmp_path, 1)


REAL = os.environ.get("GRPO_REAL_GGUF", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi3", "real"])
def test_transformers_reads_the_same(tmp_path, arch):
    """Its GGUF loader and our folder have the same logits and tokens, for our files and for a foreign one.

    qwen3 is not tested, because that loader assumes heads of width 128.
    """
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = tmp_path / "m.gguf"
    if arch != "real":
        grpo("export", folder_of(tmp_path, arch), "--gguf", file, "--type", "f32")
    elif REAL:
        file.symlink_to(REAL)
    else:
        pytest.skip("GRPO_REAL_GGUF names no file")
    grpo("convert", file, "--out", tmp_path / "ours", "--dequantize", "--dtype", "float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    with torch.no_grad():
        want = theirs(torch.tensor([TOKENS])).logits.numpy()
    assert np.abs(logits_of(tmp_path / "ours")[0] - want).max() < 1e-3 * np.abs(want).max()
    if arch == "real":
        names = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
        ours = load_tokenizer(tmp_path / "ours")
        for text in (*SENTENCES, "<|im_start|>user\n1234<|im_end|>"):
            assert names.encode(text) == ours.encode(text)
