"""Reads and checks a model folder: its module, config and tokenizer; the dtypes of the module's
leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from grpo_fn.trees import materialize_in_parts, named_leaves
from runners.config.user_functions import resolve_function
from runners.errors import UserError, error_line, first_lines, is_out_of_memory, user_errors
from runners.files.json_files import read_json
from runners.files.tensor_files import weight_files
from runners.models.folders import read_config
from runners.models.json_keys import end_ids
from runners.models.rope_keys import with_rope_keys
from runners.tokenization.tokenizer_check import check_tokenizer

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from runners.machine.startup import Platform

_MISTRALS = ("mistral", "ministral", "voxtral", "pixtral")
Loader = Callable[[Path, dict], nn.Module]  # from a folder and its config.json


def read_model(
    path: Path, trust_remote_code: bool = False, loader: Loader | None = None
) -> tuple[nn.Module, dict, TokenizerWrapper, tuple[str, ...]]:
    """The module of a checked folder, its config, its tokenizer, and notices.

    Raises UserError for every fault in the files that `load_model` rejects.
    """
    module, config = load_module(path, trust_remote_code, loader)
    tokenizer = load_tokenizer(path, trust_remote_code)
    notices = check_vocabulary_size(tokenizer, vocabulary_rows(module, config), path)
    check_finite(named_leaves(module.parameters()), path)
    return module, config, tokenizer, notices


def custom_loader(
    name: str, folders: Sequence[Path] = (), key: str = "model.loader"
) -> Loader | None:
    """The function that a config's `model.loader` names; None if it is empty.

    Raises the errors of `resolve_function`.
    """
    return resolve_function(name, folders, key=key, takes=("folder", "config")) if name else None


def load_module(
    path: Path, trust_remote_code: bool, loader: Loader | None = None
) -> tuple[nn.Module, dict]:
    """The module of a checked folder, whose weights may still be lazy, and its config.

    The module is created by mlx-lm or by a custom function: `loader(folder, config)`, with the
    object in config.json, returns an `mlx.nn.Module` that is called like mlx-lm's models:
    `module(tokens_bl, cache=None)` returns logits [B,L,V], and its blocks are `module.layers` (with
    a key-value cache each, unless it has `make_cache`).

    Raises UserError if it cannot be loaded.
    """
    if loader is not None:
        return _by_loader(path, loader)
    from mlx_lm import utils

    read_config(path)  # checked before mlx-lm reads it
    weight_files(path)
    try:
        # of config.json and generation_config.json
        stated = with_rope_keys(utils.load_config(path))
        return utils.load_model(
            path, lazy=True, model_config=stated, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # mlx-lm's module may fail in any way for an untrusted config
        if is_out_of_memory(error):
            raise
        message = f"config.json has no key {error}" if isinstance(error, KeyError) else str(error)
        if "trust_remote_code" in message:
            message = (
                "the folder contains its own model code, which runs only with "
                "model.trust_remote_code = true, or --trust-remote-code"
            )
        raise UserError(f"{path}: the model cannot be loaded: {first_lines(message)}") from error


def _by_loader(path: Path, loader: Loader) -> tuple[nn.Module, dict]:
    name = f"model.loader {getattr(loader, '__name__', type(loader).__name__)}"
    config = read_json(path / "config.json")
    try:
        module = loader(path, dict(config))
    except Exception as error:  # raised by the custom function: shown to the user
        source = getattr(getattr(loader, "__code__", None), "co_filename", None)
        raise UserError(f"{path}: {name} failed: {error_line(error, source)}") from error
    if not isinstance(module, nn.Module) or not hasattr(module, "layers"):
        raise UserError(
            f"{path}: {name}: expected an mlx.nn.Module with blocks as `layers`, found "
            f"{type(module).__name__}"
        )
    return module, config


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> TokenizerWrapper:
    """The tokenizer of a checked folder. Raises UserError if it cannot be loaded, or if its first
    use takes more time or memory than any real tokenizer needs.
    """
    check_tokenizer(path)
    from mlx_lm import utils

    # Without a value, transformers asks on the terminal whether to run untrusted code.
    settings = {"trust_remote_code": trust_remote_code}
    config = path / "config.json"
    family = str(read_json(config).get("model_type")) if config.exists() else ""
    if not any(name in family for name in _MISTRALS):
        settings["fix_mistral_regex"] = False  # else it may warn of a fault that only these have
    # tokenizers raises plain Exception for a malformed tokenizer.json
    with user_errors(f"{path}: the tokenizer cannot be loaded", Exception, why=first_lines):
        return utils.load_tokenizer(path, settings, eos_token_ids=end_ids(path))


def vocabulary_rows(module: nn.Module, config: dict) -> int:
    """The number of token ids of the model, which is the number of rows of its token embedding."""
    rows = [
        layer.weight.shape[0]
        for _, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding)
    ]
    stated = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if stated in rows or not rows:
        return int(stated or 0)
    return max(rows)


def check_vocabulary_size(tokenizer: TokenizerWrapper, rows: int, path: Path) -> tuple[str, ...]:
    """Rejects a tokenizer with ids beyond the embedding, because MLX silently reads past the
    table's end.

    Added tokens beyond it are only reported, because some models ship with them and plain text
    never contains them. Raises UserError for ids of the vocabulary itself and of end-of-text
    tokens.
    """
    added = set(getattr(tokenizer, "added_tokens_decoder", {}))
    most = max({*tokenizer.get_vocab().values()} - added | {*tokenizer.eos_token_ids}, default=-1)
    if most >= rows:
        raise UserError(
            f"{path}: the tokenizer has the token id {most}, but the model's embedding has only "
            f"{rows} rows; tokenizer and model do not match"
        )
    if not tokenizer.eos_token_ids:
        return (
            f"{path}: no end-of-text token is defined, so every completion runs to the length "
            f"limit",
        )
    beyond = sorted(i for i in added if i >= rows)
    if beyond:
        return (f"{len(beyond)} added tokens are outside the model's embedding and cannot be used",)
    return ()


def check_finite(leaves: Mapping[str, mx.array], path: Path) -> None:
    """Raises UserError, with the weight's name, for NaN or infinity in a floating leaf."""
    floating = {name: leaf for name, leaf in leaves.items() if leaf.size and is_floating(leaf)}
    materialize_in_parts(floating)
    finite = {name: _finite(leaf) for name, leaf in floating.items()}
    mx.eval(finite)
    for name, answer in finite.items():
        if not answer.item():
            raise UserError(f"{path}: the weight {name} contains NaN or infinity")


