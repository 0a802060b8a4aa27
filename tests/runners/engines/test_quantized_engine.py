"""The engine's quantized weights: what it draws from, and how it gives way to full precision."""

import json
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

import grpo_fn as g
from grpo_fn.policy import input_moments
from grpo_fn.policy.quantized_role import quantized_role
from runners.checkpoints.checkpoint import load_trees
from runners.engines import local
from runners.engines.engine import Requests
from runners.engines.local import LocalEngine
from runners.ranks.messages import RankMessage
from runners.ranks.ranks import Ranks
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_policies import same_tree, tiny_policy, tiny_rollout
from tests.support.tiny_runs import BY_LETTERS, ran, small

REQUESTS, SAMPLING, KEY = Requests(prompts=[[1]]), g.Sampling(), mx.random.key(0)


def engine_of(policy, **options):
    """An engine in affine-4 over a tiny policy, with its parameters."""
    quantized = quantized_role(policy, "affine-4", group_size=32)
    engine = LocalEngine(policy, quantized=quantized, name="affine-4", **options)
    engine.load(policy.params, 3)
    return engine


@pytest.fixture(name="policy")
def _policy():
    return tiny_policy("llama-untied", hidden_size=64, intermediate_size=64)


@pytest.fixture
def drawn(monkeypatch):
    """A function that sets what the decode loop returns, one after another; the list of its calls grows."""

    def use(*rollouts):
        calls = []

        def decode(policy, params, prompts, sampling, **how):
            calls.append((policy, params))
            return rollouts[len(calls) - 1]
            yield

        monkeypatch.setattr(local, "decode", decode)
        return calls

    return use


def seen(size, kl, tokens=9.0):
    """The statistics of an update with this effective sample size and KL divergence."""
    zero = mx.array(0.0)
    found = g.LossStats(*[zero] * len(g.LossStats._fields))
    share = {"is_ratio_mean": mx.array(1.0), "is_ratio_sq_mean": mx.array(1 / size)}
    return found._replace(num_tokens=mx.array(tokens), sampling_kl_k3=mx.array(kl), **share)


@pytest.mark.parametrize(
    ("stats", "limit", "finer"),
    [
        (seen(0.9, 0.3), 0.2, True),
        (seen(0.4, 0.1), 0.2, True),
        (seen(0.9, 0.1), 0.2, False),
        (seen(0.1, 9.0), 0.0, False),
        (seen(0.1, 9.0, tokens=0.0), 0.2, False),
    ],
)
def test_a_coarse_format_gives_way_to_finer_ones_and_at_last_to_full_precision(policy, stats, limit, finer):
    """By effective sample size and KL divergence; each step has its line, and new weights at once."""
    engine = engine_of(policy, mismatch_limit=limit, note=(lines := []).append)
    before = engine.sampler[1]
    engine.check_mismatch(stats)
    assert len(lines) == finer and same_tree(engine.sampler[1], before) is not finer
    assert engine.metrics() == {"rollout/quantization": "affine-6" if finer else "affine-4"}
    if finer:
        engine.check_mismatch(stats)
        assert engine.quantization == "affine-8"
        assert f"affine-6 has an effective sample size of {float(stats.ess):.2g}" in lines[1]
        engine.check_mismatch(stats)
        assert engine.sampler == (policy, policy.params)
        assert "full precision: affine-8" in lines[2]
        assert engine.metrics() == {"rollout/quantization": "none", "rollout/fallback": engine.fallback}
        engine.check_mismatch(stats)
        assert len(lines) == 3


