"""Reads and checks a model folder (module, config and tokenizer), and converts the dtypes of the
module's leaves.
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
    """Reads the module, the config and the tokenizer from a checked folder. Also returns notices.

    Raises UserError for each fault in the files for which `load_model` does.
    """
    module, config = load_module(path, trust_remote_code, loader)
    tokenizer = load_tokenizer(path, trust_remote_code)
    notices = check_vocabulary_size(tokenizer, vocabulary_rows(module, config), path)
    check_finite(named_leaves(module.parameters()), path)
    return module, config, tokenizer, notices


def custom_loader(
    name: str, folders: Sequence[Path] = (), key: str = "model.loader"
) -> Loader | None:
    """Returns the function that a config's `model.loader` names, or None if the key is empty.

    Raises the errors of `resolve_function`.
    """
    return resolve_function(name, folders, key=key, takes=("folder", "config")) if name else None


def load_module(
    path: Path, trust_remote_code: bool, loader: Loader | None = None
) -> tuple[nn.Module, dict]:
    """Reads the module and the config from a checked folder. The module's weights may still be
    lazy.

    The module is created by mlx-lm or by a custom function. `loader(folder, config)`, where
    `config` is the object in config.json, returns an `mlx.nn.Module` that is called like mlx-lm's
    models: `module(tokens_bl, cache=None)` returns logits [B,L,V], and its blocks are
    `module.layers`. Each block has a key-value cache, unless the module defines `make_cache`.

    Raises UserError if the module cannot be loaded.
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
    """Loads the tokenizer from a checked folder. Raises UserError if the tokenizer cannot be
    loaded, or if its first use takes more time or memory than any real tokenizer needs.
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
    """Returns the model's number of token ids, which equals the number of rows in its token
    embedding.
    """
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
    """Rejects a tokenizer with ids beyond the embedding, for which MLX would silently read past the
    table's end.

    Added tokens beyond the embedding are only reported, because some models ship with such tokens
    and plain text never contains them. Raises UserError if an id in the vocabulary itself, or an
    end-of-text token, is beyond the embedding.
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
    """Raises UserError, with the weight's name, if a floating leaf contains NaN or infinity."""
    floating = {name: leaf for name, leaf in leaves.items() if leaf.size and is_floating(leaf)}
    materialize_in_parts(floating)
    finite = {name: _finite(leaf) for name, leaf in floating.items()}
    mx.eval(finite)
    for name, answer in finite.items():
        if not answer.item():
            raise UserError(f"{path}: the weight {name} contains NaN or infinity")


def is_floating(leaf: mx.array) -> bool:
    """Returns whether an array contains floating-point numbers."""
    return bool(mx.issubdtype(leaf.dtype, mx.floating))


def _finite(leaf: mx.array) -> mx.array:
    """Returns whether all entries are finite. The bits are compared as integers, which on a CPU is
    ten times as fast as `mx.isfinite`.

    An entry that is not finite has all exponent bits set, so it is at the top of the integer range:
    signed for positive entries, unsigned for negative entries.
    """
    signed, unsigned = (mx.int32, mx.uint32) if leaf.dtype == mx.float32 else (mx.int16, mx.uint16)
    infinity = mx.array(float("inf"), leaf.dtype)
    positive, negative = (mx.max(leaf.view(kind)) for kind in (signed, unsigned))
    return (positive < infinity.view(signed)) & (negative < (-infinity).view(unsigned))


def choose_dtype(wish: str, platform: Platform, module: nn.Module) -> mx.Dtype:
    """Returns the compute dtype: the one in `wish` or, with "auto", float32 on a CPU and the
    model's own dtype on a GPU.

    On a CPU a bf16 matmul does not use the BLAS and is an order of magnitude slower than float32.
    """
    if wish != "auto":
        return getattr(mx, wish)
    return mx.float32 if platform.backend == "cpu" else main_dtype(module)


def cast_floating(
    module: nn.Module, dtype: mx.Dtype, leaves: dict[str, mx.array] | None = None
) -> None:
    """Converts all floating leaves, or only those in `leaves`, to one dtype. Packed integers do not
    change.
    """
    leaves = named_leaves(module.parameters()) if leaves is None else leaves
    cast = [(name, leaf.astype(dtype)) for name, leaf in leaves.items() if is_floating(leaf)]
    module.update(tree_unflatten(cast))


def main_dtype(module: nn.Module) -> mx.Dtype:
    """Returns the most common dtype among floating weights, counted by entries.

    Raises UserError if all weights are integers.
    """
    sizes: Counter[mx.Dtype] = Counter()
    for leaf in filter(is_floating, named_leaves(module.parameters()).values()):
        sizes[leaf.dtype] += leaf.size
    if not sizes:
        raise UserError("the model's weights: expected floating point numbers, found only integers")
    return sizes.most_common(1)[0][0]
