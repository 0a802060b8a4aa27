"""The paths of the models and data sets that ship with the package.

In the repository, `python -m benchmarks.quickstart_model` creates all of them from scratch.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL_DIR = HERE / "model"  # config.json, model.safetensors, tokenizer.json, tokenizer_config.json
# train.jsonl, valid.jsonl, test.jsonl: `question`, and `answer` ending in `#### n`
DATA_DIR = HERE / "data"
# both in the same form, for a model with a calculator; manifest.json has digests
TOOLS_DIR = HERE / "tools"

MODELS = {"embedded": MODEL_DIR, "embedded-tools": TOOLS_DIR / "model"}
"""The folders of the shipped models, by their names in `model.path`."""

DATA = {"embedded": DATA_DIR, "embedded-tools": TOOLS_DIR / "data"}
"""The folders of the shipped data, by their names in `data.source`."""
