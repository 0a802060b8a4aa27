"""A run that becomes worse causes one warning with the likeliest key; other runs cause none."""

import json

import attrs
import numpy as np
import pytest

from runners.checkpoints.values import decoded, encoded
from runners.config.loading import load_config
from runners.telemetry.run_watch import Seen, Watch


def config_with(*settings):
    """The quickstart's config with a learning rate of 5e-6."""
    return load_config("quickstart", ["optim.learning_rate=5e-6", *settings]).check()


def fed(config, readings, seen=None):
    """All lines and the final state, for readings that are metrics of updates or evaluations."""
    watch = Watch(config, [])
    seen, lines = seen or Seen(), []
    for reading in readings:
        at = reading["update"] if "em_subset" in reading else None
        seen, found = watch.see(reading, seen, at)
        lines += found
    return lines, seen


def evaluation(update, em=None, reward=None, problems=1319):
    """An evaluation's metrics."""
    scores = {"em": em, "eval/reward": reward, "eval/reward_std": 0.5}
    return {"update": update, "em_subset": problems, **{k: v for k, v in scores.items() if v is not None}}


def updates(rewards, start=1, **more):
    """Metrics of updates with these rewards."""
    usual = {"completions/mean_length": 100.0, "grad_norm": 0.5, "frac_reward_zero_std": 0.2, **more}
    return [{"update": start + i, "reward": float(r), **usual} for i, r in enumerate(rewards)]


def noisy(mean, count, seed=0, std=0.1):
    """Rewards around a mean."""
    return mean + std * np.random.default_rng(seed).standard_normal(count)


def test_a_fall_of_the_held_out_score_is_named_at_once_and_once():
    """The line has both scores, both updates, the key and a value to try; it appears once."""
    readings = [evaluation(0, 0.24), evaluation(50, 0.295), evaluation(100, 0.205), evaluation(150, 0.2)]
    lines, seen = fed(config_with(), [*updates(noisy(1, 20)), *readings])
    assert lines == [
        "held-out exact match fell from 29.5% (update 50) to 20.5% (update 100); "
        "optim.learning_rate = 5e-06 is the likeliest cause: try 1e-06"
    ]
    assert seen.progress.line == lines[0]
    recovered, seen = fed(config_with(), [evaluation(200, 0.29)], seen)
    assert not recovered and not seen.progress.worse


@pytest.mark.parametrize(
    ("scores", "problems", "falls"),
    [
        ((0.46, 0.5, 0.02), 50, True),
        ((0.46, 0.5, 0.44), 50, False),  # within chance
        ((0.46, 0.5, 0.44), 5000, True),
        ((0.3, 0.6), 50, False),
        ((0.5,), 50, False),
        ((1.0, 0.995), 200, False),
        ((1.0, 0.5), 200, True),
    ],
)
@pytest.mark.parametrize("measure", ["em", "reward"])
def test_a_fall_counts_beyond_chance(scores, problems, falls, measure):
    """The fall must exceed 2.5 standard errors of the difference for that number of problems."""
    readings = [evaluation(n, **{measure: score}, problems=problems) for n, score in enumerate(scores)]
    lines, _ = fed(config_with(), readings)
    if measure == "em" or 1.0 not in scores:
        assert bool(lines) is falls


