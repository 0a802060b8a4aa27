"""Ranks that only sample for rank 0: what one device does, and one end for all if one of them fails."""

import os
import signal

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.rollout import Interrupted
from grpo_fn.trees import map_arrays
from runners.checkpoints.manifest import check_manifest
from runners.config.loading import load_config
from runners.engines.apart import RankEngine, blank_weights, serve
from runners.engines.engine import Request, Weights
from runners.engines.local import LocalEngine
from runners.engines.rollouts import Cancelled, generate, seeds_of
from runners.errors import UserError
from runners.ranks.messages import RankError
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.ranks.launching import begin, config_writer
from tests.support.ranks.rank_threads import as_run_ranks, on_ranks
from tests.support.resuming import lines_of, outcome
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_states import load

CPU = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's sums have no fixed order")
SAMPLING = g.Sampling(num_generations=2, max_new_tokens=9)
APART = ("--set", "ranks.samplers=1")
AHEAD = {
    "rollout": {"max_staleness": 1, "temperature": 1.5},
    "loss": {"correction": "token_truncate"},
    "reward": {"functions": ["letters.py:sums"]},  # each batch step has a gradient
}
LORA = {"model": {"path": "embedded", "tune": "lora", "lora": {"rank": 4}}, "optim": {"max_steps": 5}}
TOOLS = {
    "model": {"path": "embedded-tools"},
    "data": {"source": "embedded-tools", "eval_split": "test", "nudge": "", "max_samples": 16},
    "env": {"tools": ["runners.environments.calculator:calculate"], "max_turns": 2},
    "rollout": {"max_staleness": 2, "max_new_tokens": 28, "temperature": 1.3},
    "optim": {"max_steps": 3},
}


@pytest.fixture
def write(tmp_path):
    """Writes a config in `tmp_path`; its path."""
    make = config_writer(tmp_path)

    def ahead(name, **tables):
        return make(name, **{key: AHEAD.get(key, {}) | tables.get(key, {}) for key in {**AHEAD, **tables}})

    return ahead


def exchanged(count, act):
    """What `act(engine, policy)` returns on rank 0 of so many, the others of which sample for it."""
    policy, blank = policy_and_blank()

    def rank(collectives):
        ranks = as_run_ranks(collectives)
        if collectives.rank():
            serve(ranks, LocalEngine(), policy.twin(), blank)
            return None
        engine = RankEngine(ranks)
        try:
            return act(engine, policy)
        finally:
            engine.close()

    return on_ranks(count, rank)[0]


