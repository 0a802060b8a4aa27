"""The sampler switches to finer formats and full precision if its numbers differ too much."""

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
from runners.config.loading import load_config
from runners.engines.engine import Weights
from runners.ranks.ranks import Ranks
from runners.training import rollout as rollout_module
from runners.training.sampler import first_sampler, judged, restored, rounded_as, weights_of
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_policies import same_tree, tiny_policy
from tests.support.tiny_runs import BY_LETTERS, ran, small


@pytest.fixture(name="policy")
def _policy():
    return tiny_policy("llama-untied", hidden_size=64, intermediate_size=64)


def config_of(name="affine-4", limit=0.2, calibration="none"):
    """A config whose sampler has this format."""
    settings = [f"rollout.quantization={name}", f"rollout.mismatch_limit={limit}", "model.path=embedded"]
    return load_config(None, [*settings, f"rollout.calibration={calibration}"])


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
def test_a_coarse_format_is_replaced_by_finer_ones_and_finally_full_precision(policy, stats, limit, finer):
    """Effective sample size and KL divergence decide; each switch has a message and new weights."""
    config, role = config_of(limit=limit), quantized_role(policy, "affine-4", group_size=32)
    first = first_sampler(config, role)
    sampler, line = judged(first, stats, role, config)
    assert bool(line) == finer
    rounded = [weights_of(policy, policy.params, each).params for each in (first, sampler)]
    assert same_tree(*rounded) is not finer
    assert sampler.metrics() == {"rollout/quantization": "affine-6" if finer else "affine-4"}
    if finer:
        sampler, line = judged(sampler, stats, role, config)
        assert sampler.quantization == "affine-8"
        assert f"affine-6 has an effective sample size of {float(stats.ess):.2g}" in str(line)
        sampler, line = judged(sampler, stats, role, config)
        full = weights_of(policy, policy.params, sampler)
        assert (full.policy, full.params) == (policy, policy.params)
        assert "full precision: affine-8" in str(line)
        assert sampler.metrics() == {"rollout/quantization": "none", "rollout/fallback": sampler.fallback}
        assert judged(sampler, stats, role, config) == (sampler, None)


@pytest.mark.parametrize("storage", ["packed", "dequantized"])
def test_a_calibrated_sampler_has_full_precision_until_it_has_moments(policy, storage):
    """Then its weights are rounded with these moments, also in finer formats and after a resume."""
    role = quantized_role(policy, "affine-3", storage, group_size=32)
    tokens_bl = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    moments = input_moments(policy, policy.params, tokens_bl, mx.array([4, 3]), role.names, 32)
    config = config_of("affine-3", calibration="activations")
    sampler = first_sampler(config, role)
    assert sampler.quantization == "none" and weights_of(policy, policy.params, sampler).policy is policy
    assert judged(sampler, seen(0.1, 9.0), role, config) == (sampler, None)
    sampler = rounded_as(sampler, role, "affine-3", moments)
    assert sampler.quantization == "affine-3"
    for name in ("affine-3", "affine-4"):
        again = restored(attrs.evolve(sampler, role=None), config, role)
        wanted = role.remade(name, moments).transform(policy.params)
        for each in (sampler, again):
            assert same_tree(weights_of(policy, policy.params, each).params, wanted)
        sampler, _ = judged(sampler, seen(0.1, 9.0), role, config)


class Spoiled:
    """An engine whose first rollouts have numbers that are not finite."""

    def __init__(self, engine, spoils):
        self._engine, self.spoils, self.loaded = engine, list(spoils), []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def load(self, weights):
        self.loaded.append(weights)
        self._engine.load(weights)

    def collect(self, least=1, **how):
        rows = self._engine.collect(least, **how)
        if rows and self.spoils:
            bad = self.spoils.pop()
            rows = {
                ticket: tuple(attrs.evolve(row, logp=(bad, *row.logp[1:])) for row in found)
                for ticket, found in rows.items()
            }
        return rows


@pytest.mark.parametrize("spoils", [[np.nan], [-np.inf], [], None])
def test_bad_numbers_on_any_rank_make_all_ranks_sample_again(tmp_path, monkeypatch, spoils):
    """NaN or infinity here, or a fault on another rank (None), leads to a rollout with full weights."""
    others = [spoils is None]

    class Two(Ranks):
        def all_gather_object(self, where, value=None):
            return [value, others.pop()] if where == "the sampler" else [value]

    engines, real = [], rollout_module.Collector.collect

    def collect(self, engine, draw):
        engines.append(Spoiled(engine, spoils or []))
        return real(attrs.evolve(self, ranks=Two()), engines[-1], draw)

    monkeypatch.setattr(rollout_module.Collector, "collect", collect)
    folder = make_model_folder(tmp_path / "model", "llama")
    rounding = ["rollout.quantization=affine-8", "rollout.calibration=none", "optim.max_steps=1"]
    log, lines, _ = run(tmp_path, f"model.path={folder}", *rounding)
    falls = spoils != []
    assert [isinstance(each, Weights) for each in engines[0].loaded] == [True] * falls
    assert log[0]["rollout/quantization"] == ("none" if falls else "affine-8")
    assert sum("sampled again" in line for line in lines) == falls


