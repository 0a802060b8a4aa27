"""Computes digests of a run's inputs (except its config), which a resumed run compares.

Digests are SHA-256. Files and columns are read completely. For the weights under adapters, see
`base_digest`.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from runners.checkpoints.manifest import digest
from runners.config.loading import Config
from runners.config.user_functions import function_file
from runners.data.prompts import Example
from runners.data.rendering import writes_date
from runners.files.json_files import read_json
from runners.models.adapters import adapter_files
from runners.models.loaded_model import LoadedModel
from runners.rewards.scoring import Reward

START = "the date in the chat template"
HELD_OUT = "the held-out problems"  # weights do not depend on them


def run_inputs(
    config: Config,
    loaded: LoadedModel,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    rewards: Sequence[Reward],
    gold: Sequence[Example] = (),
) -> dict[str, Any]:
    """Computes the inputs' digests, keyed by their names in messages."""
    # `data_digest` covers the answers, and reading the images would take a long time.
    others = {"answer", config.data.image}
    columns = sorted(examples[0].columns.keys() - others) if examples else []
    values = ([(name, example.columns[name]) for name in columns] for example in examples)
    found: dict[str, Any] = {
        "the data's columns": _digest(json.dumps(row, default=repr) + "\n" for row in values),
        HELD_OUT: data_digest(held_out),
        "the model's config.json": _digest(
            [json.dumps(read_json(loaded.path / "config.json"), sort_keys=True)]
        ),
        "the tokens that end a completion": list(loaded.eos_ids),
    }
    template = loaded.vision.processor.template if loaded.vision else None
    if writes_date(template or loaded.tokenizer.chat_template):
        found[START] = loaded.tokenizer.start.isoformat()
    if gold:
        found["the reference completions"] = _digest(
            repr((example.tokens, example.gold)) for example in gold
        )
    if loaded.base_digest:
        found["the weights of the base model"] = loaded.base_digest
    return found | {
        what: digest(Path(file)) for what, file in _files(config, rewards).items() if file
    }


def _files(config: Config, rewards: Sequence[Reward]) -> dict[str, Path | str | None]:
    """Returns the files with custom code and the files of given adapters, keyed by their names in
    messages.
    """
    files: dict[str, Path | str | None] = {}
    for name, reward in zip(config.reward.functions, rewards, strict=False):
        if ":" in name:
            file = getattr(reward.function, "file", None) or function_file(name, config.folders)
            files[f"the file of the reward {name}"] = file
    named = {f"the file of the tool {name}": name for name in config.env.tools}
    named |= {
        "the file of env.factory": config.env.factory,
        "the file of model.loader": config.model.loader,
    }
    for what, name in named.items():
        files[what] = function_file(name if ":" in name else f"{name}:", config.folders)
    for file in adapter_files(Path(config.model.adapters)) if config.model.adapters else ():
        files[f"the {file.name} of model.adapters"] = file
    return files


def data_digest(examples: Sequence[Example]) -> str:
    """Computes a hash over all training data of a run, in order."""
    return _digest(repr((example.tokens, example.answer)) for example in examples)


def _digest(texts: Iterable[str]) -> str:
    whole = hashlib.sha256()
    for text in texts:
        whole.update(text.encode("utf-8", "backslashreplace"))
    return whole.hexdigest()
