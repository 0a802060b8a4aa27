"""The sampler's role: what it draws from, and how it gives way to full precision."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.algorithm.diagnostics import LossStats
from grpo_fn.policy.quantized_role import quantized_role
from runners.config.loading import load_config
from runners.training.roles import RolloutRole
from runners.training.train import run_training
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_policies import same_tree, tiny_policy, tiny_rollout
from tests.support.tiny_runs import BY_LETTERS, LETTERS, Notes, small


def role_of(policy, **options):
    """A role in affine-4 over a tiny policy, and a state synced to it."""
    quantized = quantized_role(policy, "affine-4", group_size=32)
    role = RolloutRole(policy, quantized, name="affine-4", **options)
    state = g.init_state(policy.params, g.adamw(1e-3), key=mx.random.key(0))
    return role, role.sync(state)


def difference(mean):
    """Statistics with this mean |Δ log p|."""
    zeros = {name: mx.array(0.0) for name in LossStats._fields}
    return LossStats(**zeros | {"logp_diff_mean": mx.array(mean)})


@pytest.fixture(name="policy")
def _policy():
    return tiny_policy("llama-untied", hidden_size=64, intermediate_size=64)


def drawer(*rollouts):
    """A sampler that hands these out and keeps what it was called with."""
    calls = []

    def sample(policy, params):
        calls.append((policy, params))
        return rollouts[len(calls) - 1]

    return sample, calls


@pytest.mark.parametrize(("mean", "limit", "falls"), [(0.6, 0.5, True), (0.4, 0.5, False), (9.0, 0.0, False)])
def test_past_the_limit_full_precision_takes_over(policy, mean, limit, falls):
    """Above mismatch_limit, and only there, the next sync is of the learner's weights; a line says why."""
    role, state = role_of(policy, limit=limit)
    role.judge(difference(mean))
    news = role.news()
    assert (role.quantization == "none") is falls and bool(news) is falls
    assert same_tree(role.sync(state).old_params, state.params) is falls
    if falls:
        assert role.transform is None and role.policy is policy
        assert f"{mean:g} nats" in news[0] and "rollout.mismatch_limit = 0.5" in news[0]
        assert role.metrics() == {"rollout/quantization": "none", "rollout/fallback": role.fallback}
        assert role.news() == []
        role.judge(difference(mean))
        assert role.news() == []
    else:
        assert role.metrics() == {"rollout/quantization": "affine-4"}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda r: {"logp_bt": r.logp_bt + mx.where(mx.arange(7) == 2, mx.nan, 0.0)}, "not finite"),
        (lambda r: {"logp_bt": r.logp_bt - mx.where(mx.arange(7) == 1, mx.inf, 0.0)}, "not finite"),
        (lambda r: {"tokens_bt": r.tokens_bt + 61 * (mx.arange(7) == 3).astype(mx.int32)}, "does not have"),
        (lambda r: {"tokens_bt": r.tokens_bt - 61 * (mx.arange(7) == 3).astype(mx.int32)}, "does not have"),
    ],
)
def test_numbers_that_fail_are_sampled_again(policy, spoil, reason):
    """NaN, infinity or a strange token: the same rollout comes from the learner's own weights instead."""
    import attrs

    sound = tiny_rollout()
    role, state = role_of(policy, vocabulary=61)
    sample, calls = drawer(attrs.evolve(sound, **spoil(sound)), sound, sound)
    assert role.draw(sample, state.old_params) is sound
    assert calls[0] == (role._quantized.policy, state.old_params)
    assert calls[1] == (policy, state.params)
    assert reason in role.news()[0] and reason in str(role.fallback)
    assert role.draw(sample, state.old_params) is sound and calls[2] == (policy, state.params)
    assert same_tree(role.after_fallback(state).old_params, state.params)


def test_a_sound_rollout_changes_nothing(policy):
    """Finite numbers and known tokens: one draw, and the role and its weights stay."""
    role, state = role_of(policy, vocabulary=61, limit=0.5)
    sample, calls = drawer(tiny_rollout())
    role.draw(sample, state.old_params)
    assert len(calls) == 1 and role.quantization == "affine-4" and role.news() == []
    assert role.after_fallback(state) is state


def test_a_role_comes_back_from_its_facts(policy):
    """What facts() says is all it takes to go on: fallen stays fallen, sound stays quantized."""
    role, state = role_of(policy, limit=0.1)
    same, _ = role_of(policy)
    same.restore(json.loads(json.dumps(role.facts())))
    assert same.quantization == "affine-4"
    role.judge(difference(1.0))
    same.restore(json.loads(json.dumps(role.facts())))
    assert same.quantization == "none" and same.metrics() == role.metrics()
    assert same_tree(same.sync(state).old_params, state.params)


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
    assert "not finite" in json.loads(saved.read_text())["rollout_fallback"]
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
