"""The model and the dataset that ship with the package: where they lie, nothing more.

`runners.quickstart.make` rebuilds both from nothing; importing this module loads nothing heavy.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent

MODEL_DIR = HERE / "model"
"""An mlx-lm model folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json."""

DATA_DIR = HERE / "data"
"""train.jsonl, valid.jsonl and test.jsonl; each row has `question` and `answer` (ending in `#### n`)."""
