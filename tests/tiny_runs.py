"""Whole runs of a few updates on random-weight models, for what comes after training."""

from pathlib import Path

from runners.config import load_config
from runners.report import Quiet
from runners.train import run_training
from tests.tiny_models import make_model_folder

CONFIG = """
[run]
name = "{name}"
output_dir = "{folder}/outputs"
[model]
path = "{folder}/base-{name}"
tune = "{tune}"
lora = {{ rank = 4, scale = 8.0 }}
[data]
source = "embedded"
eval_split = "valid"
system_prompt = "Think first."
[rollout]
num_generations = 4
max_new_tokens = 8
[reward]
functions = ["letters.py:letters"]
[optim]
learning_rate = 5e-3
batch_size = 2
max_steps = 4
[eval]
samples = 2
[checkpoint]
every = 2
"""
LETTERS = '''"""A reward that random text earns more or less of: how many different characters it has."""


def letters(completions, **_):
    return [float(len(set(completion[0]["content"]))) for completion in completions]
'''


def train(folder: Path, name: str, tune: str, **model) -> Path:
    """The folder of a finished run of four updates, with a checkpoint every two; its base is beside it.

    Args:
        folder: gets `outputs/NAME`, `base-NAME`, a config and a reward.
        tune: "full", "lora" or "dora".
        model: what `make_model_folder` takes.
    """
    make_model_folder(folder / f"base-{name}", **model)
    (folder / "letters.py").write_text(LETTERS)
    config = folder / f"{name}.toml"
    config.write_text(CONFIG.format(name=name, folder=folder, tune=tune))
    return run_training(load_config(str(config)), report=Quiet()).folder
