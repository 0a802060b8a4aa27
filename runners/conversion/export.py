"""Exports a model: a folder with merged adapters, optionally quantized, a model card, and an
upload."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import mlx.nn as nn
from mlx.utils import tree_unflatten

from runners.checkpoints.manifest import model_of_run
from runners.config.loading import recorded_in
from runners.config.names import HUB_NAME
from runners.conversion.convert import check_apart, write_weights
from runners.conversion.gguf.writing import write_gguf
from runners.conversion.model_card import RunFacts, model_card, run_facts
from runners.conversion.modelfile import modelfile
from runners.conversion.packing import NOT_PACKED, QuantizationOptions, repack
from runners.errors import UserError, first_line
from runners.files.durable import check_target, new_folder, save_text
from runners.files.json_files import read_json, write_json
from runners.files.tensor_files import save_arrays
from runners.inference.inference_model import find_model
from runners.models.adapters import (
    ADAPTER_CONFIG,
    base_of,
    fused_layers,
    read_adapters,
    read_folder,
)
from runners.models.folders import copy_companions
from runners.models.model_reader import read_model
from runners.models.peft_adapters import PEFT_ADAPTERS, to_peft
from runners.tokenization.prompt_settings import PromptSettings, read_prompt, write_prompt

_LICENCE = ("license", "license_name", "license_link")
_IS_LICENCE = re.compile(r"(https://)?[A-Za-z0-9 ._/+#()-]{1,200}")


@attrs.frozen(eq=False)
class Opened:
    """A model with merged adapters, ready for export."""

    folder: Path  # the model's folder, or its adapters' folder
    model: Path  # the model's folder, or the folder of the base model
    # the base model, as its run or its adapters name it: a folder or a Hub name, or ""
    origin: str
    module: nn.Module
    config: dict[str, Any]
    tokenizer: Any
    prompt: PromptSettings | None  # the prompt format of training
    facts: RunFacts | None  # about its run

    @property
    def base(self) -> str:
        """The model's Hub name, or ""."""
        if "/" in self.origin and HUB_NAME.fullmatch(self.origin):
            return "" if Path(self.origin).exists() else self.origin
        return ""


