"""Every key of the config changes something that can be measured: the keys are those of the classes."""

import functools
import json
import tempfile
from pathlib import Path

import pytest

from runners.config.loading import KEYS, load_config
from runners.config.sections import LoraConfig, ModelConfig
from runners.data.curriculum import prompt_id
from runners.data.prompts import Example
from runners.engines.settings import decoding_of
from runners.errors import UserError
from runners.files.toml_files import toml_text
from runners.machine.startup import Platform
from runners.models.loaded_model import load_model
from runners.models.model_writer import trained, write_trained
from runners.training.train import run_training
from tests.campaigns.mutants import MUTANTS
from tests.support.replay_cases import CASES, OF_SPEED
from tests.support.resuming import lines_of, without_noise
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import Notes

REWARDS = """
import itertools
import time
import zlib

def letters(completions, **_):
    return [zlib.crc32(completion[0]["content"].encode()) % 97 / 97 for completion in completions]

def tags(completions, thought_tags):
    return [value * len(thought_tags) for value in letters(completions)]

def few(completions, **_):
    return [float(value > 0.9) for value in letters(completions)]

def some(completions, **_):
    values = letters(completions)
    return [None, "none", *values[2:]]

def none(completions, **_):
    raise ValueError("no reward")

def slow(completions, **_):
    time.sleep(0.2)
    return letters(completions)

steps = itertools.count()

def falling(completions, **_):
    return [float(next(steps) < 15)] * len(completions)

def shorter(row):
    return {**row, "question": row["question"][:1]}

class Crowd:
    '''Its first instance tells whether another begins while it waits.'''
    begun = 0

    def reset(self, **_):
        Crowd.begun += 1
        if Crowd.begun > 1:
            return ""
        end = time.monotonic() + 2
        while Crowd.begun < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return f" {min(Crowd.begun, 2)}"

    def look(self) -> str:
        '''Looks.'''
        return ""

def theirs(folder):
    from mlx_lm import load
    model = load(str(folder))[0]
    model.model.norm.weight = 2 * model.model.norm.weight
    return model
"""
BASE = {
    "run": {"name": "tiny"},
    "model": {"path": "{root}/llama"},
    "data": {"source": "{root}/rows", "eval_split": "valid", "system_prompt": "", "nudge": ""},
    "rollout": {"num_generations": 4, "max_new_tokens": 4, "temperature": 1.5, "launch": "eval"},
    "reward": {"functions": ["{root}/rewards.py:letters"]},
    "optim": {"learning_rate": 1e-3, "batch_size": 2, "max_steps": 2},
    "eval": {"samples": 2, "at_start": False},
    "checkpoint": {"every": 0},
    "log": {"report": False},
}
ADAPTIVE = 'data.curriculum="adaptive"'
MANY = ("optim.max_steps=6", "optim.learning_rate=0.0")
LORA = 'model.tune="lora"'
RATES = 'data.difficulty="{root}/rates-train.jsonl"'
PACKED = 'rollout.quantization="affine-8"'
BETA = "loss.beta=0.1"
SAVED = "checkpoint.every=1"
FALLING = 'reward.functions=["{root}/rewards.py:falling"]'
LONG = "rollout.max_new_tokens=16"
SFT = ("sft.updates=1", LONG)
VESPO = ('loss.surrogate="vespo"', "optim.num_iterations=2")
# A key, the value that has to change something, and the settings that it needs beside it.
EFFECTS: dict[str, tuple[str, ...]] = {
    "run.name": ('"other"',),
    "run.output_dir": ('"{out}/elsewhere"',),
    "run.seed": ("1",),
    "model.path": ('"{root}/qwen2"',),
    "model.tune": ('"lora"',),
    "model.lora.rank": ("2", LORA),
    "model.lora.scale": ("1.0", LORA),
    "model.lora.layers": ("1", LORA),
    "model.lora.keys": ('["self_attn.q_proj"]', LORA),
    "model.adapters": ('"{root}/adapters"', LORA),
    "model.dtype": ('"bfloat16"',),
    "model.master": ('"bfloat16"',),
    "model.loader": ('"{root}/rewards.py:theirs"',),
    "data.source": ('"{root}/rows/valid.jsonl"', 'data.split="train"'),
    "data.split": ('"valid"',),
    "data.eval_split": ('"train"',),
    "data.question": ('"other"',),
    "data.answer": ('"other"', "eval.samples=0"),
    "data.prompt": ('"chat"',),
    "answer.form": ('"exact"',),
    "data.completion": ('"other"', *SFT),
    "data.system_prompt": ('"Be short."',),
    "data.nudge": ('"Well,"',),
    "data.thoughts": ("[]", 'reward.functions=["{root}/rewards.py:tags"]'),
    "data.chat_template_kwargs": ('{style="x"}',),
    "data.max_samples": ("2",),
    "env.workers": ("1", 'env.factory="{root}/rewards.py:Crowd"', "eval.samples=0"),
    "data.max_prompt_length": ("24",),
    "data.on_bad_row": ('"skip"', 'data.question="sparse"'),
    "data.transform": ('"{root}/rewards.py:shorter"',),
    "data.curriculum": ('"adaptive"', *MANY),
    "data.difficulty": (RATES.partition("=")[2], ADAPTIVE, *MANY),
    "data.pass_rates": ("[0.2, 0.5]", 'data.curriculum="static"', RATES),
    "data.target_rate": ("0.05", ADAPTIVE, *MANY),
    "data.rate_decay": ("0.1", ADAPTIVE, *MANY),
    "data.explore": ("1.0", ADAPTIVE, *MANY),
    "data.pass_reward": ("0.2", ADAPTIVE, *MANY),
    "rollout.first_stage": ("2", 'reward.functions=["{root}/rewards.py:few"]', "optim.batch_size=6"),
    "rollout.stop": ('["e", "a", "t", "o", " "]', "rollout.max_new_tokens=8"),
    "rollout.quantization": ('"affine-4"',),
    "rollout.group_size": ("32", PACKED),
    "rollout.quantize_head": ("true", PACKED, "rollout.group_size=32"),
    "rollout.calibration": ('"none"', 'rollout.quantization="affine-4"', "rollout.group_size=32"),
    "rollout.bits_budget": ("5.5", 'rollout.quantization="affine-4"', "rollout.group_size=32"),
    "rollout.max_staleness": ("1", "loss.correction=token_truncate", "optim.max_steps=3"),
    "ranks.samplers": ("1", "rollout.max_staleness=1", "loss.correction=token_truncate"),
    "rollout.mismatch_limit": ("1e-9", PACKED, "rollout.group_size=32"),
    "reward.functions": ('["{root}/rewards.py:some"]',),
    "reward.timeout": ("0.05", 'reward.functions=["{root}/rewards.py:slow"]'),
    "reward.on_error": ('"raise"', 'reward.functions=["{root}/rewards.py:some"]'),
    "reward.stop_if_all_fail": ("false", 'reward.functions=["{root}/rewards.py:none"]'),
    "loss.router_aux_coef": ("1.0", 'model.path="{root}/mixtral"'),
    "loss.ref_quantization": ('"affine-4"', BETA, "loss.ref_mixup=1.0"),
    "loss.ratio_cap": ("1.0001", 'loss.surrogate="dppo_tv"', "optim.num_iterations=2"),
    "loss.dro_beta": ("0.5", 'loss.surrogate="dro"', "optim.num_iterations=2"),
    "loss.vespo_k_pos": ("1.0", *VESPO),
    "loss.vespo_lambda_pos": ("1.0", *VESPO),
    "loss.vespo_k_neg": ("1.0", *VESPO),
    "loss.vespo_lambda_neg": ("1.0", *VESPO),
    "loss.level": ('"sequence"', "optim.num_iterations=2"),
    "optim.moments": ('"bfloat16"',),
    "optim.max_bad_updates": ("1", "optim.learning_rate=1e39"),
    "sft.updates": ("1", LONG),
    "sft.epochs": ("1", LONG),
    "sft.only": ("true", *SFT),
    "sft.completions": ('"{root}/left.jsonl"', *SFT),
    "sft.min_reward": ("0.1", *SFT, 'sft.completions="{root}/left.jsonl"'),
    "sft.learning_rate": ("1e-2", *SFT),
    "sft.batch_size": ("1", *SFT),
    "eval.every": ("1",),
    "eval.samples": ("1",),
    "eval.max_new_tokens": ("1",),
    "eval.at_start": ("true",),
    "checkpoint.every": ("1",),
    "checkpoint.keep_last": ("1", SAVED, "checkpoint.keep_best=0"),
    "checkpoint.keep_best": ("2", SAVED, "checkpoint.keep_last=1", "optim.max_steps=3"),
    "log.every": ("2",),
    "log.jsonl": ("false",),
    "log.completions": ("false",),
    "log.report": ("true",),
    "watch.patience": ("1", "watch.min_entropy=9.0"),
    "watch.min_entropy": ("9.0", "watch.patience=1"),
    "watch.max_kl": ("1e-9", "watch.patience=1", BETA),
    "stop.when": ('["update >= 1"]',),
    "stop.patience": ("1", FALLING, "optim.max_steps=19", "optim.num_epochs=9"),
    "system.micro_batch_tokens": ("1", "system.check_model=false"),
}