@pytest.mark.parametrize("storage", ["packed", "dequantized"])
def test_an_engine_that_calibrates_samples_in_full_precision_until_it_has_moments(policy, storage):
    """Then its weights are the role's with these moments, also in finer formats and after a restart."""
    role = quantized_role(policy, "affine-3", storage, group_size=32)
    tokens_bl = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    moments = input_moments(policy, policy.params, tokens_bl, mx.array([4, 3]), role.names, 32)

    def loaded(**options):
        engine = LocalEngine(policy, quantized=role, name="affine-3", calibrates=True, **options)
        engine.load(policy.params, 3)
        return engine

    engine = loaded(mismatch_limit=0.2)
    assert engine.quantization == "none" and engine.sampler == (policy, policy.params)
    engine.check_mismatch(seen(0.1, 9.0))
    engine.round_as("", moments)
    assert engine.quantization == "affine-3" and engine.version == 3
    for name in ("affine-3", "affine-4"):
        again = loaded()
        again.round_as(name, moments)
        wanted = role.remade(name, moments).transform(policy.params)
        assert same_tree(engine.sampler[1], wanted) and same_tree(again.sampler[1], wanted)
        rollouts = [
            each.generate(REQUESTS, g.Sampling(max_new_tokens=4), key=KEY) for each in (engine, again)
        ]
        assert same_tree(*(rollout.logp_bt for rollout in rollouts))
        engine.check_mismatch(seen(0.1, 9.0))


@pytest.mark.parametrize("bad", [mx.nan, -mx.inf])
def test_a_rollout_with_bad_numbers_is_sampled_again_in_full_precision(policy, drawn, bad):
    """NaN or infinity: the same rollout comes from the learner's own weights instead."""
    sound = tiny_rollout()
    engine = engine_of(policy, note=(lines := []).append)
    quantized = engine.sampler
    calls = drawn(attrs.evolve(sound, logp_bt=mx.where(mx.arange(7) == 2, bad, sound.logp_bt)), sound, sound)
    found = engine.generate(REQUESTS, SAMPLING, key=KEY)
    assert found.tokens_bt is sound.tokens_bt and np.all(np.array(found.version_b) == 3)
    assert calls == [quantized, (policy, policy.params)]
    assert "not finite" in lines[0] and "not finite" in str(engine.fallback)
    engine.generate(REQUESTS, SAMPLING, key=KEY)
    assert calls[2] == (policy, policy.params)


def test_a_fault_of_another_rank_causes_the_fallback(policy, drawn):
    """It falls back with it, though its own numbers are sound."""
    others = [True]

    class Two(Ranks):
        """This rank and another."""

        def all_gather_object(self, where, value=None):
            return [RankMessage(where, value), RankMessage(where, others.pop())]

    calls, engine = drawn(tiny_rollout(), tiny_rollout()), engine_of(policy, ranks=Two())
    engine.generate(REQUESTS, SAMPLING, key=KEY)
    assert len(calls) == 2 and engine.quantization == "none" and not others


def overflowing_folder(path: Path) -> Path:
    """A model that computes well in float16, though quantizing it does not: two weights, never used as their
    inputs are zero, lie further apart than float16 reaches."""
    folder = make_model_folder(path, "llama", dtype="float16")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    projection = weights["model.layers.0.self_attn.q_proj.weight"]
    projection[0, 0], projection[0, 1] = 6e4, -6e4
    weights["model.layers.0.input_layernorm.weight"][:2] = 0.0
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


RUN = small(
    rollout={"max_new_tokens": 8, "group_size": 32},
    reward=BY_LETTERS,
    optim={"max_steps": 3},
    checkpoint={"every": 3},
    loss={"correction": "token_truncate"},
)


def run(tmp_path: Path, *overrides: str, **how):
    """A short run; its log's updates, its lines and its result."""
    found = ran(tmp_path, *overrides, text=RUN, **how)
    return found.updates, found.notes, found.result


@pytest.mark.parametrize("storage", ["packed", "dequantized"])
def test_a_run_whose_quantized_sampler_overflows_goes_on(tmp_path, storage):
    """NaN logits in the sampler: no crash, no endless loop; the first rollout already is a good one."""
    model = [f"model.path={overflowing_folder(tmp_path / 'model')}", "model.dtype=float16"]
    rounding = ["rollout.quantization=affine-3", f"rollout.storage={storage}", "rollout.calibration=none"]
    log, lines, result = run(tmp_path, *model, *rounding)
    assert len(log) == 3
    for line in log:
        assert line["rollout/quantization"] == "none" and "not finite" in line["rollout/fallback"]
        assert line["sampling/sampling_logp_difference/mean"] < 0.02
        assert line["grad_norm"] > 0 and "update_skipped" not in line
    assert sum("sampled again" in line for line in lines) == 1
    (saved,) = result.folder.glob("checkpoint-*/trainer_state.json")
    assert "not finite" in json.loads(saved.read_text())["loop"]["fallback"]


