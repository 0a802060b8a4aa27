"""Every packaged config: the memory that its comment states, and one step on a small model of its kind."""

import json
import math
import re

import pytest

from benchmarks.harness.shapes import SHAPES as MEASURED
from grpo_fn.backends import mechanisms
from runners.config.loading import load_config
from runners.config.names import SHIPPED
from runners.config.reading import PRESET_FOLDER, preset_names
from runners.machine.startup import Platform
from runners.memory import sizes
from runners.memory.forecast import forecast
from runners.memory.plan import data_shape
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.tiktoken_files import make_nanochat_folder
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import PROBLEMS
from tests.support.vision_models import make_vision_folder, needs_mlx_vlm
from tests.support.vision_runs import write_vision_data

PACKED = {"quantization": {"group_size": 64, "bits": 4}}
SMALLEST = MEASURED["qwen2.5-0.5b"]
LARGER = SMALLEST | {
    "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960
}  # fmt: skip
LARGEST = SMALLEST | {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16},
}  # fmt: skip
NANOCHAT = {
    "model_type": "nanochat", "vocab_size": 65536, "hidden_size": 1280, "num_hidden_layers": 20,
    "num_attention_heads": 10, "num_key_value_heads": 10, "intermediate_size": 5120,
}  # fmt: skip
SHAPES = {  # config.json of each model that a preset names, as far as sizes depend on it
    "Qwen/Qwen2.5-0.5B-Instruct": SMALLEST,
    "mlx-community/Qwen2.5-0.5B-Instruct-4bit": SMALLEST | PACKED,
    "Qwen/Qwen2.5-1.5B-Instruct": LARGER,
    "mlx-community/Qwen2.5-7B-Instruct-4bit": LARGEST | PACKED,
    "Qwen/Qwen2-VL-2B-Instruct": LARGER | VISION,
    "nanochat-d20": NANOCHAT,
    "nanochat-d32": NANOCHAT | MEASURED["nanochat-d32"],
}
STATED = re.compile(r"^# Memory: ([\d.]+) GB on Apple silicon, ([\d.]+) GB on a CPU \(grpo plan\)\.$", re.M)
SMALL = (  # what makes any preset a step of seconds; its algorithm stays
    f"data.source={PROBLEMS}",
    "data.eval_split=valid",
    "data.max_prompt_length=1000",
    "data.max_samples=40",
    "rollout.num_generations=4",
    "rollout.max_batch=0",
    "optim.max_steps=1",
    "optim.batch_size=2",
    "eval.samples=1",
    "loss.overlong.buffer=0",
    "model.lora.layers=-1",
    'reward.functions=["letters.py:letters"]',
)
LETTERS = """
def letters(completions, **_):
    return [float(len(set(completion[0]["content"]))) for completion in completions]
"""


NAMES = [
    pytest.param(name, marks=[needs_mlx_vlm, pytest.mark.filterwarnings("ignore")])
    if name == "vision"
    else name
    for name in preset_names()
]


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_that_a_preset_states_is_the_plans(name, tmp_path, monkeypatch):
    """The forecast for its model's shape, full prompts and completions, in tenths of a GB rounded up."""
    monkeypatch.chdir(tmp_path)
    text = (PRESET_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    assert "Use it" in text.partition("[run]")[0]
    (found,) = STATED.findall(text)

    config = load_config(name).check()
    prompt, computed = data_shape(config)[0] or config.data.max_prompt_length, []
    for backend in ("metal", "cpu"):
        monkeypatch.setattr(sizes, "sharing_pays", lambda backend=backend: backend == "cpu")
        platform = Platform(backend)
        with mechanisms.substituted(decode_blocks=True):  # on any processor
            found_sizes = sizes.model_sizes(config, platform, stated=SHAPES.get(config.model.path))
        plan = forecast(config, platform, 1 << 50, prompt=prompt, sizes=found_sizes)
        computed.append(math.ceil(plan.peak[1] / 1e8) / 10)
    assert [float(number) for number in found] == computed


def model_of(name, config, folder):
    """A small random model of the architecture that a preset is for, packed where its model is."""
    path = config.model.path
    if path in SHIPPED:
        return path
    shape = SHAPES[path]
    if shape["model_type"] == "nanochat":
        return str(make_nanochat_folder(folder / path, width=64))
    if shape["model_type"] == "qwen2_vl":
        write_vision_data(folder)
        return str(make_vision_folder(folder / "model"))
    packed = {"group_size": 32, "bits": 4} if "quantization" in shape else None
    return str(make_model_folder(folder / "model", shape["model_type"], quantize=packed))


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_runs_for_a_step(name, tmp_path, monkeypatch):
    """With its own loss, roles, adapters, minibatches; every update has a gradient; final/ is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.py").write_text(LETTERS)
    config = load_config(name)
    model = model_of(name, config, tmp_path)
    accumulation = f"optim.gradient_accumulation_steps={min(config.optim.gradient_accumulation_steps, 2)}"
    tokens = f"rollout.max_new_tokens={20 if model in SHIPPED else 8}"  # the shipped one begins in one way
    own = ["data.source=train.jsonl", "data.eval_split=train"] if config.data.image else []
    own += ["rollout.calibration=none"]  # the first rollout would be in full precision
    config = load_config(name, [*SMALL, tokens, accumulation, f"model.path={model}", *own])
    result = run_training(config, report=Quiet())
    lines = map(json.loads, (result.folder / "training_log.jsonl").read_text().splitlines())
    updates = [line for line in lines if "loss" in line]
    assert len(updates) == config.optim.minibatches
    assert all(line["grad_norm"] > 0 for line in updates)
    assert (result.folder / "final" / "model.safetensors").is_file()
    rounded, mismatch = name == "nanochat_grpo", updates[0]["sampling/sampling_logp_difference/mean"]
    assert updates[0].get("rollout/quantization") == ("affine-4" if rounded else None)
    assert mismatch > 1e-3 if rounded else mismatch < 1e-4
