"""Converts nanochat's PyTorch checkpoints, model_*.pt with meta_*.json, to mlx-lm's weights and config.

The tensors keep their names: mlx-lm uses nanochat's. This needs PyTorch (extra `torch`). The file is mapped,
not read, and unpickled with `weights_only`, so that it cannot run code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from runners.conversion.tokenizer_pickle import PICKLE_NAME, find_pickle, read_encoding
from runners.errors import UserError, first_line, listed
from runners.files.json_files import read_json, write_json
from runners.machine.versions import install_hint
from runners.tokenization.tiktoken_encoding import write_tokenizer

if TYPE_CHECKING:
    import torch  # pyright: ignore[reportMissingImports]

_MODEL = re.compile(r"model_(\d+)\.pt")
_COMPILED = "_orig_mod."  # torch.compile puts it before every name
_SIZES = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")
_VOCABULARY = ("transformer.wte.weight", "lm_head.weight")  # a row for each id


@attrs.frozen
class Checkpoint:
    """The files of one step."""

    model: Path
    meta: Path
    tokenizer: Path


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds nanochat's checkpoints."""
    return folder.is_dir() and any(_MODEL.fullmatch(file.name) for file in folder.iterdir())


def find_checkpoint(folder: Path, step: int | None = None) -> Checkpoint:
    """The last step in a folder, or the given one, with the tokenizer from there or from nanochat's folder.

    nanochat's own layout is BASE/chatsft_checkpoints/d20/model_000650.pt and BASE/tokenizer/tokenizer.pkl.
    Raises UserError if a file is missing.
    """
    steps = {int(m[1]): file for file in folder.iterdir() if (m := _MODEL.fullmatch(file.name))}
    if step is not None and step not in steps:
        raise UserError(f"{folder}: no step {step}; found {', '.join(map(str, sorted(steps)))}")
    model = steps[max(steps) if step is None else step]
    meta = model.with_name(f"meta_{model.stem.removeprefix('model_')}.json")
    if not meta.is_file():
        raise UserError(f"{folder}: {meta.name} is missing beside {model.name}; it has the model's sizes")
    places = [folder, *folder.resolve().parents[:2]]
    found = next((file for place in places if (file := find_pickle(place))), None)
    if found is None:
        raise UserError(f"{folder}: {PICKLE_NAME} is missing, here and in {places[-1] / 'tokenizer'}")
    return Checkpoint(model, meta, found)


def convert_checkpoint(checkpoint: Checkpoint, target: Path) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files into an existing folder.

    Padding rows of the embedding and the head are left out, because nanochat ignores them. Raises UserError
    without PyTorch, and for files that cannot be read. Whether mlx-lm has all tensors is seen by loading it.
    """
    sizes = _sizes(checkpoint.meta)
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
    tensors, rows = _tensors(checkpoint.model), sizes["vocab_size"]
    from safetensors.torch import save_file

    save_file(
        {name: (x[:rows] if name in _VOCABULARY else x).contiguous() for name, x in tensors.items()},
        str(target / "model.safetensors"),
        metadata={"format": "mlx"},
    )
    write_json(target / "config.json", config)
    write_tokenizer(read_encoding(checkpoint.tokenizer), target)


def _sizes(meta: Path) -> dict[str, int]:
    found = read_json(meta).get("model_config")
    if not isinstance(found, Mapping):
        raise UserError(f"{meta}: the key model_config is missing, which has the model's sizes")
    for name in _SIZES:
        if type(size := found.get(name)) is not int or size < 1:
            raise UserError(f"{meta}: model_config.{name}: expected a positive integer, found {size!r}")
    # A pattern of only long windows is full attention, as in mlx-lm's model.
    plain = {name for name in found if name == "window_pattern" and set(str(found[name])) == {"L"}}
    if others := found.keys() - {*_SIZES} - plain:
        raise UserError(
            f"{meta}: model_config has {listed(sorted(others))}, which mlx-lm's nanochat does not have"
        )
    return {name: found[name] for name in _SIZES}


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"a .pt file needs PyTorch to be read: {install_hint('torch')}") from error
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {str(name).removeprefix(_COMPILED): content[name].detach() for name in content}
    except Exception as error:  # errors of pickle, zip and torch have no common class
        raise UserError(f"{file}: cannot be read as a checkpoint of tensors ({first_line(error)})") from error
