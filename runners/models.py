"""Loading a model: weights in the right dtypes, what trains and what does not, adapters, stop tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from runners.errors import UserError, did_you_mean, is_out_of_memory, show
from runners.functions import resolve_function, told
from runners.model_files import read_json, resolve_model, tokenizer_pickle
from runners.sections import LoraConfig, ModelConfig
from runners.tensor_header import check_header

_MAX_LAYERS = 10_000

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from runners.platform import Platform

Loader = Callable[[Path, dict], nn.Module]


@attrs.frozen(eq=False)
class LoadedModel:
    """A model ready for `Policy.from_module(loaded.module, compute_dtype=loaded.compute_dtype)`."""

    module: nn.Module  # trainable leaves in the master dtype, the others in the compute dtype
    tokenizer: TokenizerWrapper
    config: dict  # config.json as mlx-lm reads it
    path: Path  # the folder it was loaded from
    source: str  # the config's model.path
    tune: str  # "full" | "lora" | "dora"
    adapter: dict | None  # mlx-lm's lora_parameters and num_layers; None where tune is "full"
    compute_dtype: mx.Dtype
    own_dtypes: dict[str, mx.Dtype]  # flat name -> the dtype in the model's files; final/ is written in these
    own_dtype: mx.Dtype  # the one that most of its floating weights have
    frozen: dict[str, mx.array]  # flat name -> leaf that does not train
    eos_ids: tuple[int, ...]
    num_parameters: int  # of the model without adapters; packed weights counted unpacked
    num_trainable: int
    notices: tuple[str, ...] = ()

    @property
    def quantized(self) -> bool:
        """Whether any layer's weights are packed."""
        return any(hasattr(module, "bits") for _, module in self.module.named_modules())


def load_model(
    settings: ModelConfig, platform: Platform, *, seed: int = 0, folders: Sequence[Path] = ()
) -> LoadedModel:
    """Loads, checks and prepares the model that [model] names; `seed` draws the adapters' first values.

    `folders` is where a `loader` is looked for, as `resolve_function` does.

    Raises UserError: the folder is incomplete, the architecture unknown, weights are missing, unexpected or
    not finite, the tokenizer's vocabulary exceeds the embedding, `tune = "full"` meets packed weights,
    `lora.keys` or `lora.layers` name what the model does not have.
    """
    from mlx_lm.utils import get_total_parameters

    loader = own_loader(settings.loader, folders)
    path = resolve_model(settings.path, own_loader=loader is not None)
    module, config, tokenizer, notices = read_model(path, settings.trust_remote_code, loader)
    own_dtypes = {name: leaf.dtype for name, leaf in flat(module.parameters()).items()}
    own_dtype = _main_dtype(module)
    compute_dtype = choose_dtype(settings.dtype, platform, module)
    num_parameters = get_total_parameters(module)

    adapter = None
    if settings.tune != "full":
        # Before the adapters: DoRA measures the weights as they are computed with.
        cast_floating(module, compute_dtype)
        adapter = _add_adapters(module, settings.tune, settings.lora, seed)
    elif any(hasattr(layer, "bits") for _, layer in module.named_modules()):
        raise UserError(
            f'model.tune = "full", but the weights of {path} are quantized, which leaves nothing to train; '
            'wanted model.tune = "lora" or "dora", or an unquantized model'
        )
    _cast(module, flat(module.trainable_parameters()), getattr(mx, settings.master))
    trainable = flat(module.trainable_parameters())
    frozen = {name: leaf for name, leaf in flat(module.parameters()).items() if name not in trainable}
    mx.eval(module.parameters())
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        config=config,
        path=path,
        source=settings.path,
        tune=settings.tune,
        adapter=adapter,
        compute_dtype=compute_dtype,
        own_dtypes=own_dtypes,
        own_dtype=own_dtype,
        frozen=frozen,
        eos_ids=tuple(sorted(tokenizer.eos_token_ids)),
        num_parameters=num_parameters,
        num_trainable=sum(leaf.size for leaf in trainable.values()),
        notices=notices,
    )


def read_model(
    path: Path, trust_remote_code: bool = False, loader: Loader | None = None
) -> tuple[nn.Module, dict, TokenizerWrapper, tuple[str, ...]]:
    """The module of a checked folder as its files have it, its config, its tokenizer, and notices.

    Raises UserError for all that `load_model` refuses in the files themselves.
    """
    module, config = load_module(path, trust_remote_code, loader)
    tokenizer = load_tokenizer(path, config, trust_remote_code)
    notices = check_vocabulary(tokenizer, vocabulary_rows(module, config), path)
    _check_finite(module, path)
    return module, config, tokenizer, notices


