"""GGUF files byte by byte, as no honest writer writes them; and texts for their tokenizers."""

import json
import os
import random
import struct
from pathlib import Path

from tokenizers import Tokenizer

from runners.conversion.gguf import tokenizers
from runners.conversion.gguf.header import GGUF

LLAMA = {  # of one block, width 32
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.block_count": 1,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "<end>", "ab"],
    "tokenizer.ggml.token_type": [1, 1, 3, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 2,
}
TENSORS = {  # name -> shape, innermost first
    "token_embd.weight": (32, 4),
    "output_norm.weight": (32,),
    **{f"blk.0.{name}.weight": (32, 32) for name in ("attn_q", "attn_k", "attn_v", "attn_output")},
    **{f"blk.0.{name}.weight": (32, 32) for name in ("ffn_gate", "ffn_up", "ffn_down")},
    **{f"blk.0.{name}.weight": (32,) for name in ("attn_norm", "ffn_norm")},
}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(of) -> bytes:
    if isinstance(of, bytes):  # as it is
        return of
    if isinstance(of, str):
        return struct.pack("<I", 8) + text(of)
    if isinstance(of, float):
        return struct.pack("<If", 6, of)
    if isinstance(of, int):
        return struct.pack("<II", 4, of)
    kind = 8 if isinstance(of[0], str) else 5
    return struct.pack("<IIQ", 9, kind, len(of)) + b"".join(
        text(each) if kind == 8 else struct.pack("<i", each) for each in of
    )


def write(path: Path, metadata=LLAMA, tensors=TENSORS, *, offsets=None, counts=(), size=None, kind=0) -> Path:
    """A file of zeros; `offsets` and `counts` (tensors, metadata) replace true ones, `size` is the file's."""
    entries, place = [], 0
    for name, shape in tensors.items():
        number = 4
        for part in shape:
            number = number * part % 2**63
        entries.append((name, shape, (offsets or {}).get(name, place)))
        place += number
    tensor_count, count = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", 3, tensor_count, count)
    head += b"".join(text(key) + value(each) for key, each in metadata.items())
    for name, shape, offset in entries:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    whole = head + bytes(-len(head) % 32) + bytes(min(place, 1 << 20))
    path.write_bytes(whole[:size])
    if size is not None:
        os.truncate(path, size)
    return path


def cut_words(backend: Tokenizer, name: str) -> Tokenizer:
    """A byte-level BPE that splits text into words as llama.cpp does under this name."""
    header = GGUF(Path(), {"tokenizer.ggml.pre": name, "tokenizer.ggml.merges": []}, {})
    made = tokenizers._bytewise(header, [], [], {})
    stated = json.loads(backend.to_str())
    stated["normalizer"] = made["normalizer"]
    stated["pre_tokenizer"] = made["pre_tokenizer"]
    stated["model"]["ignore_merges"] = made["model"]["ignore_merges"]
    return Tokenizer.from_str(json.dumps(stated))


_FRAGMENTS = [  # what tokenizers cut, join and normalize in different ways
    *("word", "Words", "UPPER", "CamelCase", "snake_case", "it's", "IT'S", "don't", "we'll", "I'VE", "'tis"),
    *("7", "42", "1234567", "3.14", "1,000", "½", "٣٤", "Ⅷ", "x²", "12th", "0x1F"),
    *(" ", "  ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u2009", "   \n\n  "),
    *("Größe", "cafe\u0301", "\u0041\u030a", "naïve", "İ", "ﬁ", "Ω", "ẞ", "ǅ", "e\u0323\u0302"),
    *("你好世界", "こんにちは", "カタカナ", "안녕", "\u1112\u1161\u11ab", "привет"),
    *("שלום", "مرحبا", "नमस्ते", "ไทย"),
    *("😀", "👩\u200d🚀", "🇩🇪", "❤\ufe0f", "\u200b", "\ufeff", "\u0007", "�"),
    *("...", "!?", "--", "//", "/*", "</p>", "{}", "\\", '"', "'", "`", "=>", "@me", "#1", "$5", "a/b"),
    *("_", "▁"),
]  # fmt: skip


def many_texts(count: int = 300) -> list[str]:
    """Texts of one to nine fragments, the same each time."""
    draws = random.Random(7)
    return ["".join(draws.choices(_FRAGMENTS, k=draws.randint(1, 9))) for _ in range(count)]