@pytest.mark.parametrize("more", [["loss.sync_every=2"], ["rollout.storage=packed"]])
def test_a_run_past_the_limit_goes_on_in_a_finer_format(tmp_path, more):
    """The update that shows the mismatch says so, and the next rollout is already finer."""
    folder = make_model_folder(tmp_path / "model", "llama")
    limits = ["rollout.quantization=affine-3", "rollout.calibration=none", "rollout.mismatch_limit=1e-9"]
    log, lines, _ = run(tmp_path, f"model.path={folder}", *limits, *more)
    assert [line["rollout/quantization"] for line in log] == ["affine-4", "affine-6", "affine-8"]
    differences = [line["sampling/sampling_logp_difference/mean"] for line in log]
    assert differences == sorted(differences, reverse=True) and differences[-1] > 1e-6
    assert sum("sampling continues in affine-" in line for line in lines) == 3


def test_each_rollout_is_judged_once(tmp_path):
    """A rollout that serves several updates shows the mismatch of its own format in each of them, and one in
    full precision, for calibration, that of none."""
    folder = make_model_folder(tmp_path / "model", "llama")
    limits = ["rollout.quantization=affine-3", "rollout.mismatch_limit=1e-9", "optim.num_iterations=2"]
    log, _, _ = run(tmp_path, f"model.path={folder}", *limits)
    formats = [line["rollout/quantization"] for line in log]
    assert formats == ["affine-3"] * 2 + ["affine-4"] * 2 + ["affine-6"] * 2


def test_calibration_waits_for_the_first_rollout_after_supervised_updates(tmp_path):
    """Gold completions are no rollout; the reference then has the same moments, at the weights before it."""
    folder = make_model_folder(tmp_path / "model", "llama")
    gold = ["sft.updates=2", "sft.learning_rate=1e-2", "rollout.max_new_tokens=60", "loss.beta=0.1"]
    formats = ["rollout.quantization=affine-4", "loss.ref_quantization=affine-4", "optim.max_steps=1"]
    log, _, result = run(tmp_path, f"model.path={folder}", *gold, *formats, "checkpoint.every=1")
    assert [line["rollout/quantization"] for line in log] == ["none", "none", "affine-4"]
    rounded = [load_trees(result.folder / f"checkpoint-{step}") for step in (2, 3)]
    assert [bool(loop["moments"]) for _, loop in rounded] == [False, True]
    references = [train.ref_params for train, _ in rounded]
    assert not same_tree(*references)
    weights = rounded[0][0].params
    policy = g.Policy.from_module(load_model(folder)[0])
    moments = rounded[1][1]["moments"]
    role = quantized_role(policy, "affine-4", "packed", group_size=32, moments=moments)
    assert same_tree(references[1], role.transform(weights))


@pytest.mark.parametrize(
    ("change", "formats"), [("quantization=mxfp8", ()), ("bits_budget=9", ("affine-8",))]
)
def test_another_format_in_the_config_is_taken_after_a_resume(tmp_path, change, formats):
    """What the run had found out about the old one, finer formats and a budget's choice, does not count."""
    folder = make_model_folder(tmp_path / "model", "llama")
    limits = ["rollout.quantization=affine-3", "rollout.bits_budget=4.5", "rollout.mismatch_limit=1e-9"]
    limits.append("checkpoint.every=1")
    run(tmp_path, f"model.path={folder}", *limits)
    changed = [f"rollout.{change}", "rollout.mismatch_limit=0", "optim.max_steps=5"]
    changed += ["rollout.bits_budget=0", "rollout.group_size=0"] if "mx" in change else []
    how = {"resume": tmp_path / "out/small/checkpoint-3", "allow_config_change": True}
    log, _, result = run(tmp_path, f"model.path={folder}", *limits, *changed, **how)
    wanted = "mxfp8" if "mx" in change else "affine-3"
    assert [line["rollout/quantization"] for line in log[3:]] == [wanted] * 2
    _, loop = load_trees(max(result.folder.glob("checkpoint-*")))
    assert set(loop["formats"].values()) == set(formats)
