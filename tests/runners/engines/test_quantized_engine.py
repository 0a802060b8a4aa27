"""The engine's quantized weights: what it draws from, and how it gives way to full precision."""

import json
from pathlib import Path

import attrs
import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.policy.quantized_role import quantized_role
from runners.config.loading import load_config
from runners.engines import local
from runners.engines.engine import Requests, Restart
from runners.engines.local import LocalEngine
from runners.engines.ranks import on_ranks
from runners.ranks.messages import RankMessage
from runners.ranks.ranks import Ranks
from runners.training.train import run_training
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_policies import same_tree, tiny_policy, tiny_rollout
from tests.support.tiny_runs import BY_LETTERS, LETTERS, Notes, small

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


@pytest.mark.parametrize(("mean", "limit", "falls"), [(0.6, 0.5, True), (0.4, 0.5, False), (9.0, 0.0, False)])
def test_past_the_limit_full_precision_takes_over(policy, mean, limit, falls):
    """Above mismatch_limit, and only there, it samples with the learner's weights; a line says why."""
    engine = engine_of(policy, mismatch_limit=limit)
    engine.check_mismatch(mean)
    events = engine.events()
    assert (engine.quantization == "none") is falls and bool(events) is falls
    assert same_tree(engine.sampler[1], policy.params) is falls
    if falls:
        assert engine.sampler[0] is policy
        assert f"{mean:g} nats" in events[0] and "rollout.mismatch_limit = 0.5" in events[0]
        assert engine.metrics() == {"rollout/quantization": "none", "rollout/fallback": engine.fallback}
        engine.check_mismatch(mean)
        assert engine.events() == []
        engine.load(policy.params, 4)
        assert same_tree(engine.sampler[1], policy.params)
    else:
        assert engine.metrics() == {"rollout/quantization": "affine-4"}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda r: {"logp_bt": r.logp_bt + mx.where(mx.arange(7) == 2, mx.nan, 0.0)}, "not finite"),
        (lambda r: {"logp_bt": r.logp_bt - mx.where(mx.arange(7) == 1, mx.inf, 0.0)}, "not finite"),
        (lambda r: {"tokens_bt": r.tokens_bt + 61 * (mx.arange(7) == 3).astype(mx.int32)}, "does not have"),
        (lambda r: {"tokens_bt": r.tokens_bt - 61 * (mx.arange(7) == 3).astype(mx.int32)}, "does not have"),
    ],
)
def test_a_rollout_with_bad_numbers_is_sampled_again_in_full_precision(policy, drawn, spoil, reason):
    """NaN, infinity or a strange token: the same rollout comes from the learner's own weights instead."""
    sound = tiny_rollout()
    engine = engine_of(policy, vocabulary=61)
    quantized = engine.sampler
    calls = drawn(attrs.evolve(sound, **spoil(sound)), sound, sound)
    found = engine.generate(REQUESTS, SAMPLING, key=KEY)
    assert found.tokens_bt is sound.tokens_bt and set(found.version_b.tolist()) == {3}
    assert calls == [quantized, (policy, policy.params)]
    assert reason in engine.events()[0] and reason in str(engine.fallback)
    engine.generate(REQUESTS, SAMPLING, key=KEY)
    assert calls[2] == (policy, policy.params)


def test_a_fallback_restarts_conversations(policy, drawn):
    """Replies that have been given belong to the turns that failed."""
    sound = tiny_rollout()
    engine = engine_of(policy, vocabulary=61)
    drawn(attrs.evolve(sound, logp_bt=sound.logp_bt + mx.nan), sound)
    requests = attrs.evolve(REQUESTS, replies=object())
    with pytest.raises(Restart):
        engine.generate(requests, SAMPLING, key=KEY)
    assert engine.generate(requests, SAMPLING, key=KEY).tokens_bt is sound.tokens_bt


