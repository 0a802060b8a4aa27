"""Loading a model to use it: nothing trains, adapters are applied, packed weights stay packed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from runners.adapters import base_of, check_adapters, read_adapters
from runners.dtypes import cast_floating, check_experts, choose_dtype
from runners.errors import UserError
from runners.launching import launches
from runners.model_files import is_adapter_folder, resolve_model
from runners.model_reading import own_loader, read_model

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from runners.platform import Platform


@attrs.frozen(eq=False)
class InferenceModel:
    """A model ready for `g.generate(model.policy, {}, …)`, and its `module` for mlx-lm's functions."""

    module: nn.Module  # floating leaves in the compute dtype, packed ones as they are
    policy: g.Policy  # the same module; its tree of parameters is empty
    tokenizer: TokenizerWrapper
    path: Path  # the folder it was loaded from
    adapter: Path | None  # the folder of its adapters
    eos_ids: tuple[int, ...]
    launch: str  # of decoding steps, as `rollout.launch` in a config
    notices: tuple[str, ...]


def load_inference(
    model: str,
    platform: Platform,
    *,
    adapter: str = "",
    dtype: str = "auto",
    loader: str = "",
    folders: Sequence[Path] = (),
    trust_remote_code: bool = False,
) -> InferenceModel:
    """Loads a folder, a Hub name or "embedded"; a folder of adapters alone brings its base model along.

    Args:
        model: as `model.path` in a config, or a folder of adapters whose adapter_config.json names the base.
        platform: what `runners.platform.prepare` found.
        adapter: a folder with adapters.safetensors and adapter_config.json, to be applied to the model.
        dtype: of the computation; "auto" is float32 on a CPU, else the model's own.
        loader: the function that opens the folder instead of mlx-lm, as `model.loader` in a config.
        folders: where that is looked for.
        trust_remote_code: run code that comes with the model.

    Raises UserError: as `load_model` does, and where adapters are missing or do not fit the model.
    """
    own = Path(model).expanduser()
    if is_adapter_folder(own):
        if adapter:
            raise UserError(f"{model} holds adapters, and {adapter} is given as well; wanted one of them")
        adapter, model = str(own), base_of(own)
    if adapter:
        check_adapters(Path(adapter).expanduser())  # before minutes of reading
    function = own_loader(loader, folders, "--loader")
    path = resolve_model(model, "MODEL", own_loader=function is not None)
    module, _, tokenizer, notices = read_model(path, trust_remote_code, function)
    if adapter:
        notices += read_adapters(module, Path(adapter).expanduser(), path)
    module.freeze()
    module.eval()
    compute_dtype = choose_dtype(dtype, platform, module)
    check_experts(module, compute_dtype, platform, "dtype")
    cast_floating(module, compute_dtype)
    mx.async_eval(module.parameters())  # while the policy looks at what the model can do
    policy = g.Policy.for_inference(module)
    mx.eval(module.parameters())
    return InferenceModel(
        module=module,
        policy=policy,
        tokenizer=tokenizer,
        path=path,
        adapter=Path(adapter).expanduser() if adapter else None,
        eos_ids=tuple(sorted(tokenizer.eos_token_ids)),
        launch=launches(platform)[0],
        notices=notices,
    )
