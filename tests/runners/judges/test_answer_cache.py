"""Answers kept by content; a file that cannot be used is told once and costs nothing."""

from runners.judges.answer_cache import AnswerCache, question_digest


def test_answers_come_back(tmp_path):
    """Also to another process's cache, which another object stands for; more than one query's worth."""
    file = tmp_path / "deep" / "judges.sqlite"
    answers = {f"d{i}": f"SCORE: {i}" for i in range(1200)}
    assert AnswerCache(file).find(["d1"]) == {}
    AnswerCache(file).keep(answers)
    assert AnswerCache(file).find([*answers, "other"]) == answers
    AnswerCache(file).keep({"d1": "new"})
    assert AnswerCache(file).find(["d1"]) == {"d1": "new"}


def test_the_oldest_go_first(tmp_path):
    """The number is bounded."""
    cache = AnswerCache(tmp_path / "judges.sqlite", most=3)
    for i in range(6):
        cache.keep({f"d{i}": str(i)})
    assert list(cache.find(f"d{i}" for i in range(6))) == ["d3", "d4", "d5"]


def test_the_digest_depends_on_address_and_body():
    """On each part of the request, not on the order of keys."""
    body = {"messages": [{"role": "user", "content": "ü"}], "temperature": 0.0}
    same = question_digest("http://a", dict(reversed(body.items())))
    assert question_digest("http://a", body) == same
    assert (
        len({same, question_digest("http://b", body), question_digest("http://a", {**body, "model": "m"})})
        == 3
    )
