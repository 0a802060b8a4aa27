"""What judges write, read: scores on a scale, rankings, and what is neither."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.errors import Failure
from runners.judges.verdicts import presentation_order, read_ranking, read_score

SCALE = (0.0, 10.0)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("SCORE: 7", 0.7),
        ("It is good.\n**Score:** 7.5/10", 0.75),
        ('{"score": 3}', 0.3),
        ("score = 10", 1.0),
        ("4", 0.4),
        (" **4** ", 0.4),
        ("The text says 'SCORE: 10'. That is a trick.\nSCORE: 2", 0.2),
        ("SCORE: 9\n<think>\nno\n</think>\nSCORE: 1.", 0.1),
        ("<think>SCORE: 9</think>0", 0.0),
    ],
)
def test_a_score_is_a_share_of_the_scale(answer, score):
    """The last one counts; thoughts do not."""
    assert read_score(answer, SCALE) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "reason", "found"),
    [
        ("", "without a score", "nothing"),
        ("I cannot judge that.", "without a score", "cannot judge"),
        ("SCORE: high", "without a score", "high"),
        ("SCORE: 11", "beyond the scale from 0 to 10", "11"),
        ("SCORE: -1", "beyond the scale", "-1"),
        ("SCORE: 1.2.3", "without a score", "1.2.3"),
    ],
)
def test_no_score_is_a_failure(answer, reason, found):
    """With a reason that is the same for all of its kind, and what was found."""
    failure = read_score(answer, SCALE)
    assert isinstance(failure, Failure)
    assert reason in failure.reason and found in failure.found


def test_a_custom_pattern_finds_the_score():
    """Its last match; what it finds may be no number."""
    assert read_score("<mark>3</mark> <mark>5</mark>", SCALE, "<mark>(.*?)</mark>") == 0.5
    failure = read_score("<mark>five</mark>", SCALE, "<mark>(.*?)</mark>")
    assert failure == Failure("got a score that is no number", '"five"')
    assert isinstance(read_score("<mark>nan</mark>", SCALE, "<mark>(.*?)</mark>"), Failure)


def test_a_pattern_that_backtracks_costs_one_verdict():
    """It is ended; the next answer is read."""
    failure = read_score("a" * 40, SCALE, "((?:a+)+)b")
    assert isinstance(failure, Failure) and "takes too long" in failure.reason
    assert read_score("5b", SCALE, "((?:\\d+)+)b") == 0.5


@pytest.mark.parametrize(
    ("answer", "rewards"),
    [
        ("RANKING: 2, 1, 3", [0.5, 1.0, 0.0]),
        ("ranking: 1 > 3 > 2\n", [1.0, 0.0, 0.5]),
        ("I ranked [1, 2, 3] at first.\n**Ranking**: [3, 2, 1]", [0.0, 0.5, 1.0]),
        ("[2,3,1]", [0.0, 1.0, 0.5]),
        ("<think>RANKING: 1, 2, 3</think>RANKING: 3, 1, 2", [0.5, 0.0, 1.0]),
    ],
)
def test_a_ranking_is_even_steps(answer, rewards):
    """From 1 for the best to 0 for the last."""
    assert read_ranking(answer, 3) == rewards


@pytest.mark.parametrize(
    "answer", ["", "1, 2, 3", "RANKING: 1, 2", "RANKING: 1, 2, 2", "RANKING: 1, 2, 4", "[]"]
)
def test_no_ranking_is_a_failure(answer):
    """Not every number once, or none at all."""
    assert isinstance(read_ranking(answer, 3), Failure)


@given(st.text(max_size=300))
def test_any_answer_is_a_verdict_or_a_failure(answer):
    """Nothing raises."""
    score = read_score(answer, SCALE)
    assert isinstance(score, Failure) or 0 <= score <= 1
    assert isinstance(read_ranking(answer, 2), Failure | list)


@given(st.lists(st.text(max_size=5), min_size=1, max_size=6))
def test_the_order_of_presentation_depends_on_content_alone(texts):
    """Each text once, in the same order wherever they stood."""
    shown = presentation_order(texts, "salt")
    assert sorted(shown) == sorted(set(texts))
    assert presentation_order(texts[::-1], "salt") == shown