def flat(tree: Any) -> dict[str, mx.array]:
    """The arrays of a parameter tree by dotted name, in the tree's order."""
    return cast("dict[str, mx.array]", dict(tree_flatten(tree)))


def vocabulary_rows(module: nn.Module, config: dict) -> int:
    """How many token ids the model knows: the rows of its token embedding."""
    rows = [
        layer.weight.shape[0]
        for _, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding)
    ]
    stated = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if stated in rows or not rows:
        return int(stated or 0)
    return max(rows)


def check_vocabulary(tokenizer: TokenizerWrapper, rows: int, path: Path) -> tuple[str, ...]:
    """Refuses a tokenizer whose ids exceed the embedding: MLX reads past the table's end without a word.

    Added tokens beyond it are only told of: some models ship with such, and plain text never holds them.
    Raises UserError for ids of the vocabulary itself and of end-of-text tokens.
    """
    vocabulary = tokenizer.get_vocab()
    added = set(getattr(tokenizer, "added_tokens_decoder", {}))
    plain = max((i for i in vocabulary.values() if i not in added), default=-1)
    ends = [i for i in tokenizer.eos_token_ids if i >= rows]
    if plain >= rows or ends:
        found = f"token id {plain}" if plain >= rows else f"the end-of-text id {ends[0]}"
        raise UserError(
            f"{path}: the tokenizer has {found}, the model's embedding only {rows} rows; "
            "they do not belong together"
        )
    if not tokenizer.eos_token_ids:
        return (f"{path}: no end-of-text token is known, so every completion runs to its full length",)
    beyond = sorted(i for i in added if i >= rows)
    if beyond:
        return (f"{len(beyond)} added tokens lie beyond the model's embedding and cannot be used",)
    return ()


def own_loader(name: str, folders: Sequence[Path] = (), key: str = "model.loader") -> Loader | None:
    """The function that a config's `model.loader` names; None where it is empty.

    Raises UserError as `resolve_function` does.
    """
    return resolve_function(name, folders, key=key, takes=("folder", "config")) if name else None


def load_module(path: Path, trust_remote_code: bool, loader: Loader | None = None) -> tuple[nn.Module, dict]:
    """The module of a checked folder, its weights perhaps still to be read, and its config.

    By mlx-lm, or by a function of the user's own: `loader(folder, config)`, with the object in config.json,
    returns an `mlx.nn.Module` that is called as mlx-lm's models are: `module(tokens_bl, cache=None)` gives
    logits [B,L,V], and its blocks are `module.layers` (a key-value cache each, unless it has `make_cache`).

    Raises UserError where it cannot be loaded.
    """
    if loader is not None:
        return _by_loader(path, loader)
    from mlx_lm import utils

    _check_layers(read_json(path / "config.json"), path)
    for file in sorted(path.glob("model*.safetensors")):
        check_header(file)
    try:
        return utils.load_model(path, lazy=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # of mlx-lm's module for a config that anyone may have written
        if is_out_of_memory(error):
            raise
        message = f"config.json has no key {error}" if isinstance(error, KeyError) else str(error)
        if "trust_remote_code" in message:
            message = "it brings its own model code, which runs only with model.trust_remote_code = true"
        raise UserError(f"{path}: the model cannot be loaded: {_one_line(message)}") from error


def _by_loader(path: Path, loader: Loader) -> tuple[nn.Module, dict]:
    name = f"model.loader {getattr(loader, '__name__', type(loader).__name__)}"
    config = read_json(path / "config.json")
    try:
        module = loader(path, dict(config))
    except Exception as error:  # of a function of the user's own: each is theirs to see
        source = getattr(getattr(loader, "__code__", None), "co_filename", None)
        raise UserError(f"{path}: {name} failed: {told(error, source)}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{path}: {name} returned {type(module).__name__}; wanted an mlx.nn.Module")
    if not hasattr(module, "layers"):
        raise UserError(
            f"{path}: the {type(module).__name__} of {name} has no `layers`; wanted its blocks there"
        )
    return module, config


def _check_layers(config: dict, path: Path) -> None:
    # Modules are built layer by layer before a weight is looked at: a billion of them would never end.
    for name in ("num_hidden_layers", "n_layers", "n_layer", "num_layers"):
        count = config.get(name)
        if isinstance(count, int) and count > _MAX_LAYERS:
            raise UserError(f"{path}/config.json: {name} is {show(count)}, wanted {_MAX_LAYERS:,} at most")


def load_tokenizer(path: Path, config: dict, trust_remote_code: bool = False) -> TokenizerWrapper:
    """The tokenizer of a checked folder, nanochat's or transformers'; UserError where it cannot be loaded."""
    pickled = tokenizer_pickle(path)
    if pickled is not None:
        from runners.tiktoken_tokenizer import load_tiktoken

        stated = config.get("eos_token_id")
        return load_tiktoken(
            pickled, stated if isinstance(stated, list) else [] if stated is None else [stated]
        )
    from mlx_lm import utils

    # Told neither way, transformers asks on the terminal whether to run a stranger's code.
    own_code = {"trust_remote_code": trust_remote_code}
    try:
        return utils.load_tokenizer(path, own_code, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # tokenizers raises plain Exception for a malformed tokenizer.json
        raise UserError(f"{path}: the tokenizer cannot be loaded: {_one_line(str(error))}") from error


def _one_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:3]) + (" ..." if len(lines) > 3 else "")


