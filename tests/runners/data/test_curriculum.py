"""The curriculum: sampling by pass rates, statistics of prompts, and the files of `grpo difficulty`."""

import json
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.config.loading import load_config
from runners.config.sections import DataConfig
from runners.data.curriculum import (
    NEVER,
    Estimates,
    draw_weights,
    drawn_by_weight,
    explores,
    passed,
    prompt_id,
    rate_metrics,
    read_difficulty,
    updated,
    with_difficulty,
)
from runners.data.prompts import Example
from runners.data.stream import Drawn, PromptOrder, Weighted, drawn
from runners.errors import UserError

HOW = {"target": 0.5, "decay": 0.9, "size": 8}
COUNTS = st.lists(st.integers(0, 8), min_size=2, max_size=12)


def examples(number: int) -> list[Example]:
    """Prompts that differ in their text."""
    asked = [({"role": "user", "content": f"{n}?"},) for n in range(number)]
    return [Example(messages, "", (n,), "1", {}, (), n) for n, messages in enumerate(asked)]


def adaptive(**keys):
    """A config whose [data] has these keys."""
    overrides = [f"data.{name}={value}" for name, value in keys.items()]
    return load_config(None, ["model.path=embedded", "data.curriculum=adaptive", *overrides])


def naive_weight(history: list[tuple[int, int, int]], step: int, common: float) -> float:
    """The weight of one prompt, from its (step, passes, completions), by the formula."""
    passes = sum(p * 0.9 ** (step - at) for at, p, _ in history)
    weight = sum(n * 0.9 ** (step - at) for at, _, n in history)
    rate = min(max((passes + common) / (weight + 1), 1e-4), 1 - 1e-4)
    rested = 1.0 if not history else 1 - 0.9 ** (step - history[-1][0])
    return np.exp(-16 * 0.5 * (np.log(0.5 / rate) + np.log(0.5 / (1 - rate)))) * rested


@given(st.lists(st.dictionaries(st.integers(0, 3), st.integers(0, 8)), max_size=5))
def test_weights_equal_the_formula(steps):
    """The weights after groups at steps 0, 1, … equal sums over each prompt's history."""
    known, histories = Estimates.of([(0, 0)] * 4), [[] for _ in range(4)]
    for step, groups in enumerate(steps):
        known = updated(known, [(n, passes, 8) for n, passes in groups.items()], step, 0.9)
        for n, passes in groups.items():
            histories[n].append((step, passes, 8))
    now = len(steps)
    every = [each for history in histories for each in history]
    total = [sum(one[i] * 0.9 ** (now - one[0]) for one in every) for i in (1, 2)]
    common = (total[0] + 0.5) / (total[1] + 1)
    want = [naive_weight(history, now, common) for history in histories]
    np.testing.assert_allclose(draw_weights(known, now, **HOW), want, rtol=1e-4, atol=1e-12)
    firsts = [history[0][1] / 8 if history else NEVER for history in histories]
    assert known.first_n.tolist() == firsts


@given(COUNTS, st.integers(0, 2**40), st.integers(1, 6), st.integers(0, 2**31 - 1))
def test_samples_are_distinct_and_deterministic(passes, seed, number, position):
    """Sampling is deterministic and without replacement; taken prompts come last."""
    weights_n = draw_weights(Estimates.of([(each, 8) for each in passes]), 3, **HOW)
    taken = set(range(0, len(passes), 2))
    first, again = (drawn_by_weight(weights_n, number, taken, seed, position) for _ in range(2))
    assert first == again
    others = len(passes) - len(taken)
    assert not taken & set(first[:others])
    assert len(set(first[: len(passes)])) == min(number, len(passes))


def test_sampling_frequencies_equal_the_weights():
    """Over many keys, first samples are distributed as the weights 1 : 2 : 5."""
    weights_n, found = np.array([1.0, 2.0, 5.0]), np.zeros(3)
    for position in range(2000):
        found[drawn_by_weight(weights_n, 1, (), 0, position)[0]] += 1
    np.testing.assert_allclose(found / 2000, weights_n / 8, atol=4 * np.sqrt(0.25 / 2000))


@given(st.floats(0, 1), st.integers(0, 5000))
def test_exploring_samples_follow_the_usual_order(share, number):
    """Exploring samples use the places 0, 1, 2, … without a gap, as often as the share says."""
    places = [place for n in range(number) if (place := explores(n, share)) is not None]
    assert places == list(range(int(number * share)))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("explore", [0.0, 0.25, 0.6, 1.0])
