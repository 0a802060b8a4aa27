"""Reads nanochat's files (PyTorch checkpoints and tokenizer.pkl) without running code from their
pickles.

model_*.pt and meta_*.json become mlx-lm's weights and config. The tensors keep their names, because
mlx-lm uses nanochat's. PyTorch is required (extra `torch`). The file is memory-mapped and unpickled
with `weights_only`. tokenizer.pkl is a pickled `tiktoken.Encoding`: its reader accepts only the
opcodes for texts, bytes, numbers and tables, and a single name, Encoding, for which it creates an
empty object.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from runners.errors import UserError, error_line, first_line, listed, show, user_errors
from runners.files.json_files import read_json, write_json
from runners.machine.versions import import_extra
from runners.models.json_keys import NANOCHAT, NANOCHAT_SIZES, check_keys
from runners.tokenization.tiktoken_encoding import write_tokenizer

if TYPE_CHECKING:
    import tiktoken
    import torch  # pyright: ignore[reportMissingImports]

_MODEL = re.compile(r"model_(\d+)\.pt")
_COMPILED = "_orig_mod."  # torch.compile puts it before every name
_VOCABULARY = ("transformer.wte.weight", "lm_head.weight")  # a row for each id
PICKLE_NAME = "tokenizer.pkl"
# Opcodes that protocols 4 and 5 write for an Encoding. None of them calls a named object, builds
# nested tuples, or reserves more memory than the file has bytes.
_ADMITTED = {
    *(
        "PROTO",
        "FRAME",
        "MEMOIZE",
        "BINGET",
        "LONG_BINGET",
        "STACK_GLOBAL",
        "NEWOBJ",
        "BUILD",
        "STOP",
    ),
    *(
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "SHORT_BINBYTES",
        "BINBYTES",
        "BININT",
        "BININT1",
        "BININT2",
    ),
    *("EMPTY_DICT", "EMPTY_TUPLE", "MARK", "SETITEM", "SETITEMS"),
}
_FIELDS = {"name": str, "pat_str": str, "mergeable_ranks": dict, "special_tokens": dict}


def find_checkpoint(folder: Path, step: int | None = None) -> tuple[Path, Path, Path] | None:
    """Finds model_*.pt, meta_*.json and tokenizer.pkl for the given step in a folder, by default
    the last step. Returns None if the folder has no checkpoints.

    nanochat's own layout is BASE/chatsft_checkpoints/d20/model_000650.pt and
    BASE/tokenizer/tokenizer.pkl, but the tokenizer may also be in the checkpoint's folder. Raises
    UserError if that step or the tokenizer is missing.
    """
    matches = [(_MODEL.fullmatch(file.name), file) for file in folder.glob("model_*.pt")]
    steps = {int(match[1]): file for match, file in matches if match}
    if step is not None and step not in steps:
        raise UserError(f"{folder}: no step {step}; found {listed([*map(str, sorted(steps))])}")
    if not steps:
        return None
    model = steps[max(steps) if step is None else step]
    meta = model.with_name(f"meta_{model.stem.removeprefix('model_')}.json")
    places = [folder, *folder.resolve().parents[:2]]
    pickled = next(filter(None, map(find_pickle, places)), None)
    if pickled is None:
        raise UserError(
            f"{folder}: {PICKLE_NAME} is missing, both here and in {places[-1] / 'tokenizer'}"
        )
    return model, meta, pickled


def convert_checkpoint(model: Path, meta: Path, tokenizer: Path, target: Path) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files into an existing folder.

    Padding rows of the embedding and the head are removed, because nanochat ignores them. Raises
    UserError without PyTorch, and for files that cannot be read. Unsupported tensors are only
    detected when mlx-lm loads the result.
    """
    sizes = _sizes(meta)
    config = {
        "model_type": "nanochat",
        "architectures": ["NanoChatForCausalLM"],
        "hidden_size": sizes["n_embd"],
        "num_hidden_layers": sizes["n_layer"],
        "num_attention_heads": sizes["n_head"],
        "num_key_value_heads": sizes["n_kv_head"],
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": sizes["sequence_len"],
        "intermediate_size": 4 * sizes["n_embd"],
    }
    rows = sizes["vocab_size"]
    tensors = {
        name: (x[:rows] if name in _VOCABULARY else x).contiguous()
        for name, x in _tensors(model).items()
    }
    from safetensors.torch import save_file

    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "mlx"})
    write_json(target / "config.json", config)
    write_tokenizer(read_encoding(tokenizer), target)