@functools.cache
def scratch() -> tuple[tempfile.TemporaryDirectory, Path]:
    """A folder with models, data and rewards."""
    made = tempfile.TemporaryDirectory(prefix="keys-")
    root = Path(made.name)
    for arch in ("llama", "qwen2", "mixtral"):
        make_model_folder(root / arch, arch)
    tokenizer = json.loads((root / "llama/tokenizer_config.json").read_text())
    tokenizer["chat_template"] += "{{ style }}"
    (root / "llama/tokenizer_config.json").write_text(json.dumps(tokenizer))
    (root / "rewards.py").write_text(REWARDS)
    (root / "base.toml").write_text(toml_text(BASE).replace("{root}", str(root)))
    platform = Platform(backend="cpu")
    loaded = load_model(ModelConfig(path=str(root / "llama"), tune="lora", lora=LoraConfig(rank=2)), platform)
    (root / "adapters").mkdir()
    write_trained(root / "adapters", trained(loaded.module.trainable_parameters(), loaded), loaded)
    left = [{"prompt": f"So {n}?", "completion": f"{n}!", "reward": n / 2} for n in range(3)]
    (root / "left.jsonl").write_text("".join(json.dumps(line) + "\n" for line in left))
    (root / "rows").mkdir()
    for split, numbers in (("train", range(6)), ("valid", range(10, 16))):
        rows = [
            {
                **{"question": f"{n}+{n}?" + "!" * (3 * n % 8), "other": f"What is {n}?", "answer": "#### 1"},
                **{"chat": [{"role": "user", "content": f"So {n}?"}]},
                **({"sparse": f"{n}?"} if n % 3 else {}),
            }
            for n in numbers
        ]
        (root / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        asked = [({"role": "user", "content": row["question"]},) for row in rows]
        ids = [prompt_id(Example(messages, "", (), "1", {})) for messages in asked]
        lines = [{"prompt": name, "samples": 9, "passes": n} for n, name in enumerate(ids, 1)]
        (root / f"rates-{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made, root


@functools.cache
def observed(*settings: str) -> dict:
    """All that a run with these settings leaves and says, but for times and the config itself."""
    root = scratch()[1]
    out = Path(tempfile.mkdtemp(dir=root))

    def placed(text):
        return text.replace("{root}", str(root)).replace("{out}", str(out))

    notes, error = Notes(), ""
    try:
        overrides = [f"run.output_dir={out}", *map(placed, settings)]
        run_training(load_config(str(root / "base.toml"), overrides), report=notes)
    except UserError as fault:
        error = str(fault)
    logs = {name: [] for name in ("training_log", "completions", "evaluations")}
    for name, lines in logs.items():
        for file in out.rglob(f"{name}.jsonl"):
            lines += without_noise(lines_of(file))
    weights = {str(f.relative_to(out)): f.read_bytes() for f in out.rglob("final/*.safetensors")}
    files = sorted(str(file.relative_to(out)) for file in out.rglob("*"))
    said = [line.replace(str(out), "") for line in (*notes.lines, error)]
    return {"said": said, "files": files, "weights": weights, **logs}


@pytest.mark.parametrize("key", EFFECTS)
def test_a_key_changes_something(key):
    """Weights, logs, files, lines or an error of a short run."""
    value, *beside = EFFECTS[key]
    before, after = observed(*beside), observed(*beside, f"{key}={value}")
    assert before != after


SPEED = {"rollout.launch": '"async"', "rollout.check_every": "3", "rollout.max_batch": "5"}


@pytest.mark.parametrize("key", SPEED)
def test_a_key_of_speed_reaches_the_sampler(key):
    """It changes no number, but how rows are decoded."""
    root = scratch()[1]
    before, after = (
        decoding_of(load_config(str(root / "base.toml"), overrides).check())
        for overrides in ([], [f"{key}={SPEED[key]}"])
    )
    assert before != after


def test_every_key_is_shown_to_change_something():
    """Above, in the replay of a run, or in tests that notice where `tests.campaigns.mutants` forgets it."""
    replayed = set()
    for case in CASES.values():
        for section, keys in case.items():
            for key, value in keys.items():
                names = [f"{key}.{name}" for name in value] if isinstance(value, dict) else [key]
                replayed |= {f"{section}.{name}" for name in names if key not in OF_SPEED}
    forgotten = {mutant.name.removeprefix("~") for mutant in MUTANTS if mutant.name.startswith("~")}
    keys = {".".join(path) for path in KEYS}
    assert keys == set().union(EFFECTS, SPEED, replayed, forgotten)
    assert not EFFECTS.keys() & (replayed | forgotten)
