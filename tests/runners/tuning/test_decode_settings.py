"""How steps are launched, how many rows memory holds, and the same tokens with each setting."""

import attrs
import mlx.core as mx
import pytest

import grpo_fn as g
from runners.config.loading import load_config
from runners.machine.launch_modes import launch_keywords
from runners.machine.startup import Platform
from runners.tuning import decode_settings
from runners.tuning.decode_settings import resolve_decoding
from runners.tuning.row_memory import Workload
from tests.support.tiny_policies import tiny_policy
from tests.support.tiny_runs import small

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17]]


def fill(tmp_path, *overrides, backend="cpu"):
    """`resolve_decoding` for a config, on a tiny model: (launch, check_every, max_batch), and the lines."""
    (tmp_path / "train.toml").write_text(small(rollout={"max_new_tokens": 20}))
    config = load_config(str(tmp_path / "train.toml"), overrides)
    policy = tiny_policy()
    work = Workload(
        policy=policy,
        params=policy.params,
        lengths=tuple(map(len, PROMPTS)),
        num_generations=config.rollout.num_generations,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    filled, lines = resolve_decoding(
        config, work, state=policy.params, platform=Platform(backend, device="a device")
    )
    assert attrs.evolve(filled, rollout=config.rollout) == config
    return (filled.rollout.launch, filled.rollout.check_every, filled.rollout.max_batch), lines


@pytest.mark.parametrize(("backend", "launch"), [("cpu", "eval"), ("cuda", "async"), ("metal", "async")])
def test_the_backend_decides_how_steps_are_launched(tmp_path, backend, launch):
    """Nothing is worth a line where all rows fit."""
    assert fill(tmp_path, backend=backend) == ((launch, 8, 0), ())


def test_what_is_fixed_stays(tmp_path, monkeypatch):
    """Memory is not looked at for a bound that is given."""
    monkeypatch.setattr(decode_settings, "free_memory", lambda *_: pytest.fail("looked at"))
    fixed = 'rollout.launch="async"', "rollout.check_every=3", "rollout.max_batch=6"
    assert fill(tmp_path, *fixed) == (("async", 3, 6), ())


def test_memory_bounds_the_rows(tmp_path, monkeypatch):
    """Rows that do not fit are not decoded together, and a line says so; one group always is."""
    monkeypatch.setattr(decode_settings, "free_memory", lambda limit: 10**6)
    many = "rollout.max_new_tokens=250", "rollout.num_generations=2"
    assert fill(tmp_path, *many) == (("eval", 8, 4), ("decoding: memory holds 4 of 8 rows together",))
    limits = []
    monkeypatch.setattr(decode_settings, "free_memory", lambda limit: limits.append(limit) or 0)
    assert fill(tmp_path, "system.memory_limit_gb=3.5")[0] == ("eval", 8, 4)
    assert limits == [3.5]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_setting_changes_a_token(name):
    """Any two of launch, check_every and batch limit draw the very same completions and log-probs."""
    policy = tiny_policy(name)

    def roll(launch, check_every, max_batch):
        return g.generate(
            policy,
            policy.params,
            PROMPTS,
            key=mx.random.key(3),
            num_generations=4,
            max_new_tokens=24,
            eos_ids=range(4),
            decoding=g.Decoding(max_batch=max_batch, check_every=check_every, **launch_keywords(launch)),
        )

    want = roll("eval", 1, 0)
    assert len(set(want.lengths_b.tolist())) > 3
    for launch, check_every, max_batch in (
        ("eval", 8, 8),
        ("async", 4, 0),
        ("async", 16, 4),
        ("eval", 32, 4),
    ):
        got = roll(launch, check_every, max_batch)
        assert got.completions() == want.completions(), (launch, check_every, max_batch)
        assert mx.allclose(got.logp_bt, want.logp_bt, atol=1e-4).item()