def open_source(
    name: str,
    target: Path,
    *,
    force: bool = False,
    trust_remote_code: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> Opened:
    """Opens the model in a run's folder, a model folder or an adapter folder, or a Hub model, to be
    exported to a target. An existing target requires `force`.

    For a run, the model is `final` or, without `final`, the newest complete checkpoint. mlx-lm's
    `fuse` merges adapters into the weights. If the weights are packed, the layers with adapters are
    unpacked, because rounding them again would undo much of a small update. `note` receives
    notices.

    Raises UserError if parts are missing or unsuitable, or if the target cannot be written.
    """
    check_target(target, force)
    model, adapters = find_model(name, "", note)
    folder = adapters or model
    check_apart(target, folder, model)
    origin = base_of(adapters) if adapters else _origin(name, model)
    module, config, tokenizer, _ = read_model(model, trust_remote_code)
    if adapters:
        read_adapters(module, folder, model)
        fused = fused_layers(module)
        module.update_modules(tree_unflatten(list(fused.items())))
        config.pop("quantization_config", None)
        if "quantization" in config:
            config["quantization"] |= dict.fromkeys(fused, False)
    return Opened(
        folder, model, origin, module, config, tokenizer, read_prompt(folder), run_facts(folder)
    )


def export_folder(
    opened: Opened,
    target: Path,
    *,
    quantization: QuantizationOptions,
    dtype: str = "",
    force: bool = False,
    title: str = "",
    online: bool = False,
) -> None:
    """Writes a model folder with a card, atomically.

    Args:
        target: the new folder; an existing one requires `force`.
        quantization: how mlx-lm packs the weights; packed weights are unpacked first.
        dtype: "float32", "float16" or "bfloat16"; "" keeps the source's.
        title: the card's title; "" uses the target's name.
        online: whether to look up the base model's licence on the Hub if necessary.

    Raises UserError for an unsuitable quantization, and if writing fails.
    """
    module, config = repack(
        opened.module, opened.config, quantization, dtype, dequantize=quantization.wanted
    )
    with new_folder(target, replace=force) as temporary:
        write_weights(temporary, module, config)
        copy_companions(opened.model, temporary)
        write_prompt(temporary, opened.prompt)
        card = model_card(
            title or target.name,
            opened.facts,
            opened.prompt,
            quantized=_packing(config),
            base=opened.base,
            licence=_licence(opened, online),
        )
        (temporary / "README.md").write_text(card, encoding="utf-8")


def export_gguf(opened: Opened, file: Path, kind: str, *, force: bool = False) -> Path:
    """Writes one file for llama.cpp, and next to it a Modelfile for Ollama. Returns the Modelfile's
    path.

    Raises the errors of `write_gguf` and `modelfile`.
    """
    ollama = file.parent / "Modelfile"
    check_target(ollama, force)
    text = modelfile(file.name, opened.tokenizer, opened.prompt)
    module, config = repack(opened.module, opened.config, NOT_PACKED, dequantize=True)
    folder = opened.folder.resolve()
    name = folder.parent.name if opened.facts else folder.name
    write_gguf(file, module, config, opened.tokenizer, kind, name=name, force=force)
    save_text(ollama, text)
    return ollama


def export_peft(name: str, target: Path, *, force: bool, note: Callable[[str], None]) -> None:
    """Writes a run's or a folder's adapters for PEFT, atomically.

    Raises UserError for a model without adapters, and for adapters that PEFT cannot represent.
    """
    check_target(target, force)
    folder = Path(model_of_run(name, note)).expanduser()
    check_apart(target, folder)
    adapters = read_folder(folder)
    config, theirs = to_peft(adapters.settings, adapters.tensors)
    prompt = read_prompt(folder)
    with new_folder(target, replace=force) as temporary:
        save_arrays(temporary / PEFT_ADAPTERS, theirs, {"format": "pt"})
        write_json(temporary / ADAPTER_CONFIG, config)
        write_prompt(temporary, prompt)


def upload(folder: Path, repo: str, *, private: bool = False) -> str:
    """Uploads a folder to the Hub, creating the repository if necessary, and returns the commit's
    URL.

    mlx-lm's `upload_to_hub` is not used, because it replaces the folder's card. Raises UserError if
    the Hub refuses or cannot be reached.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi

    api = HfApi(library_name="grpo_fn")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload with grpo export"
        )
    except (HTTPError, OSError, ValueError) as error:
        raise UserError(
            f'--push "{repo}": the upload failed ({first_line(error)}); {folder} is complete'
        ) from error
    return str(done.commit_url)


def _origin(name: str, folder: Path) -> str:
    """Returns the base model that a model was trained from, as named by the adapters beside the
    merged weights or by the run's config. A Hub name is returned unchanged.
    """
    if not Path(name).expanduser().exists():
        return name
    stated = folder / ADAPTER_CONFIG
    if stated.is_file():
        return str(read_json(stated).get("model") or "")
    return recorded_in(folder.resolve().parent).get("model", {}).get("path") or ""


def _licence(opened: Opened, online: bool) -> dict[str, str]:
    """Returns license, license_name and license_link from the base model's card, in its folder or
    on the Hub.
    """
    from huggingface_hub import ModelCard, hf_hub_download

    places = (Path(place).expanduser() for place in (opened.origin, opened.model) if place)
    file = next(filter(Path.is_file, (place / "README.md" for place in places)), None)
    with suppress(Exception):  # no card, no network, or invalid YAML
        file = file or hf_hub_download(opened.base, "README.md", local_files_only=not online)
        data = ModelCard.load(file).data.to_dict()
        # In untrusted YAML, nested references may expand beyond any memory, and texts may be
        # pages long.
        texts = {key: data[key] for key in _LICENCE if isinstance(data.get(key), str)}
        return {key: text for key, text in texts.items() if _IS_LICENCE.fullmatch(text)}
    return {}


def _packing(config: dict[str, Any]) -> str:
    """Returns a description of how the weights are packed, or "" for unpacked weights."""
    packed = config.get("quantization")
    if not packed:
        return ""
    form = f", {packed['mode']}" if packed.get("mode", "affine") != "affine" else ""
    return f"{packed['bits']} bits, groups of {packed['group_size']}{form}"
