"""Supervised updates in a run: their loss, the start of GRPO after them, and `grpo sft`."""

import json

import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.trees import arrays_of, named_leaves
from runners.checkpoints.checkpoint import load_trees
from runners.config.loading import load_config
from runners.data.gold import GoldReader
from runners.data.stream import PromptOrder, drawn
from runners.errors import UserError
from runners.machine.startup import Platform
from runners.telemetry.report import Quiet
from runners.training.setup import SetUp
from runners.training.train import run_training
from tests.support.commands import grpo
from tests.support.resuming import config_in, lines_of, straight_run
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import small

SUPERVISED = ("sft.updates=3", "sft.learning_rate=1e-3", "rollout.max_new_tokens=44", "eval.every=0")


def cross_entropy(module, examples):
    """The mean over the tokens of the reference completions, computed row by row."""
    total, tokens = 0.0, 0
    for example in examples:
        logits = module(mx.array([[*example.tokens, *example.gold]]))[0, len(example.tokens) - 1 : -1]
        logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        total -= mx.take_along_axis(logp, mx.array(example.gold)[:, None], axis=-1).sum().item()
        tokens += len(example.gold)
    return total / tokens


def test_losses_in_the_log_are_cross_entropies(tmp_path):
    """This is checked for the first batch step and the held-out completions, with the initial model."""
    config = config_in(tmp_path / "a", *SUPERVISED, "sft.only=true", "rollout.temperature=0.7")
    run = SetUp(config.check(), Platform(backend="cpu")).build()
    from mlx_lm import load

    module, _ = load(config.model.path)[:2]
    first = drawn(PromptOrder(run.data.gold, config.run.seed), 0, 16).examples
    log = lines_of(run_training(config, report=Quiet()).folder / "training_log.jsonl")
    start, update = log[0], next(line for line in log if "loss" in line)
    assert update["loss"] == pytest.approx(cross_entropy(module, first), rel=1e-4)
    held_out = cross_entropy(module, run.data.gold_evaluation)
    assert start["eval/loss"] == pytest.approx(held_out, rel=1e-4)
    assert start["eval/perplexity"] == pytest.approx(mx.exp(mx.array(held_out)).item(), rel=1e-3)
    assert update["num_tokens"] == sum(len(example.gold) for example in first)
    assert log[-1]["eval/loss"] < start["eval/loss"]
    assert not {"reward", "reward_std", "sampling/kl", "ratio/mean", "tokens_per_second"} & update.keys()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"context": {"role": "user"}}, "expected text as its content"),
        ({"context": 7}, "message 0: expected a role"),
        ({"prompt": {"a": 1}}, "message 0: expected text as its content, found dict"),
        ({"context": json.loads("[" * 300 + "]" * 300)}, "nested at most 100 deep"),
    ],
)
def test_invalid_completions_are_refused(tmp_path, changes, line):
    """The error contains the file and the line number."""
    row = {"prompt": "What is 1 + 1?", "completion": "2", "reward": 1.0} | changes
    (tmp_path / "left.jsonl").write_text(json.dumps(row) + "\n")
    config = load_config(None, ["model.path=embedded", f"sft.completions={tmp_path}/left.jsonl"])
    with pytest.raises(UserError, match=f"left.jsonl, line 1: .*{line}"):
        GoldReader(config, None, None).of_file()


def test_grpo_starts_afresh_after_supervised_updates():
    """Sampler and reference have the learned weights, moments are new, and the schedule restarts."""
    result = straight_run(*SUPERVISED, "loss.beta=0.05", "optim.max_steps=4", "optim.learning_rate=2e-3")
    switch, _ = load_trees(result.folder / "checkpoint-3")
    assert not any(mx.any(leaf).item() for leaf in arrays_of(switch.opt_state))
    for role in (switch.ref_params, switch.old_params):
        learned = named_leaves(switch.params)
        assert all(mx.array_equal(leaf, learned[name]) for name, leaf in named_leaves(role).items())
    log = [line for line in lines_of(result.folder / "training_log.jsonl") if "loss" in line]
    rates = [
        g.warmup_schedule("cosine", rate, updates, 0.1)(mx.array(update)).item()
        for rate, updates in ((1e-3, 3), (2e-3, 4))
        for update in range(updates)
    ]
    assert [line["learning_rate"] for line in log] == pytest.approx(rates)
    assert ["reward" in line for line in log] == [False] * 3 + [True] * 4
    assert log[3]["kl"] == pytest.approx(0, abs=1e-6) and log[3]["ratio/mean"] == pytest.approx(1)
    drawn = lines_of(result.folder / "completions.jsonl")
    assert {line["batch_step"] for line in drawn} == {4, 5, 6, 7}


def test_grpo_sft_learns_conversations_without_answers(tmp_path, monkeypatch):
    """The last message of each is the assistant's; only the loss is measured."""
    monkeypatch.chdir(tmp_path)
    make_model_folder(tmp_path / "model")
    turns = [(f"{n}+1?", f"It is {n + 1}.") for n in range(30)]
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config = small(
        model={"path": "model"},
        data={"source": "chats.jsonl", "eval_split": "test", "prompt": "messages", "completion": "messages"},
        sft={"learning_rate": 1e-2, "epochs": 3, "batch_size": 9},
        rollout={"max_new_tokens": 32},
        eval={"samples": 0, "at_start": True},
    )
    (tmp_path / "run.toml").write_text(config.replace('[answer]\nform = "xml"\n', ""))
    done = grpo("sft", "run.toml")
    log = lines_of(tmp_path / "outputs" / "small" / "training_log.jsonl")
    losses = [line["eval/loss"] for line in log if "eval/loss" in line]
    assert losses[-1] < losses[0] - 0.5 and not any("em" in line for line in log)
    assert [line["epoch"] for line in log if "loss" in line][-1] == 3
    assert "9 updates of 9 reference completions" in done.output and "tokens sampled" in done.output
    resolved = json.loads((tmp_path / "outputs" / "small" / "config.resolved.json").read_text())
    assert resolved["sft"]["only"] is True
    done = grpo("generate", "outputs/small", "7+1?", "--temperature", "0")
    assert "It is" in done.stdout
