"""The training loop from the config to the final model, with the embedded model and random models."""

from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.compile import Compiled
from grpo_fn.trees import named_leaves
from runners.config.loading import load_config
from runners.engines import local
from runners.engines.local import LocalEngine
from runners.environments import environments
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.resuming import lines_of
from tests.support.runs.talking_runs import talking_run
from tests.support.tiny_runs import Ran, ran, small, updates_of

# The temperature makes completions and rewards differ, so every group has a gradient.
CONFIG = small(
    run={"seed": 5},
    rollout={"max_new_tokens": 10, "temperature": 2.0},
    reward={"functions": ["sums.py:sums"]},
)
SUMS = """
import zlib

def sums(completions, **_):
    return [zlib.crc32(completion[0]["content"].encode()) % 97 / 97 for completion in completions]
"""


def run(tmp_path: Path, *overrides: str, text: str = CONFIG) -> Ran:
    """Runs a config next to SUMS."""
    (tmp_path / "sums.py").write_text(SUMS, encoding="utf-8")
    return ran(tmp_path, *overrides, text=text)


SCORED = 'reward.functions=["correctness_reward_func", "sums.py:sums"]'


def test_a_run_writes_its_files(tmp_path: Path) -> None:
    """It writes the resolved config, both logs with their metrics, a checkpoint, and a loadable model."""
    from mlx_lm import load

    found = run(tmp_path, SCORED, "checkpoint.every=2")
    result, log = found.result, found.log
    names = {path.name for path in result.folder.iterdir()}
    assert {"config.resolved.json", "training_log.jsonl", "completions.jsonl", "checkpoint-2"} <= names
    wanted = {
        "batch_step", "reward", "entropy", "grad_norm", "learning_rate", "loss", "step_time",
        "completions/mean_length", "rewards/correctness_reward_func/mean", "clip_ratio/region_mean",
        "sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/min",
    }  # fmt: skip
    first, last = found.updates
    assert wanted <= set(first)
    assert (first["update"], last["update"], last["batch_step"]) == (1, 2, 2)
    assert log[-1]["em"] == result.last_em and log[-1]["em_subset"] == 2
    completions = lines_of(result.folder / "completions.jsonl")
    assert len(completions) == 2 * 2 * 4
    assert sum(line["tokens"] for line in completions) == last["num_tokens"]
    model, tokenizer = load(str(result.folder / "final"))  # type: ignore[misc]
    trained = named_leaves(result.state.params)["model.norm.weight"]
    assert mx.array_equal(named_leaves(model.parameters())["model.norm.weight"], trained)
    assert tokenizer.chat_template


def test_seeds_share_no_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch step and round of dynamic sampling of seeds 0 and 3 has its own random key."""
    keys, submit = [], LocalEngine.submit

    def watched(self: Any, request: Any, sampling: g.Sampling) -> Any:
        if sampling.temperature:  # evaluation draws nothing
            keys.append(request.seeds)
        return submit(self, request, sampling)

    monkeypatch.setattr(LocalEngine, "submit", watched)
    (tmp_path / "mine.py").write_text("def same(completions, **_):\n    return [1.0] * len(completions)\n")
    short = ['reward.functions=["mine.py:same"]', "rollout.max_new_tokens=2", "rollout.launch=eval"]
    for seed in (0, 3):
        run(tmp_path, f"run.seed={seed}", "loss.dynamic_sampling=true", "eval.samples=1", *short)
    assert len(keys) > 2 * 2, "or no group was replaced"
    assert len(set(keys)) == len(keys)


REWARDS = """
def starts_with_the_nudge(completions, prompts, answer, completion_ids, question, **columns):
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    assert all(prompt[-1]["content"] == text for prompt, text in zip(prompts, question, strict=True))
    assert all("####" not in gold for gold in answer)
    return [float(completion[0]["content"].startswith("<reasoning>")) for completion in completions]

def brevity(completions, completion_ids, **columns):
    return [None if i == 0 else -float(len(ids)) for i, ids in enumerate(completion_ids)]