def test_steps_sample_distinct_prompts_alike_on_ranks_and_after_a_resume(explore, seed):
    """Two streams from one state sample alike; the rounds of a step share the taken prompts."""
    config, prompts = adaptive(explore=explore), examples(9)
    known = Estimates.of([(n % 9, 8) for n in range(9)])
    position = 0
    for step, sizes in enumerate([(4,), (3, 2, 4), (8,)]):
        settings = config.data
        weights_n = draw_weights(known, step, target=settings.target_rate, decay=settings.rate_decay, size=8)
        weighted = Weighted(weights_n=weights_n, explore=explore)
        rounds = []
        for order in (PromptOrder(prompts, seed), PromptOrder(prompts, seed)):
            found, parts = Drawn((), position), []
            for size in sizes:
                found = drawn(order, found.position, size, weighted, found.taken)
                parts.append(found.examples)
            rounds.append(parts)
        position = found.position
        assert rounds[0] == rounds[1]
        numbers = [example.number for part in rounds[0] for example in part]
        assert len(set(numbers)) == len(numbers)
        known = updated(known, [(number, 1, 8) for number in numbers], step, 0.98)
    assert position == 21


def test_measured_rates_sort_each_epoch():
    """With measured rates, each epoch is sorted from easy to hard."""
    rates = np.array([0.5, 0.1, 0.5, 0.9, 0.1, 0.5])
    ordered = PromptOrder(examples(6), 1, rates)
    for epoch in range(2):
        found = drawn(ordered, 6 * epoch, 6).examples
        assert [rates[example.number] for example in found] == sorted(rates, reverse=True)


def test_a_static_curriculum_skips_easy_and_hard_prompts(tmp_path):
    """A static curriculum renumbers the remaining prompts and reports the others; adaptive keeps all."""
    path, prompts = tmp_path / "rates.jsonl", examples(5)
    with path.open("w") as file:
        for one, passes in zip(prompts, (0, 8, 4, 2), strict=False):
            file.write(json.dumps({"prompt": prompt_id(one), "samples": 8, "passes": passes}) + "\n")
    config = DataConfig(curriculum="static", difficulty=str(path))
    known: Any  # Estimates: there is a curriculum
    train, known, notices = with_difficulty(prompts, config)
    assert [example.text for example in train] == [prompts[n].text for n in (2, 3)]
    assert [example.number for example in train] == [0, 1]
    assert known.first_n.tolist() == [0.5, 0.25]
    assert "3 of 5 training prompts are skipped" in notices[0]
    assert known.weight_n.tolist() == [8, 8]
    train, known, notices = with_difficulty(prompts, attrs.evolve(config, curriculum="adaptive"))
    assert (len(train), notices) == (5, [])
    assert known.first_n.tolist() == [0, 1, 0.5, 0.25, NEVER]
    with pytest.raises(UserError, match=r"no prompt has a pass rate from 0.9 to 0.95"):
        with_difficulty(prompts, attrs.evolve(config, pass_rates=(0.9, 0.95)))
    with pytest.raises(UserError, match="the file contains none of the 1 training prompts"):
        with_difficulty(prompts[4:], config)


@pytest.mark.parametrize(
    "line",
    [
        *("{}", '{"prompt": "a", "samples": 1, "passes": 2}', '{"prompt": 1, "samples": 1, "passes": 1}'),
        *("[1]", '{"prompt": "a", "samples": 1, "passes": -1}'),
        f'{{"prompt": "a", "samples": {10**400}, "passes": 1}}',
    ],
)
def test_an_invalid_difficulty_file_is_refused(tmp_path, line):
    """Lines that are not measurements, impossible counts and other types are refused."""
    (tmp_path / "rates.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"rates.jsonl: expected lines \{\"prompt\": HASH"):
        read_difficulty(tmp_path / "rates.jsonl")


def test_a_completion_passes_if_it_is_right_or_its_reward_is_high():
    """The built-in correctness reward decides if it is among the rewards."""
    values_kb, totals_b = np.array([[0.0, 1.0, np.nan], [2.0, 0.0, np.nan]]), np.array([2.0, 1.0, np.nan])
    assert passed(["mine", "correctness_reward_func"], values_kb, totals_b, 9.0).tolist() == [1, 0, 0]
    assert passed(["mine", "yours"], values_kb, totals_b, 1.0).tolist() == [1, 1, 0]


def test_metrics_by_first_rates():
    """New prompts belong to no band; rates count completions, shares count groups."""
    found = rate_metrics([(NEVER, 1, 8), (0.0, 0, 8), (0.2, 2, 4), (0.25, 4, 8), (1.0, 8, 8)])
    assert found["groups/share/hard"] == 0.4
    rates = {name: found[f"groups/pass_rate/{name}"] for name in ("new", "hard", "medium", "easy")}
    assert rates == {"new": 1 / 8, "hard": 2 / 12, "medium": 0.5, "easy": 1.0}
    assert rate_metrics([]) == {}
