"""GGUF files byte by byte, for what no honest writer writes; and what is in them as Modelfiles."""

import json
import os
import re
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
    """A file of zeros, float32 or of another `kind`; `offsets` and `counts` (tensors, metadata) replace true
    ones; `size` cuts it, or makes it longer by a hole."""
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
    """A byte-level BPE that cuts a text into words as llama.cpp's name for it says."""
    header = GGUF(Path(), {"tokenizer.ggml.pre": name, "tokenizer.ggml.merges": []}, {})
    made = tokenizers._bytewise(header, [], [], {})
    stated = json.loads(backend.to_str())
    stated["pre_tokenizer"] = made["pre_tokenizer"]
    stated["model"]["ignore_merges"] = made["model"]["ignore_merges"]
    return Tokenizer.from_str(json.dumps(stated))


def ask(modelfile: str, messages) -> str:
    """What Ollama makes of a conversation by a Modelfile, of whose language this knows a little."""
    loop = r"\{\{ range \$i, \$m := \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*?)"
    ((body, rest),) = re.findall(f'TEMPLATE """{loop}"""', modelfile, re.S)
    branches = re.split(r"\{\{ ((?:else )?(?:if [^}]*)|else) \}\}", body)[1:]
    pairs = list(zip(branches[::2], branches[1::2], strict=True))
    has_system = messages[0]["role"] == "system"

    def met(condition: str, i: int, role: str) -> bool:
        return {
            'if eq .Role "system"': role == "system",
            'else if eq .Role "assistant"': role == "assistant",
            "else if eq $i 0": i == 0,
            "else if and (eq $i 1) $.System": i == 1 and has_system,
            "else": True,
        }[condition]

    shown = [
        next(words for condition, words in pairs if met(condition, i, message["role"])).replace(
            "{{ .Content }}", message["content"]
        )
        for i, message in enumerate(messages)
    ]
    return ("".join(shown) + rest).replace('{{ "{{" }}', "{{")