"""


def test_custom_rewards_receive_the_nudge(tmp_path: Path) -> None:
    """Functions in a file next to the config are weighted; missing rewards do not count in statistics."""
    (tmp_path / "mine.py").write_text(REWARDS, encoding="utf-8")
    functions = 'reward.functions=["mine.py:starts_with_the_nudge", "mine.py:brevity"]'
    one = ("optim.max_steps=1", 'reward.on_error="raise"', "data.nudge=<reasoning>")
    (line,) = run(tmp_path, functions, "reward.weights=[1.0, 0.5]", *one).updates
    assert line["rewards/starts_with_the_nudge/mean"] == 1.0
    assert line["rewards/brevity/mean"] < 0
    assert -12 < line["reward"] < 1


@pytest.mark.parametrize("storage", ["packed", "dequantized"])
def test_a_quantized_reference_is_kept_and_moves(tmp_path: Path, storage: str) -> None:
    """The first KL is due to rounding; a synced reference is the rounded policy."""
    more = ["loss.beta=0.05", "loss.ref_quantization=affine-4", f"loss.ref_storage={storage}"]
    many = ("rollout.max_new_tokens=24", "optim.batch_size=4")  # tokens, for a mean
    found = run(tmp_path, *more, *many, "optim.learning_rate=1e-5")
    kl = [line["kl"] for line in found.updates]
    assert 1e-5 < kl[0] < 0.5 and abs(kl[1] / kl[0] - 1) < 0.9
    assert ("scales" in str(named_leaves(found.result.state.ref_params).keys())) is (storage == "packed")
    sync = ["loss.ref_sync_every=2", "loss.ref_mixup=1.0", "rollout.calibration=none"]
    result = run(tmp_path, *more, *sync).result
    rounded = named_leaves(result.state.ref_params)["model.layers.0.mlp.up_proj.weight"]
    weight = named_leaves(result.state.params)["model.layers.0.mlp.up_proj.weight"]
    packed, scales, biases = mx.quantize(weight, 64, 4)
    want = packed if storage == "packed" else mx.dequantize(packed, scales, biases, 64, 4)
    assert mx.array_equal(rounded, want)


def test_a_run_with_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log counts turns and calls; a run resumed within an update ends with the same weights."""
    settings = ["optim.gradient_accumulation_steps=2", "checkpoint.every=1"]
    whole = talking_run(tmp_path, monkeypatch, *settings)
    (update,) = updates_of(whole)
    assert update["turns/max"] > 1 and update["tools/call_frequency"] > 0 <= update["tools/failure_frequency"]
    lines = lines_of(whole / "completions.jsonl")
    assert any(message["role"] == "tool" for line in lines for message in line["messages"])
    config = load_config(str(tmp_path / "train.toml"), [*settings, f"run.output_dir={tmp_path / 'again'}"])
    again = run_training(config, report=Quiet(), resume=whole / "checkpoint-1").folder
    one, other = (folder / "final" / "model.safetensors" for folder in (whole, again))
    assert one.read_bytes() == other.read_bytes()


def test_conversations_that_are_sampled_again_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the quantized sampler's numbers fail, the second rollout does not continue the first."""
    spoil, converse = [mx.nan], environments.converse

    def first_fails(*given: Any, **how: Any) -> g.Rollout:
        rollout = converse(*given, **how)
        return attrs.evolve(rollout, logp_bt=rollout.logp_bt + (spoil.pop() if spoil else 0.0))

    monkeypatch.setattr(environments, "converse", first_fails)
    folder = talking_run(tmp_path, monkeypatch, rollout={"quantization": "affine-8", "max_new_tokens": 40})
    lines = lines_of(folder / "completions.jsonl")
    turns = [sum(message["role"] == "assistant" for message in line["messages"]) for line in lines]
    assert not spoil and 1 < max(turns) <= 3


def test_system_compile_false_compiles_fewer_programs(tmp_path, monkeypatch):
    """The run itself is the same."""
    made, compile_for = [], Compiled._compile_for
    monkeypatch.setattr(Compiled, "_compile_for", lambda *args: made.append(1) or compile_for(*args))

    def programs(compiles: str) -> int:
        made.clear()
        run(tmp_path, f"system.compile={compiles}")
        return len(made)

    assert programs("false") < programs("true")


@pytest.mark.parametrize("at_start", ["true", "false"])
def test_the_first_evaluation_judges_the_form_of_answers(tmp_path, at_start):
    """Later evaluations do not repeat the message."""
    notes = ran(tmp_path, "eval.every=1", f"eval.at_start={at_start}").notes
    assert sum("completions are cut off at 8 tokens" in line for line in notes) == 1


def test_an_evaluation_that_runs_out_of_memory_is_repeated(tmp_path, monkeypatch):
    """It is repeated with fewer rows, as a rollout is, with a message."""
    real, tries = local.decode_queue, []

    def short(*given):
        tries.append(given)
        if len(tries) == 1:
            raise RuntimeError("out of memory")
        return real(*given)

    monkeypatch.setattr(local, "decode_queue", short)
    found = ran(tmp_path, text=small(optim={"max_steps": 1}, eval={"samples": 12, "at_start": True}))
    assert found.result.first_em is not None
    assert sum(line.startswith("out of memory") for line in found.notes) == 1