def _sizes(meta: Path) -> dict[str, int]:
    content = read_json(meta)
    check_keys(content, meta, NANOCHAT)
    sizes = dict(content["model_config"])
    # A pattern with only long windows is full attention, as in mlx-lm's model.
    if {*str(sizes.get("window_pattern"))} == {"L"}:
        del sizes["window_pattern"]
    others = sizes.keys() - {*NANOCHAT_SIZES}
    if others:
        raise UserError(
            f"{meta}: model_config contains {listed(sorted(others))}, which mlx-lm's nanochat "
            f"does not support"
        )
    return sizes


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    torch = import_extra("torch", "torch", "reading a .pt file requires PyTorch")
    # errors of pickle, zip and torch have no common class
    with user_errors(
        f"{file}: cannot be read as a checkpoint with tensors", Exception, why=first_line
    ):
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {str(name).removeprefix(_COMPILED): content[name].detach() for name in content}


def find_pickle(folder: Path) -> Path | None:
    """Returns the tokenizer.pkl in a folder or in its subfolder `tokenizer` (nanochat's layout), or
    None.
    """
    places = (folder / PICKLE_NAME, folder / "tokenizer" / PICKLE_NAME)
    return next(filter(Path.is_file, places), None)


def read_encoding(file: Path) -> tiktoken.Encoding:
    """Reads a pickled encoding (protocol 4 or 5).

    Raises UserError if the file cannot be read, if it refers to anything other than tiktoken's
    Encoding (which is neither imported nor called), or if its content is not a vocabulary.
    """
    import tiktoken

    try:
        content = file.read_bytes()
        for opcode, _, _ in pickletools.genops(content):
            if opcode.name not in _ADMITTED:
                raise UserError(f"found the opcode {opcode.name}; no code was run")
        return tiktoken.Encoding(**_checked(vars(_Reader(io.BytesIO(content)).load())))
    except Exception as error:  # a broken pickle, or pattern, can fail with any error
        why = str(error) if isinstance(error, UserError) else error_line(error)
        raise UserError(f"{file}: this is not a pickle of tiktoken's Encoding: {why}") from error


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Replaces Encoding with an object that keeps its state; raises UserError for other names.
        Nothing is imported.
        """
        name = f"{module_name}.{global_name}"
        if name != "tiktoken.core.Encoding":
            raise UserError(f"it refers to {show(name)}; no code was run")
        return SimpleNamespace


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state if it is a valid vocabulary. tiktoken itself accepts invalid ones and
    crashes later.
    """
    if any(type(state.get(key)) is not kind for key, kind in _FIELDS.items()):
        raise UserError("it does not contain a vocabulary")
    ranks = state["mergeable_ranks"]
    special = state["special_tokens"]
    ids = [*ranks.values(), *special.values()]
    is_vocabulary = (
        {*map(type, ranks)} <= {bytes}
        and {*map(type, special)} <= {str}
        and {*map(type, ids)} <= {int}
        and len(set(ids)) == len(ids)
        and all(0 <= number < 2**31 for number in ids)
    )
    if not is_vocabulary:
        raise UserError(
            "its vocabulary does not map bytes and names to distinct numbers below 2^31"
        )
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError("it lacks tokens for some bytes, so some texts cannot be tokenized")
    return {key: state[key] for key in _FIELDS}