def is_floating(leaf: mx.array) -> bool:
    """Whether an array contains floating-point numbers."""
    return bool(mx.issubdtype(leaf.dtype, mx.floating))


def _finite(leaf: mx.array) -> mx.array:
    """Whether all entries are finite, determined from their bits; on a CPU, this is ten times as
    fast as `mx.isfinite`.

    Only entries with all bits of the exponent set are at the top of the range: positive ones as
    signed integers, negative ones as unsigned integers.
    """
    signed, unsigned = (mx.int32, mx.uint32) if leaf.dtype == mx.float32 else (mx.int16, mx.uint16)
    infinity = mx.array(float("inf"), leaf.dtype)
    positive, negative = (mx.max(leaf.view(kind)) for kind in (signed, unsigned))
    return (positive < infinity.view(signed)) & (negative < (-infinity).view(unsigned))


def choose_dtype(wish: str, platform: Platform, module: nn.Module) -> mx.Dtype:
    """The compute dtype: the given one or, with "auto", float32 on a CPU and the model's own on a
    GPU.

    On a CPU a bf16 matmul does not use the BLAS and is an order of magnitude slower than float32.
    """
    if wish != "auto":
        return getattr(mx, wish)
    return mx.float32 if platform.backend == "cpu" else main_dtype(module)


def cast_floating(
    module: nn.Module, dtype: mx.Dtype, leaves: dict[str, mx.array] | None = None
) -> None:
    """Converts all floating leaves (or only those in `leaves`) to one dtype; packed integers are
    unchanged.
    """
    leaves = named_leaves(module.parameters()) if leaves is None else leaves
    cast = [(name, leaf.astype(dtype)) for name, leaf in leaves.items() if is_floating(leaf)]
    module.update(tree_unflatten(cast))


def main_dtype(module: nn.Module) -> mx.Dtype:
    """The dtype of most floating weights, counted by entries.

    Raises UserError if all are integers.
    """
    sizes: Counter[mx.Dtype] = Counter()
    for leaf in filter(is_floating, named_leaves(module.parameters()).values()):
        sizes[leaf.dtype] += leaf.size
    if not sizes:
        raise UserError("the model's weights: expected floating point numbers, found only integers")
    return sizes.most_common(1)[0][0]
