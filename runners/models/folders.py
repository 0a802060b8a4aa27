"""Finds a model folder, checks its files before loading, and copies its companion files."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from runners.config.names import HUB_NAME, other_name
from runners.errors import UserError, first_line, listed, show, user_errors
from runners.files.json_files import read_json
from runners.files.run_files import COMPLETIONS, EVALUATIONS, EVENTS, METRICS, RESOLVED
from runners.models.json_keys import ANY_MODEL, MODEL, check_keys, end_ids
from runners.models.rope_keys import with_rope_keys
from runners.quickstart import MODELS

# Besides the weights: the files that mlx-lm itself fetches from the Hub.
_COMPANIONS = ("*.json", "*.py", "*.txt", "*.jsonl", "*.jinja", "*.model", "*.tiktoken", "*.bpe")
_NOT_TRAVELLING = (
    "config.json",  # rewritten with new weights
    "*.index.json",
    "adapter_config.json",
    "trainer_state.json",
    "manifest.json",
    *(RESOLVED, METRICS, EVENTS, COMPLETIONS, EVALUATIONS),  # where a run's folder is the model's
)
TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATES = "additional_chat_templates"
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "spiece.model"),
    *("vocab.json+merges.txt", "vocab.txt"),
)


def resolve_model(
    path: str, key: str = "model.path", *, custom_loader: bool = False, tokenizer: bool = True
) -> Path:
    """Returns the checked folder that `model.path` names: a shipped model, a local folder, or a Hub
    model (downloaded and cached).

    `key` is the config key that messages name. With `custom_loader`, the weights may have any
    format, because the loader reads them. With `tokenizer` False, no tokenizer files are required.
    Raises UserError if neither a folder nor a Hub model has that name, the Hub cannot be reached,
    or the folder is incomplete.
    """
    if path in MODELS:
        folder = MODELS[path]
    elif Path(path).expanduser().exists():
        folder = Path(path).expanduser().resolve()
    elif HUB_NAME.fullmatch(path):
        from huggingface_hub import snapshot_download

        with hub_errors(f'{key} = "{path}"'):
            folder = Path(
                snapshot_download(path, allow_patterns=["model*.safetensors", *_COMPANIONS])
            )
    elif other := other_name(path):
        raise UserError(f"{key} = {show(path)} is {other}")
    else:
        raise UserError(
            f'{key} = "{path}": there is no such folder; expected "embedded", a folder, or a Hub '
            "name"
        )
    _check_folder(folder, custom_loader, tokenizer)
    if path not in MODELS:  # some package managers install links
        _check_links(folder)
    return folder


def final_of(folder: Path) -> str:
    """Returns `; did you mean FOLDER/final?` for a run's folder, otherwise an empty string."""
    return f"; did you mean {folder / 'final'}?" if (folder / "final").is_dir() else ""


def _check_folder(folder: Path, custom_loader: bool, tokenizer: bool) -> None:
    # Without tokenizer files, mlx-lm would continue with a wrong end-of-text token.
    if not folder.is_dir():
        raise UserError(
            f"{folder}: expected a model folder with config.json and *.safetensors, found a file"
        )
    names = {file.name for file in folder.iterdir() if file.is_file()}
    if is_adapter_folder(folder):
        raise UserError(
            f"{folder}: these are adapters, not a model; to continue from them, set "
            "model.adapters to this folder, and model.path to their base"
        )
    if "config.json" not in names:
        raise UserError(
            f"{folder}: config.json is missing; expected an mlx-lm model folder{final_of(folder)}"
        )
    file = folder / "config.json"
    check_keys(read_json(file), file, ANY_MODEL if custom_loader else MODEL)
    end_ids(folder)
    if not custom_loader:
        _check_weights(folder, names)
    if tokenizer:
        _check_tokenizer(folder, names)