def test_the_reward_s_fall_is_named_with_what_changed():
    """The best mean of ten updates is compared; changed lengths and gradients are named."""
    calm, fallen = noisy(3, 30), noisy(2, 12, seed=1)
    lines, seen = fed(config_with("stop.patience=3"), [*updates(calm), *updates(fallen, 31)])
    (line,) = lines
    assert line.startswith("reward fell from 3.") and "optim.learning_rate = 5e-06" in line
    assert seen.reached == f"{line} (stop.patience)"
    # A smaller fall counts only together with a change.
    less = noisy(2.87, 10, seed=1)
    assert not fed(config_with(), [*updates(calm), *updates(less, 31)])[0]
    for name, was, now in (
        ("completions/mean_length", 100, 5.0),
        ("completions/mean_length", 100, 900.0),
        ("grad_norm", 0.5, 40.0),
    ):
        (line,) = fed(config_with(), [*updates(calm), *updates(less, 31, **{name: now})])[0]
        assert f", {name} went from {was} to " in line


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_fall(seed):
    """Rewards that rise and then stay cause no warning, even with skewed noise near the maximum."""
    random = np.random.default_rng(seed)
    level = np.concatenate([np.linspace(1, 3.8, 60), np.full(200, 3.8)])
    rewards = np.minimum(level + random.normal(0, 0.15, 260), 4 - random.exponential(0.05, 260))
    readings = updates(rewards)
    hard = random.random(200)  # most problems are always right or always wrong
    for update in range(0, 260, 25):
        rate = np.clip((min(level[update] / 4, 0.97) - hard) * 4 + 0.5, 0, 1)
        score = (random.random(200) < rate).mean()
        readings.insert(update + update // 25, evaluation(update, score, problems=200))
    assert fed(config_with(), readings)[0] == []


@pytest.mark.parametrize(
    ("settings", "more", "rewards", "measure", "says"),
    [
        ((), {"clip_ratio/region_mean": 0.4}, (3, 3), "em", "1 updates per rollout are the likeliest"),
        ((), {"sampling/effective_sample_size": 0.3}, (3, 3), "em", "set loss.correction"),
        ((), {}, (3, 5), "em", "reward.functions is the likeliest cause, because the reward rose"),
        ((), {}, (3, 5), "reward", "optim.num_epochs is the likeliest cause, because the reward rose"),
        (("optim.learning_rate=1e-4",), {}, (3, 2.9), "em", "try 2e-05"),
        (("sft.learning_rate=1e-2",), {}, None, "em", "sft.learning_rate = 0.01 is the likeliest cause"),
    ],
)
def test_the_likeliest_key_follows_from_what_was_seen(settings, more, rewards, measure, says):
    """It is the learning rate, unless another metric explains the fall."""
    before, after = [updates([each] * 10, **more) for each in rewards] if rewards else ([], [])
    readings = [*before, evaluation(10, **{measure: 0.9}), *after, evaluation(20, **{measure: 0.3})]
    lines, _ = fed(config_with(*settings), readings)
    assert says in lines[-1] and lines[-1].startswith("held-out")


def test_harder_prompts_are_no_decline():
    """If a curriculum chooses the prompts, the reward is not compared."""
    readings = [*updates(noisy(3, 30)), *updates(noisy(1, 30), 31)]
    assert fed(config_with(), readings)[0]
    assert not fed(config_with("data.curriculum=adaptive"), readings)[0]


def test_warnings_can_be_turned_off_and_the_run_still_ends():
    """`watch.patience = 0` turns warnings off, and `stop.patience` still ends the run."""
    config = config_with("watch.patience=0", "stop.patience=2")
    lines, seen = fed(config, [*updates(noisy(3, 30)), *updates(noisy(1, 30), 31)])
    assert lines == [] and str(seen.reached).endswith("(stop.patience)")


@pytest.mark.parametrize("cut", range(0, 44, 4))
def test_a_resumed_run_says_the_same(cut):
    """The state, through a checkpoint's JSON, is all that a resumed run needs."""
    readings = [*updates(noisy(3, 20)), evaluation(20, 0.9), *updates(noisy(1, 20), 21), evaluation(40, 0.1)]
    config = config_with("stop.patience=5")
    first, seen = fed(config, readings[:cut])
    seen = decoded(json.loads(json.dumps(encoded(seen))), Seen, "seen")
    second, seen = fed(config, readings[cut:], seen)
    whole, all_seen = fed(config, readings)
    assert (first + second, attrs.asdict(seen)) == (whole, attrs.asdict(all_seen)) and len(whole) == 2
