"""Creates a small random model of each of mlx-lm's architectures."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import pkgutil
from typing import Any

from benchmarks.architectures.small_settings import AROUND, SETTINGS, SIZES, TEXT

# Parts of models that mlx-lm keeps beside them: no module of these has a `Model`.
PARTS = (
    "activations",
    "base",
    "bitlinear_layers",
    "cache",
    "gated_delta",
    "mla",
    "pipeline",
    "rope_utils",
    "ssm",
    "switch_layers",
)


def modules() -> list[str]:
    """Every module of mlx-lm's models folder, except those that are only parts of models."""
    import mlx_lm.models

    found = (module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))
    return sorted(name for name in found if name not in PARTS)


def load_module(name: str) -> Any:
    """mlx-lm's module of that name.

    Raises:
        ImportError: the module cannot be imported; the message contains its output.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return importlib.import_module(f"mlx_lm.models.{name}")
    except SystemExit as error:  # one of them ends the process where a package is missing
        raise ImportError(printed.getvalue().strip() or "it ends the process") from error


def small_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a small model of this module."""
    inner = TEXT.get(name, (name, "ModelArgs"))
    sizes = _sized(getattr(load_module(inner[0]), inner[1]))
    config = {"model_type": inner[0]} | sizes | SETTINGS.get(name, {}) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    if name not in TEXT:
        return config
    return {"model_type": name, "text_config": config} | AROUND.get(name, {})


def small_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model of `small_config`, float32, with weights wide enough for uneven distributions."""
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_unflatten

    from grpo_fn.trees import named_leaves

    module = load_module(name)
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(small_config(name, **changes)))
    rng = np.random.default_rng(seed)
    leaves = []
    for path, leaf in named_leaves(model.parameters()).items():
        if not mx.issubdtype(leaf.dtype, mx.floating):
            continue
        noise = rng.normal(size=leaf.shape)
        wide = leaf.ndim >= 2 and "A_log" not in path and "conv" not in path
        values = noise / np.sqrt(leaf.shape[-1]) if wide else np.array(leaf.astype(mx.float32)) + 0.1 * noise
        leaves.append((path, mx.array(values, mx.float32)))
    model.update(tree_unflatten(leaves))
    mx.eval(model.parameters())
    return model


def _sized(kind: type) -> dict[str, Any]:
    return {field.name: SIZES[field.name] for field in dataclasses.fields(kind) if field.name in SIZES}