def is_adapter_folder(folder: Path) -> bool:
    """Returns whether a folder contains adapters and no model."""
    if not (folder / "adapter_config.json").is_file():
        return False
    return not any(_is_weights(file.name) for file in folder.iterdir())


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a model folder has tokenizer files that transformers can read."""
    names = {file.name for file in folder.iterdir()}
    return any(name.endswith(".tiktoken") for name in names) or any(
        names.issuperset(files.split("+")) for files in _TOKENIZERS
    )


def read_config(folder: Path) -> dict:
    """Reads a model folder's config.json, and translates the rotary embedding's keys to mlx-lm's.

    Raises UserError if the file or a key cannot be read, or if mlx-lm would compute something else
    than the config states.
    """
    file = folder / "config.json"
    stated = read_json(file)
    check_keys(stated, file, MODEL)
    with user_errors(str(file), UserError):
        return with_rope_keys(stated)


def copy_companions(source: Path, target: Path) -> None:
    """Copies the files that a model needs besides config.json and weights: tokenizer, templates,
    custom code.
    """
    for file in _companions(source):
        shutil.copyfile(file, target / file.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, target / _TEMPLATES)


def _companions(source: Path) -> set[Path]:
    skipped = {*chain.from_iterable(map(source.glob, _NOT_TRAVELLING))}
    return {*chain.from_iterable(map(source.glob, _COMPANIONS))} - skipped


def _check_links(folder: Path) -> None:
    """Raises UserError if a file that `copy_companions` copies is a link to a file outside the
    folder.

    Without this check, an untrusted folder could export and upload any of your files with the
    model. Links in the Hub's cache may point to the blobs beside the snapshots.
    """
    root = folder.resolve()
    allowed = [root, *(p.parent / "blobs" for p in root.parents if p.name == "snapshots")]
    templates = folder / _TEMPLATES
    for file in sorted({*_companions(folder), templates, *templates.rglob("*")}):
        if file.is_symlink() and not any(map(Path(os.path.realpath(file)).is_relative_to, allowed)):
            raise UserError(
                f"{folder}: {file.relative_to(folder)} is a link to a file outside the folder; "
                f"copy the file into the folder"
            )


def _is_weights(name: str) -> bool:
    # mlx-lm's own pattern. adapters.safetensors and optimizer.safetensors are not model weights.
    return name.startswith("model") and name.endswith(".safetensors")


def _check_weights(folder: Path, names: set[str]) -> None:
    if not any(map(_is_weights, names)):
        suffixes = (".safetensors", ".bin", ".pt", ".gguf", ".npz")
        others = sorted(name for name in names if name.endswith(suffixes))
        raise UserError(
            f"{folder}: expected weights in model*.safetensors, found {listed(others)}; "
            "transformers' from_pretrained(FOLDER).save_pretrained(NEW) converts pytorch_model.bin"
        )
    file = folder / "model.safetensors.index.json"
    weight_map = read_json(file).get("weight_map") if file.name in names else None
    parts = weight_map.values() if isinstance(weight_map, dict) else ()
    missing = sorted({*map(str, parts)} - names)
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} weight files are missing; the first is {missing[0]}"
        )


def _check_tokenizer(folder: Path, names: set[str]) -> None:
    if not has_tokenizer(folder):
        hint = "; `grpo convert` creates one from tokenizer.pkl" if "tokenizer.pkl" in names else ""
        raise UserError(
            f"{folder}: the tokenizer is missing; expected {' or '.join(_TOKENIZERS)}{hint}"
        )
    if "tokenizer_config.json" not in names:
        raise UserError(
            f"{folder}: tokenizer_config.json is missing; without it, the special tokens are wrong"
        )


@contextmanager
def hub_errors(where: str) -> Iterator[None]:
    """Converts the Hub's errors inside the block to a one-line UserError that starts with
    `where`.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"{where}: access is gated; request it on the Hub, then run `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(
            f"{where}: found neither a folder nor a Hub model with this name"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UserError(
            f"{where}: there is no such folder, the Hub's cache does not contain this name, and "
            f"the Hub cannot be reached"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise UserError(f"{where}: the download failed ({first_line(error)})") from error