def overflowing_folder(path: Path) -> Path:
    """A model that float16 can compute but whose quantization overflows: two weights, whose inputs are zero,
    differ by more than the largest float16."""
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
    """A short run: its logged updates, its messages and its result."""
    found = ran(tmp_path, *overrides, text=RUN, **how)
    return found.updates, found.notes, found.result


@pytest.mark.parametrize("storage", ["packed", "dequantized"])
def test_a_run_whose_quantized_sampler_overflows_continues(tmp_path, storage):
    """The first rollout is already sampled in full precision."""
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
    assert "not finite" in json.loads(saved.read_text())["loop"]["sampler"]["fallback"]


@pytest.mark.parametrize("more", [["loss.sync_every=2"], ["rollout.storage=packed"]])
def test_a_run_above_the_mismatch_limit_continues_in_a_finer_format(tmp_path, more):
    """The update with the mismatch reports it, and the next rollout uses the finer format."""
    folder = make_model_folder(tmp_path / "model", "llama")
    limits = ["rollout.quantization=affine-3", "rollout.calibration=none", "rollout.mismatch_limit=1e-9"]
    log, lines, _ = run(tmp_path, f"model.path={folder}", *limits, *more)
    assert [line["rollout/quantization"] for line in log] == ["affine-4", "affine-6", "affine-8"]
    differences = [line["sampling/sampling_logp_difference/mean"] for line in log]
    assert differences == sorted(differences, reverse=True) and differences[-1] > 1e-6
    assert sum("sampling continues in affine-" in line for line in lines) == 3


def test_each_rollout_is_judged_once(tmp_path):
    """A rollout that is used for several updates shows the mismatch of its format in each; a rollout in
    full precision, for calibration, shows none."""
    folder = make_model_folder(tmp_path / "model", "llama")
    limits = ["rollout.quantization=affine-3", "rollout.mismatch_limit=1e-9", "optim.num_iterations=2"]
    log, _, _ = run(tmp_path, f"model.path={folder}", *limits)
    formats = [line["rollout/quantization"] for line in log]
    assert formats == ["affine-3"] * 2 + ["affine-4"] * 2 + ["affine-6"] * 2


def test_calibration_waits_for_the_first_rollout_after_supervised_updates(tmp_path):
    """Reference completions are not a rollout. The reference model is rounded with the same moments."""
    folder = make_model_folder(tmp_path / "model", "llama")
    gold = ["sft.updates=2", "sft.learning_rate=1e-2", "rollout.max_new_tokens=60", "loss.beta=0.1"]
    formats = ["rollout.quantization=affine-4", "loss.ref_quantization=affine-4", "optim.max_steps=1"]
    log, _, result = run(tmp_path, f"model.path={folder}", *gold, *formats, "checkpoint.every=1")
    assert [line["rollout/quantization"] for line in log] == ["none", "none", "affine-4"]
    rounded = [load_trees(result.folder / f"checkpoint-{step}") for step in (2, 3)]
    assert ["sampler" in loop for _, loop in rounded] == [False, True]
    references = [train.ref_params for train, _ in rounded]
    assert not same_tree(*references)
    weights = rounded[0][0].params
    policy = g.Policy.from_module(load_model(folder)[0])
    moments = rounded[1][1]["sampler"]["moments"]
    role = quantized_role(policy, "affine-4", "packed", group_size=32, moments=moments)
    assert same_tree(references[1], role.transform(weights))


@pytest.mark.parametrize(
    ("change", "formats"), [("quantization=mxfp8", ()), ("bits_budget=9", ("affine-8",))]
)
def test_a_resumed_run_uses_a_changed_format(tmp_path, change, formats):
    """Results for the old format, such as a finer format or a budget's choice, are dropped."""
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
    last = max(result.folder.glob("checkpoint-*"))
    plain = json.loads((last / "trainer_state.json").read_text())["loop"]
    sampler = plain.get("sampler") or load_trees(last)[1]["sampler"]
    assert set((sampler["formats"] or {}).values()) == set(formats)
