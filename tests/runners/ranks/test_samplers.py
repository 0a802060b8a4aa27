"""Ranks that only sample for rank 0: the results equal one device's, and all ranks end together."""

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
from tests.support.resuming import outcome
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_states import load

CPU = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's sums have no fixed order")
SAMPLING = g.Sampling(num_generations=2, max_new_tokens=9)
AHEAD = {
    "rollout": {"max_staleness": 1, "temperature": 1.5},
    "loss": {"correction": "token_truncate"},
    "reward": {"functions": ["letters.py:sums"]},  # each batch step has a gradient
}


def exchanged(count, act):
    """The result of `act(engine, policy)` on rank 0, for which all other ranks sample."""
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
    """A small model's policy, and blank weights of its shapes."""
    policy = g.Policy.from_module(load(FOLDER).module)
    return policy, blank_weights(policy, policy.params)


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory):
    """A model's folder."""
    global FOLDER
    FOLDER = make_model_folder(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.mark.parametrize("count", [2, 3])
def test_other_ranks_sample_as_this_one_would(count):
    """The rows of new weights, groups, next turns and cancelled requests equal a local engine's."""
    prompts = [(5, 9, 11), (7, 3), (2, 4, 6, 8)]
    seeds = seeds_of(mx.random.key(1), range(3), SAMPLING)
    requests = [Request(prompt=prompt, seeds=each) for prompt, each in zip(prompts, seeds, strict=True)]

    def act(engine, policy):
        seen = []
        for version, params in enumerate((policy.params, map_arrays(lambda leaf: leaf * 1.5, policy.params))):
            for _ in range(2):  # the second time with the same weights
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
    if count == 2:  # otherwise, rows are decoded in different batches
        assert here == there


def test_after_a_rank_has_failed_or_the_engine_was_closed_no_call_waits():
    """The error names the rank, and `close` raises it too."""

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


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's sums have no fixed order")
def test_a_killed_sampler_is_named_and_its_prompts_are_sampled_again(tmp_path):
    """The run ends with one message and a checkpoint; one device finishes it bit for bit."""
    config = load_config(str(config_writer(tmp_path)("run", **AHEAD)))
    straight = run_training(config, report=Quiet()).folder
    want = outcome(straight)
    straight.rename(tmp_path / "straight")
    hooks = ("linger", "1", "runners.engines.local:LocalEngine._step", "45", "600")
    run = begin(2, tmp_path / "ranks", [str(tmp_path / "run.toml"), "--set", "ranks.samplers=1"], *hooks)
    assert run.wait_until((tmp_path / "ranks/1.there").exists), run.said()
    pid = run.pid(1)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    said = run.end(60)
    told = [line for line in said.splitlines() if "has disappeared: it was killed or crashed" in line]
    assert len(told) == 1 and "rank 1 (" in told[0] and "Traceback" not in said, said
    check_manifest(max(straight.glob("checkpoint-*")))
    run_training(config, report=Quiet(), resume=True)
    assert outcome(straight) == want


def test_an_invalid_number_of_samplers_is_refused(tmp_path):
    """The error contains the expected number."""
    config = load_config(str(config_writer(tmp_path)("run", **AHEAD)), ["ranks.samplers=1"])
    with pytest.raises(UserError, match=r"samplers: expected 0, or all ranks but one \(0 of 1\), found 1"):
        run_training(config, report=Quiet())
