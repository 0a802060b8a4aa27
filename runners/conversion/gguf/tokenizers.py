"""Converts tokenizers between GGUF and tokenizer.json: a byte-level BPE ("gpt2") with a named
pre-tokenizer, or a BPE like SentencePiece's ("llama") with scores instead of merges.
"""

import json
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from runners.conversion.gguf.header import GGUF
from runners.data.rendering import has_template
from runners.errors import UserError, listed, show
from runners.files.json_files import write_json
from runners.tokenization.tiktoken_encoding import pairs_forming

_Type = IntEnum("_Type", "NORMAL UNKNOWN CONTROL USER_DEFINED UNUSED BYTE")  # from 1, of a token
# ByteLevel's own
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_LIKE_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CUTS = {  # llama.cpp's pre-tokenizer names -> their regular expressions, applied in order
    "gpt-2": (_GPT2,),
    "smollm": (_DIGIT, _GPT2),
    "qwen2": (_LIKE_GPT4 % "",),
    "llama-bpe": (_LIKE_GPT4 % "{1,3}",),
    "smaug-bpe": (_LIKE_GPT4 % "{1,3}",),  # the same, with merges for every token
    "gpt-4o": (_LETTERS % (_SUFFIX, _SUFFIX, "{1,3}"),),
    "tekken": (_LETTERS % ("", "", ""),),
}
# a word that is a token needs no merges (tokenizer.json's ignore_merges)
_WHOLE_WORDS = "llama-bpe"
_ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "megrez": "qwen2",
    "starcoder": "smollm", "refact": "smollm", "command-r": "smollm", "phi-2": "gpt-2",
    "llama4": "gpt-4o", "dbrx": "smaug-bpe", "pixtral": "llama-bpe",
}  # fmt: skip
_COMPOSED = ("qwen2", "command-r")  # names whose tokenizers first compose accents (NFC)
_ENDS = {  # tokens that end a generation in llama.cpp by their names
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<EOT>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
_FILE_ENDS = {  # and those for files and gaps in code, if the metadata has no such token
    "fim_pad": {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    "fim_rep": {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    "fim_sep": {"<|file_sep|>"},
}
_SPECIAL = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
}  # fmt: skip
_SPACE = "▁"  # SentencePiece's
_MAX_TOKEN = 256  # longest token, in characters, for which merges are searched


def tokenizer_metadata(tokenizer: Any, rows: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """Returns a tokenizer's GGUF metadata, for a model with this many token ids.

    Raises UserError for tokenizers that llama.cpp does not support.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            "the tokenizer is not a fast tokenizer of transformers, so GGUF cannot represent it"
        )
    stated = json.loads(backend.to_str())
    model = stated["model"]
    if model["type"] != "BPE":
        raise UserError(
            f"tokenizer.json: expected a model of type BPE, found {show(model['type'])}"
        )
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    added = {token["id"]: token for token in stated["added_tokens"]}
    names = {number: name for name, number in model["vocab"].items()}
    names |= {number: token["content"] for number, token in added.items()}
    types = dict.fromkeys(names, _Type.NORMAL)
    types |= {
        i: _Type.CONTROL if token["special"] else _Type.USER_DEFINED for i, token in added.items()
    }
    found: dict[str, Any] = {}
    if model.get("byte_fallback"):
        # the first merge of a token counts
        ranks = {merge.replace(" ", ""): rank for rank, merge in reversed([*enumerate(merges)])}
        unknown = model["vocab"].get(model.get("unk_token"))
        types |= {i: _Type.BYTE for i, name in names.items() if re.fullmatch("<0x..>", name)}
        if unknown is not None:
            types[unknown] = _Type.UNKNOWN
        found = {
            "model": "llama", "pre": "default", "unknown_token_id": unknown,
            "add_space_prefix": _prefixed(stated),
            "scores": [-float(ranks.get(names.get(i, ""), len(merges))) for i in range(rows)],
        }  # fmt: skip
    else:
        pre = _cut_of(stated, bool(model.get("ignore_merges")))
        found = {"model": "gpt2", "pre": pre, "merges": merges}
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id in end_ids else next(iter(end_ids), None)
    others = [i for i in end_ids if i != eos and names[i] not in _ENDS]
    bos = tokenizer.bos_token_id
    found |= {
        "tokens": [names.get(i, f"[PAD{i}]") for i in range(rows)],
        "token_type": [int(types.get(i, _Type.UNUSED)) for i in range(rows)],
        "eos_token_id": eos,
        **dict(zip(("eot_token_id", "eom_token_id"), others, strict=False)),
        "bos_token_id": bos,
        "padding_token_id": tokenizer.pad_token_id,
        "add_bos_token": bos is not None and tokenizer.encode("a")[:1] == [bos],
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}
    if has_template(tokenizer) and isinstance(tokenizer.chat_template, str):
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def write_tokenizer(header: GGUF, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json from a GGUF header.

    Raises UserError for unsupported tokenizers.
    """
    kind = header.get("tokenizer.ggml.model", str)
    tokens = header.get("tokenizer.ggml.tokens", list)
    kinds = header.numbers("tokenizer.ggml.token_type", len(tokens))
    types: list[int] = [int(each) for each in kinds or [_Type.NORMAL] * len(tokens)]
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != _Type.UNUSED}
    parts = {"gpt2": _bytewise, "llama": _sentences}.get(kind)
    if parts is None:
        raise UserError(f"tokenizer.ggml.model: expected gpt2 or llama, found {show(kind)}")
    ids = {
        name: header.get(f"tokenizer.ggml.{name}_token_id", int, -1)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding", *_FILE_ENDS)
    }
    beyond = [i for i in ids.values() if i >= len(tokens)]
    if beyond:
        raise UserError(
            f"tokenizer.ggml: the token {beyond[0]} is not among the {len(tokens)} tokens"
        )
    bos = ids["bos"]
    begins = bos >= 0 and header.get("tokenizer.ggml.add_bos_token", bool, kind == "llama")
    stated = {
        "version": "1.0", "truncation": None, "padding": None,
        "post_processor": _beginning_with(tokens[bos], bos) if begins else None,
        "added_tokens": [
            {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": each != _Type.USER_DEFINED}
            for i, each in enumerate(types)
            if each in (_Type.UNKNOWN, _Type.CONTROL, _Type.USER_DEFINED)
        ],
        **parts(header, tokens, types, vocabulary),
    }  # fmt: skip
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{key: tokens[ids[name]] for name, key in _SPECIAL.items() if ids[name] >= 0},
    }
    if "tokenizer.chat_template" in header.metadata:
        config["chat_template"] = header.get("tokenizer.chat_template", str)
    files = {
        "tokenizer": stated,
        "tokenizer_config": config,
        "generation_config": {"eos_token_id": _end_ids(tokens, ids)},
    }
    for name, content in files.items():
        write_json(folder / f"{name}.json", content, indent=None, ensure_ascii=False)


def _beginning_with(token: str, number: int) -> dict[str, Any]:
    """Returns the post-processor that puts a token before each text. The library's own templates
    would misread a token name that contains ":" or "$".
    """
    single = [
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    return {
        "type": "TemplateProcessing", "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }  # fmt: skip


def _end_ids(tokens: list[str], ids: Mapping[str, int]) -> list[int]:
    """Returns the tokens that end a generation in llama.cpp, found first by metadata key and then
    by name.
    """
    names = _ENDS.union(*(texts for key, texts in _FILE_ENDS.items() if ids[key] < 0))
    stated = [ids[key] for key in ("eos", "eot", "eom", *_FILE_ENDS) if ids[key] >= 0]
    return [*dict.fromkeys([*stated, *(i for i, token in enumerate(tokens) if token in names)])]


def _steps(stated: Mapping[str, Any], key: str, inner: str) -> list[Mapping[str, Any]]:
    """Returns the steps of a normalizer, pre-tokenizer or decoder. A component that is not a
    sequence becomes a list with one step.
    """
    found = stated.get(key)
    if not found:
        return []
    return found[inner] if found["type"] == "Sequence" else [found]


def _cut_of(stated: Mapping[str, Any], whole_words: bool) -> str:
    """Returns llama.cpp's name for a tokenizer.json's pre-tokenizer."""
    found = []
    for step in _steps(stated, "pre_tokenizer", "pretokenizers"):
        match step:
            case {"type": "Split", "pattern": {"Regex": cut}}:
                found.append(cut)
            case {"type": "Digits", "individual_digits": True}:
                found.append(_DIGIT)
            case {"type": "ByteLevel", "use_regex": False}:
                pass
            case {"type": "ByteLevel"}:
                found.append(_GPT2)
            case _:
                found.append(step["type"])
    names = [name for name, cut in _CUTS.items() if cut == tuple(found)]
    if not names:
        raise UserError(
            f"tokenizer.json: llama.cpp does not support the pre-tokenizer {show(found)}; --out "
            f"writes a folder instead"
        )
    return next((name for name in names if (name == _WHOLE_WORDS) == whole_words), names[0])


def _prefixed(stated: Mapping[str, Any]) -> bool:
    """Returns whether a tokenizer puts a space before each text."""
    steps = [
        *_steps(stated, "normalizer", "normalizers"),
        *_steps(stated, "pre_tokenizer", "pretokenizers"),
    ]
    return any(
        s["type"] == "Prepend" or s.get("prepend_scheme") in ("first", "always") for s in steps
    )


def _split(cut: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}


def _bytewise(
    header: GGUF, tokens: list[str], types: list[int], vocabulary: dict[str, int]
) -> dict:
    stated = header.get("tokenizer.ggml.pre", str, "gpt-2")
    name = _ALIASES.get(stated, stated)
    if name not in _CUTS:
        raise UserError(f"tokenizer.ggml.pre: expected {listed([*_CUTS])}, found {show(name)}")
    merges = [merge.split(" ") for merge in header.get("tokenizer.ggml.merges", list)]
    if not all(len(pair) == 2 for pair in merges):
        raise UserError("tokenizer.ggml.merges: expected two parts in each merge")
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    whole = {_GPT2: {**byte_level, "use_regex": True},
             _DIGIT: {"type": "Digits", "individual_digits": True}}  # fmt: skip
    cuts = [whole.get(cut, _split(cut)) for cut in _CUTS[name]]
    if _GPT2 not in _CUTS[name]:
        cuts.append(byte_level)
    return {
        "normalizer": {"type": "NFC"} if stated in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": False,
                  "ignore_merges": name == _WHOLE_WORDS},
        "decoder": byte_level,
    }  # fmt: skip


def _sentences(
    header: GGUF, tokens: list[str], types: list[int], vocabulary: dict[str, int]
) -> dict:
    """Converts scores to merges. SentencePiece's BPE always joins the two neighbours whose union
    has the best score.
    """
    scores = header.numbers("tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise UserError("tokenizer.ggml.scores: expected a score for each token, found none")
    plain = {
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind == _Type.NORMAL and len(token) <= _MAX_TOKEN
    }
    merges = []
    for token in sorted(plain, key=lambda token: -scores[vocabulary[token]]):
        merges += pairs_forming(token, plain)
    prefix = header.get("tokenizer.ggml.add_space_prefix", bool, True)
    unknown = header.get("tokenizer.ggml.unknown_token_id", int, -1)
    normalizers = [
        *([{"type": "Prepend", "prepend": _SPACE}] if prefix else []),
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ]
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": True,
                  "fuse_unk": True, "unk_token": tokens[unknown] if unknown >= 0 else None},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }  # fmt: skip