def test_a_sound_rollout_changes_nothing(policy, drawn):
    """Finite numbers and known tokens: one draw, and the quantized weights stay."""
    engine = engine_of(policy, vocabulary=61, mismatch_limit=0.5)
    calls = drawn(tiny_rollout())
    engine.generate(REQUESTS, SAMPLING, key=KEY)
    assert len(calls) == 1 and engine.quantization == "affine-4" and engine.events() == []


def test_a_fault_of_another_rank_causes_the_fallback(policy, drawn):
    """It falls back with it, though its own numbers are sound."""
    engine, others = engine_of(policy), ["its log-probs are not finite"]

    class Two(Ranks):
        """This rank and another."""

        is_alone = False

        def all_gather_object(self, where, value=None, arrays=None):
            return [RankMessage(where, value), RankMessage(where, others.pop())]

    calls = drawn(tiny_rollout(), tiny_rollout())
    on_ranks(engine, Two()).generate(REQUESTS, SAMPLING, key=KEY)
    assert len(calls) == 2 and engine.quantization == "none" and not others
    assert on_ranks(engine, Ranks()) is engine


def overflowing_folder(path: Path) -> Path:
    """A model that computes well in float16, though quantizing it does not: two weights, never used as their
    inputs are zero, lie further apart than float16 reaches."""
    folder = make_model_folder(path, "llama", dtype="float16")
    weights = dict(mx.load(str(folder / "model.safetensors")))
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


def run(tmp_path: Path, *overrides: str):
    """A short run; its log's updates, its lines and its folder."""
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "train.toml").write_text(RUN)
    notes = Notes()
    settings = [f"run.output_dir={tmp_path / 'out'}", "run.overwrite=true", *overrides]
    config = load_config(str(tmp_path / "train.toml"), settings)
    result = run_training(config, report=notes)
    log = (result.folder / "training_log.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, log) if "loss" in line], notes.lines, result


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory):
    """The settings of such a model, and its run without a quantized sampler: its log's updates and lines."""
    place = tmp_path_factory.mktemp("unquantized")
    model = [f"model.path={overflowing_folder(place / 'model')}", "model.dtype=float16"]
    return model, *run(place, *model)[:2]


@pytest.mark.parametrize("storage", ["packed", "dequantized"])
def test_a_run_whose_quantized_sampler_overflows_goes_on(tmp_path, unquantized, storage):
    """NaN logits in the sampler: no crash, no endless loop; the first rollout already is a good one."""
    model, full, full_lines = unquantized
    log, lines, result = run(tmp_path, *model, "rollout.quantization=affine-3", f"rollout.storage={storage}")
    assert len(log) == 3
    for line in log:
        assert line["rollout/quantization"] == "none" and "not finite" in line["rollout/fallback"]
        assert line["sampling/sampling_logp_difference/mean"] < 0.02
        assert line["grad_norm"] > 0 and "update_skipped" not in line
    assert sum("sampled again" in line for line in lines) == 1
    (saved,) = result.folder.glob("checkpoint-*/trainer_state.json")
    assert "not finite" in json.loads(saved.read_text())["loop"]["fallback"]
    assert [line["reward"] for line in full] == [line["reward"] for line in log]
    assert "rollout/quantization" not in full[0] and not any("sampled again" in line for line in full_lines)


@pytest.mark.parametrize("more", [[], ["loss.sync_every=2"]])
def test_a_run_past_the_limit_goes_on_in_full_precision(tmp_path, more):
    """The update that shows the mismatch says so, and the next rollout is the learner's own."""
    folder = make_model_folder(tmp_path / "model", "llama")
    log, lines, _ = run(
        tmp_path,
        f"model.path={folder}",
        "rollout.quantization=affine-3",
        "rollout.mismatch_limit=1e-3",
        *more,
    )
    differences = [line["sampling/sampling_logp_difference/mean"] for line in log]
    assert differences[0] > 1e-3 and max(differences[1:]) < 1e-4
    assert all("mismatch_limit" in line["rollout/fallback"] for line in log)
    assert sum("sampling continues in full precision" in line for line in lines) == 1