def _check_finite(module: nn.Module, path: Path) -> None:
    for name, leaf in flat(module.parameters()).items():
        if mx.issubdtype(leaf.dtype, mx.floating) and not _finite(leaf):
            raise UserError(f"{path}: the weight {name} holds NaN or infinity")


def _finite(leaf: mx.array) -> bool:
    """Whether no entry is NaN or infinite, read from the bits: on a CPU ten times as fast as `mx.isfinite`.

    With all bits of the exponent set, and only so, a positive entry is the largest of signed integers, and a
    negative one of unsigned ones.
    """
    signed, unsigned = (mx.int32, mx.uint32) if leaf.dtype == mx.float32 else (mx.int16, mx.uint16)
    infinity = mx.array(float("inf"), leaf.dtype)
    positive, negative = (mx.max(leaf.view(kind)) for kind in (signed, unsigned))
    return bool(((positive < infinity.view(signed)) & (negative < (-infinity).view(unsigned))).item())


def _main_dtype(module: nn.Module) -> mx.Dtype:
    sizes: Counter[mx.Dtype] = Counter()
    for leaf in flat(module.parameters()).values():
        if mx.issubdtype(leaf.dtype, mx.floating):
            sizes[leaf.dtype] += leaf.size
    return sizes.most_common(1)[0][0]


def choose_dtype(wish: str, platform: Platform, module: nn.Module) -> mx.Dtype:
    """The compute dtype: the one named, or with "auto" the platform's, or else the model's own."""
    name = platform.default_dtype if wish == "auto" else wish
    return _main_dtype(module) if name is None else getattr(mx, name)


def cast_floating(module: nn.Module, dtype: mx.Dtype) -> None:
    """All floating leaves in one dtype; packed integers stay."""
    _cast(module, flat(module.parameters()), dtype)


def _cast(module: nn.Module, leaves: dict[str, mx.array], dtype: mx.Dtype) -> None:
    floating = {name: leaf for name, leaf in leaves.items() if mx.issubdtype(leaf.dtype, mx.floating)}
    module.update(tree_unflatten([(name, leaf.astype(dtype)) for name, leaf in floating.items()]))


def _add_adapters(module: nn.Module, tune: str, lora: LoraConfig, seed: int) -> dict:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    keys = list(lora.keys)
    known = _adaptable(module)
    for key in keys:
        if key not in known:
            near = did_you_mean(key, known) or f"; this model has {', '.join(sorted(known))}"
            raise UserError(f'model.lora.keys: "{key}" is no linear or embedding layer of this model{near}')
    count = len(_layers(module))
    if lora.layers > count:
        raise UserError(f"model.lora.layers = {lora.layers}, but the model has {count} layers; -1 takes all")
    parameters: dict[str, Any] = {"rank": lora.rank, "scale": lora.scale, "dropout": 0.0}
    if keys:
        parameters["keys"] = keys
    mx.random.seed(seed)
    module.freeze()
    try:
        linear_to_lora_layers(module, lora.layers, parameters, use_dora=tune == "dora")
    except ValueError as error:
        raise UserError(f'model.tune = "{tune}": {error}') from error
    return {"num_layers": lora.layers, "lora_parameters": parameters}


def _layers(module: nn.Module) -> list[nn.Module]:
    return cast("list[nn.Module]", module.layers)


def _adaptable(module: nn.Module) -> set[str]:
    """Names that `lora.keys` may hold: relative to a layer, or from the root for the parts outside."""
    kinds = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)

    def names(root: nn.Module) -> set[str]:
        return {
            name for name, part in root.named_modules() if isinstance(part, kinds) or hasattr(part, "to_lora")
        }

    inside = {name for layer in _layers(module) for name in names(layer)}
    outside = {name for name in names(module) if ".layers." not in f".{name}"}
    return inside | outside