def policy_and_blank():
    """A small model's policy, and what its weights look like."""
    policy = g.Policy.from_module(load(FOLDER).module)
    return policy, blank_weights(policy, policy.params)


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory):
    """A model's folder."""
    global FOLDER
    FOLDER = make_model_folder(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.mark.parametrize("count", [2, 3])
def test_other_ranks_sample_as_this_one_would(count):
    """New weights, groups, a conversation's next turn, and cancelled requests: the rows of an engine here."""
    prompts = [(5, 9, 11), (7, 3), (2, 4, 6, 8)]
    seeds = seeds_of(mx.random.key(1), range(3), SAMPLING)
    requests = [Request(prompt=prompt, seeds=each) for prompt, each in zip(prompts, seeds, strict=True)]

    def act(engine, policy):
        seen = []
        for version, params in enumerate((policy.params, map_arrays(lambda leaf: leaf * 1.5, policy.params))):
            for _ in range(2):  # the second time with the weights that are there
                engine.load(Weights(policy, params, version))
                rollout = generate(engine, requests, SAMPLING)
                seen.append(
                    (rollout.completions(), rollout.logp_bt.tolist(), np.array(rollout.version_b).tolist())
                )
        first = Request(prompt=prompts[0], seeds=seeds[0][:1], keep=True)
        ticket = engine.submit(first, SAMPLING)
        ((row,),) = engine.collect().values()
        further = attrs.evolve(first, prompt=(*prompts[0], *row.tokens, 7), continues=ticket)
        ((turn,),) = (engine.submit(further, SAMPLING), engine.collect())[1].values()
        endless = engine.submit(first, attrs.evolve(SAMPLING, max_new_tokens=10_000))
        engine.cancel(endless)
        ((cut,),) = engine.collect().values()
        with pytest.raises(Cancelled):
            generate(engine, requests, SAMPLING, should_stop=lambda: True)
        return seen, attrs.astuple(turn), cut.finish, engine.version, engine.rows

    here = act(LocalEngine(), policy_and_blank()[0])
    there = exchanged(count, act)
    assert [each[0] for each in here[0]] == [each[0] for each in there[0]]
    assert here[0][0] != here[0][2] and here[2:] == there[2:] == ("cancelled", 1, 0)
    if count == 2:  # else the rows are decoded beside others
        assert here == there


def test_after_a_rank_has_failed_or_the_engine_was_closed_no_call_waits():
    """The error names the rank, and `close` raises it too, in the place of what it led to."""

    def failing(collectives):
        ranks, (policy, blank) = as_run_ranks(collectives), policy_and_blank()
        if collectives.rank():
            with pytest.raises(ValueError), ranks.ending_together():
                serve(ranks, LocalEngine(), policy, blank)
            return
        engine = RankEngine(ranks)
        engine.load(Weights(policy, policy.params, 0))
        engine.submit(Request(prompt=(10**6,), seeds=((0, 1),)), SAMPLING)
        for call in (engine.collect, engine.collect, engine.close):
            with pytest.raises(RankError, match=r"rank 1 .*token id 1000000"):
                call()

    on_ranks(2, failing)

    def closed(engine, policy):
        engine.close()
        with pytest.raises(Interrupted):
            engine.collect()

    exchanged(2, closed)


@CPU
@pytest.mark.parametrize("tables", [{}, LORA, TOOLS], ids=["full", "lora", "tools"])
def test_a_rank_that_samples_changes_nothing_but_the_time(write, tmp_path, tables):
    """Weights, log and completions of one device, to the bit."""
    config = write("run", **tables)
    alone = run_training(load_config(str(config)), report=Quiet()).folder
    want = outcome(alone)
    alone.rename(tmp_path / "alone")
    said = begin(2, tmp_path / "ranks", [str(config), *APART]).end()
    assert said.count("finished in") == 1, said
    assert outcome(alone) == want
    logs = [lines_of(folder / "training_log.jsonl") for folder in (alone, tmp_path / "alone")]
    assert [line.keys() for line in logs[0]] == [line.keys() for line in logs[1]]


@CPU
@pytest.mark.parametrize("fault", ["killed", "hangs"])
def test_a_rank_that_samples_and_fails_is_named_and_its_prompts_are_sampled_again(write, tmp_path, fault):
    """The run ends in one line; what was learned is not lost, and one device finishes the run, to the bit."""
    config = write("run")
    straight = run_training(load_config(str(config)), report=Quiet()).folder
    want = outcome(straight)
    straight.rename(tmp_path / "straight")
    options = [str(config), *APART, "--set", f"system.collective_timeout={15 if fault == 'hangs' else 600}"]
    hooks = ("linger", "1", "runners.engines.local:LocalEngine._step", "26", "600")
    run = begin(2, tmp_path / "ranks", options, *hooks)
    there = tmp_path / "ranks/1.there"
    assert run.wait_until(there.exists), run.said()
    if fault == "killed":
        pid = run.pid(1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    said = run.end(60)
    expected = {"killed": "is gone: it was killed or crashed", "hangs": "waited for rank 1 ("}
    told = [line for line in said.splitlines() if expected[fault] in line]
    assert len(told) == 1 and "rank 1 (" in told[0] and "Traceback" not in said, said
    folder = tmp_path / "outputs/run"
    assert not (folder / "final").exists()
    check_manifest(max(folder.glob("checkpoint-*")))
    run_training(load_config(str(config)), report=Quiet(), resume=True)
    assert outcome(folder) == want


@CPU
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_either_rank_saves_and_the_run_goes_on(write, tmp_path, rank):
    """Rank 0 says how; the other ends when it has saved."""
    config = write("run")
    straight = run_training(load_config(str(config)), report=Quiet()).folder
    want = outcome(straight)
    straight.rename(tmp_path / "straight")
    hooks = ("linger", "0", "runners.training.gradients:MicroBatches.gradients", "2", "600")
    run = begin(2, tmp_path / "ranks", [str(config), *APART, "--set", "checkpoint.every=0"], *hooks)
    assert run.wait_until((tmp_path / "ranks/0.there").exists), run.said()
    pid = run.pid(rank)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    said = run.end(60)
    assert said.count("interrupted\nto continue: mlx.launch ... ") == 1 and "Traceback" not in said, said
    run = begin(2, tmp_path / "ranks", [str(config), *APART, "--resume"])
    assert "was under way: it is sampled again" in run.end()
    assert outcome(tmp_path / "outputs/run") == want


def test_numbers_of_samplers_that_do_not_fit_are_refused(write):
    """With the number that is expected."""
    config = load_config(str(write("run")), ["ranks.samplers=1"])
    with pytest.raises(UserError, match=r"samplers: expected 0, or all ranks but one \(0 of 1\), found 1"):
        run_training(config, report=Quiet())
