"""The metrics of an update: groups without variance, clipping, and times."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from runners.config.loading import load_config
from runners.telemetry.run_statistics import PARTS, PartTimes, Tally, loss_metrics, rollout_metrics


def tally_of(rewards_pg: list[list[float]]) -> Tally:
    """A batch step with these rewards and one reward function."""
    rewards = np.array(rewards_pg, np.float64)
    return Tally(
        rewards_pg=rewards,
        values_kb=rewards.reshape(1, -1),
        lengths_b=np.ones(rewards.size),
        finished_b=np.ones(rewards.size, bool),
        sampled_tokens=rewards.size,
        resampled=0,
        logged={},
        seconds={},
    )


@pytest.mark.parametrize(
    ("baseline", "wanted"), [("group_mean", 0.75), ("leave_one_out", 0.75), ("batch_mean", 0.5)]
)
def test_groups_that_teach_nothing_depend_on_the_baseline(baseline: str, wanted: float) -> None:
    """Two batch steps of two groups, of which one has variance. The batch's mean moves the other group of its
    step as well; the second step, all of whose rewards are equal, teaches nothing with any baseline."""
    tallies = [tally_of([[1.0, 1.0], [0.0, 1.0]]), tally_of([[1.0, 1.0], [1.0, 1.0]])]
    metrics = rollout_metrics(tallies, ["r"], load_config("quickstart", [f"loss.baseline={baseline}"]))
    assert metrics["frac_reward_zero_std"] == wanted


def test_rewards_that_are_equal_in_float32_are_a_group_without_variance() -> None:
    """Advantages are computed in float32, in which these rewards are equal."""
    tallies = [tally_of([[0.1, 0.1 + 1e-12], [0.0, 1.0]])]
    metrics = rollout_metrics(tallies, ["r"], load_config("quickstart"))
    assert metrics["frac_reward_zero_std"] == 0.5


def stats_of(spec: g.LossSpec) -> g.LossStats:
    """The statistics of two sequences (4 tokens and 1 token) with all ratios 3 and A = 1 and −1."""
    logp = mx.full((2, 4), float(np.log(3.0)))
    mask = mx.array([[1, 1, 1, 1], [1, 0, 0, 0]])
    return g.policy_loss(logp, mx.array([1.0, -1.0]), mask, spec, old_logp_bt=mx.zeros((2, 4)))[1]


UPDATE = g.UpdateStats(mx.array(1.0), mx.array(1e-6), mx.array(False))
CLIP = {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}


@pytest.mark.parametrize(
    ("fields", "names", "high"),
    [
        ({}, CLIP, 4 / 5),
        ({"level": "sequence"}, CLIP, 1 / 2),  # of sequences, as in TRL
        ({"surrogate": "dual_clip", "dual_clip": 4.0}, CLIP, 4 / 5),
        ({"surrogate": "cispo"}, {"cispo_clip_ratio"}, 4 / 5),
        ({"surrogate": "cispo", "level": "sequence"}, {"cispo_clip_ratio"}, 1 / 2),
        ({"surrogate": "sapo"}, set(), 0.0),
        ({"surrogate": "none"}, set(), 0.0),
    ],
)
def test_clipping_is_reported_where_the_surrogate_clips(fields: dict, names: set[str], high: float) -> None:
    """The names are TRL's; at level `sequence`, the share counts sequences."""
    spec = g.LossSpec(**fields)
    stats = stats_of(spec)
    metrics = loss_metrics(stats, UPDATE, spec, has_reference=False)
    assert {name for name in metrics if "clip" in name} == names
    assert stats.clip_high.item() == pytest.approx(high) and stats.clip_low.item() == 0.0
    for name in names & {"clip_ratio/high_mean", "cispo_clip_ratio"}:
        assert metrics[name] == pytest.approx(high)


def test_the_parts_of_a_step_and_the_rest_add_up():
    """The clock is set by hand."""
    now = [10.0]
    times = PartTimes(lambda: now[0])
    times.add("rollout", 2.0)
    now[0] += 2.5
    with times.timing("learner"):
        now[0] += 4
    found = times.take()
    assert found["step_time"] == 6.5 and found["time/rollout"] == 2 and found["time/learner"] == 4
    assert found["time/rest"] == 0.5 and found["time/sync"] == 0
    with times.timing("sync"):
        now[0] += 1
    with times.timing(None):
        now[0] += 100  # an evaluation
    assert times.take() == {
        "step_time": 1.0, "time/rest": 0.0, **{f"time/{part}": float(part == "sync") for part in PARTS}
    }  # fmt: skip
