"""A judge behind a real socket: what is asked, how often, how many at a time, and what faults become."""

import math
import os
import subprocess
import sys
import threading

import pytest

from runners.config.sections import JudgeConfig
from runners.errors import RewardError, UserError
from runners.judges import endpoint
from runners.rewards.scoring import Scorer, check_columns, resolve_rewards
from tests.support.processes.waiting import HANGS, limit_for
from tests.support.services.judge_servers import answering, completion, free_port

PROMPTS = [[{"role": "user", "content": "What is 2 + 2?"}]]
SECRET = "sk-planted-7Hq2"


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """An own cache for each test, and no key left of another one."""
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(endpoint, "_taken_keys", {})


def judge(url, on_error="skip", **settings):
    """A scorer with that one judge."""
    settings = {"retries": 0, "timeout": HANGS, **settings}
    judges = {"j": JudgeConfig(url=url, **settings)}
    return Scorer(resolve_rewards(["judge.j"], judges=judges), 0.5, on_error)


def score(scorer, texts, group_size=1, **columns):
    """The scores of completions of one prompt."""
    columns = {name: values * len(texts) for name, values in columns.items()}
    return scorer.score(texts, PROMPTS * len(texts), columns, group_size=group_size)


def metrics_of(scores):
    """The judge's numbers."""
    return {name.removeprefix("judge/j/"): values for name, values in scores.metrics.items()}


def test_scores_numbers_and_cost():
    """A request for each different completion, with the settings in its body; the answers as rewards."""
    with answering(lambda body, _: f"SCORE: {body['messages'][0]['content'].count('good')}") as (url, asked):
        scorer = judge(
            url,
            model="m",
            max_tokens=9,
            extra='{"seed": 1, "temperature": null}',
            price_in=2.0,
            price_out=5.0,
        )
        scores = score(scorer, ["good", "good good", "bad", "good"])
    assert scores.problems == []
    assert scores.values_kb.tolist() == [[0.1, 0.2, 0.0, 0.1]]
    body = asked[0][1]
    assert (body["model"], body["max_tokens"], body["seed"]) == ("m", 9, 1) and "temperature" not in body
    found = metrics_of(scores)
    assert (found["requests"], found["cached"], found["failed"]) == ([3.0], [1.0], [0.0])
    assert (found["tokens_in"], found["tokens_out"]) == ([30.0], [6.0])
    assert found["cost"] == found["total_cost"] == [pytest.approx(90e-6)]
    assert 0 < found["latency"][0] <= found["slowest"][0] < 5


def test_answers_are_kept_between_runs_by_content():
    """Another scorer asks nothing; another temperature or scale's text does; no cache, no memory."""
    with answering(lambda *_: "SCORE: 5") as (url, asked):
        assert score(judge(url), ["a", "b"]).values_kb.tolist() == [[0.5, 0.5]]
        assert len(asked) == 2
        assert score(judge(url), ["a"]).values_kb.tolist() == [[0.5]] and len(asked) == 2
        again = score(judge(url), ["b", "a", "c"])
        assert len(asked) == 3 and again.values_kb.tolist() == [[0.5] * 3]
        assert metrics_of(again)["cached"] == [2.0]
        score(judge(url, temperature=1.0), ["a"])
        score(judge(url, cache=False), ["a"])
        assert len(asked) == 5


def test_requests_run_side_by_side_up_to_the_limit():
    """Twelve answers, each of which waits until it is one of four."""
    four = threading.Barrier(4, timeout=HANGS)

    def slow(*_):
        four.wait()
        return "SCORE: 5"

    with answering(slow) as (url, asked):
        scores = score(judge(url, concurrency=4, timeout=HANGS), [str(i) for i in range(12)])
    assert scores.problems == [] and asked.together == 4


def test_a_temporary_fault_is_retried():
    """429 and 500, with what the server asks to wait; the answer then counts."""

    def moody(_, number):
        return [
            (429, {"error": {"message": "slow"}}, {"Retry-After": "0.01"}),
            (500, "oops", {"Retry-After": "nan"}),
            "SCORE: 8",
        ][number - 1]

    with answering(moody) as (url, asked):
        scores = score(judge(url, retries=2), ["a"])
    assert scores.values_kb.tolist() == [[0.8]] and len(asked) == 3
    assert metrics_of(scores)["requests"] == [3.0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, "down"), 'HTTP 500 from {url}: "down"'),
        ((400, {"error": {"message": "no such model"}}), 'HTTP 400 from {url}: "no such model"'),
        ((302, "", {"Location": "http://127.0.0.1:9/"}), "HTTP 302"),
        ((200, {"choices": [{}]}, {"Content-Length": "9"}), "not of the API's form"),
        ((200, {"choices": []}), "not of the API's form"),
        ((200, {"choices": [{"message": {"content": 3}}]}), "empty answer"),
        (
            (200, {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}),
            "empty answer: max_tokens is too few",
        ),
        ("x" * (1 << 21), "more than 1,048,576 bytes"),
        ("I would rather not.", "an answer without a score"),
    ],
    ids=range(9),
)
def test_a_faulty_answer_gives_no_reward_and_one_line(answer, said):
    """Whatever comes: NaN, counted, told in one line for all completions; with "raise" it ends the run."""
    found = answer if isinstance(answer, tuple) or len(answer) < 100 else (200, completion(answer))

    def reply(*_):
        return found

    with answering(reply) as (url, _):
        scores = score(judge(url), ["a", "b"])
        assert scores.values_kb.tolist() != scores.values_kb.tolist()  # NaN
        assert metrics_of(scores)["failed"] == [2.0] and list(scores.failed) == [0]
        (line,) = scores.problems
        assert said.format(url=url) in line and "at completion 0" in line and "and 1 more" in line
        with pytest.raises(RewardError, match=r'reward "judge\.j" got'):
            score(judge(url, "raise"), ["a", "b"])


@pytest.mark.parametrize(
    "odd",
    [
        "hm",
        "SCORE: 5 \ud800",
        *(
            completion("SCORE: 5", usage={"prompt_tokens": count, "completion_tokens": 1})
            for count in (math.inf, math.nan, "many", [1])
        ),
        "SCORE: " + "9" * 90_000 + ".9.9",
    ],
    ids=range(7),
)
def test_an_odd_answer_has_no_reward_and_the_others_do(odd):
    """NaN there alone; it is not cached, but asked again the next time."""

    def answer(body, _):
        return odd if "odd one" in body["messages"][0]["content"] else "SCORE: 5"

    with answering(answer) as (url, asked):
        for _ in range(2):
            scores = score(judge(url), ["even", "the odd one", "level"])
            assert [value == value for value in scores.values_kb[0]] == [True, False, True]
            assert scores.failed == {}
    assert len(asked) == 4


def test_a_slow_answer_is_given_up():
    """After the request's time limit; what is open when the batch's is over; the others count."""

    over = threading.Event()

    def answer(body, _):
        if "slow" in body["messages"][0]["content"]:
            over.wait(HANGS)
        return "SCORE: 5"

    with answering(answer) as (url, _):
        limit = round(limit_for(lambda: score(judge(url), ["a"]), least=2))
        scores = score(judge(url, timeout=limit), ["slow", "b"])
        assert f"got no answer in {limit} s, at completion 0" in scores.problems[0]
        assert scores.values_kb[0, 1] == 0.5
        scores = score(judge(url, timeout=HANGS, batch_timeout=limit), ["slow 2", "c"])
        assert f"within the {limit} s of a batch step, at completion 0" in scores.problems[0]
        assert scores.values_kb[0, 1] == 0.5
        over.set()


def test_requests_stop_after_hopeless_or_repeated_failures():
    """A refused key: once. A failing server: as many in a row as run side by side. All share the reason."""
    texts = [str(i) for i in range(40)]
    with answering(lambda *_: (401, {"error": "bad key"})) as (url, asked):
        scores = score(judge(url, concurrency=1), texts)
        assert len(asked) == 1 and len(scores.problems) == 1 and "39 more" in scores.problems[0]
    with answering(lambda *_: (503, "busy")) as (url, asked):
        score(judge(url, concurrency=4), texts)
        assert 4 <= len(asked) < 12
    scores = score(judge(f"http://127.0.0.1:{free_port()}/v1", concurrency=2), texts)
    assert "ConnectError" in scores.problems[0] and len(scores.problems) == 1


def test_a_ranking_judge_sees_a_whole_group():
    """One question a group, equal texts once; rewards follow the ranks wherever a text stood."""

    def longest_first(body, _):
        text = body["messages"][0]["content"]
        parts = [part.split("\n")[1] for part in text.split("<response ")[1:]]
        order = sorted(range(len(parts)), key=lambda i: -len(parts[i]))
        return "RANKING: " + ", ".join(str(i + 1) for i in order)

    with answering(longest_first) as (url, asked):
        scorer = judge(url, kind="ranking")
        scores = score(scorer, ["aa", "a", "aaa", "aa", "b", "bb", "b", "bb"], group_size=4)
        assert scores.problems == [] and len(asked) == 2
        assert scores.values_kb.tolist() == [[0.5, 0.0, 1.0, 0.5, 0.0, 1.0, 0.0, 1.0]]
        same = score(scorer, ["c"] * 4, group_size=4)
        assert len(asked) == 2 and same.values_kb.tolist() == [[0.5] * 4]
    with answering(lambda *_: "RANKING: 1, 1") as (url, _):
        scores = score(judge(url, kind="ranking"), ["x", "y", "u", "v"], group_size=2)
    assert metrics_of(scores)["failed"] == [4.0] and list(scores.failed) == [0]


def test_columns_in_a_judges_prompt_are_required():
    """They arrive; a missing one ends the command before the model is loaded, with the nearest name."""
    with answering(lambda body, _: str(len(body["messages"][0]["content"]))) as (url, _):
        scorer = judge(url, prompt="{completion}{answer}{unit}")
        assert score(scorer, ["a"], answer=["22"], unit=["333"]).values_kb.tolist() == [[0.6]]
        with pytest.raises(UserError, match=r'"judge\.j" needs the column unit.*did you mean units'):
            check_columns(scorer.rewards, ["answer", "units"])


def test_a_key_goes_to_the_server_and_nowhere_else(tmp_path, monkeypatch):
    """Into the header; out of the environment and of child processes; in no line, file or representation,
    also where the server repeats it."""
    monkeypatch.setenv("MY_JUDGE", SECRET)
    with answering(lambda *_: (401, {"error": {"message": f"wrong key {SECRET}"}})) as (url, asked):
        scorer = judge(url, api_key_env="MY_JUDGE")
        assert "MY_JUDGE" not in os.environ
        child = [sys.executable, "-c", "import os; print('MY_JUDGE' in os.environ)"]
        assert subprocess.run(child, capture_output=True, text=True).stdout == "False\n"
        scores = score(scorer, ["a"])
        again = judge(url, api_key_env="MY_JUDGE")  # a second run of the same process
        score(again, ["b"])
    assert [headers["Authorization"] for headers, _ in asked] == [f"Bearer {SECRET}"] * 2
    assert "wrong key $MY_JUDGE" in scores.problems[0]
    assert SECRET not in repr((scores, scorer, scorer.rewards[0].function))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(SECRET.encode() not in path.read_bytes() for path in files)


def test_an_unreachable_judge_is_refused_before_a_run(monkeypatch):
    """No server, a refused key, no key in the environment."""

    def check(url, **settings):
        judge(url, **settings).rewards[0].function.check()

    with pytest.raises(
        UserError, match=r"judge\.j\.url: http://127.0.0.1:\d+/v1 does not answer: ConnectError"
    ):
        check(f"http://127.0.0.1:{free_port()}/v1")
    with answering(lambda *_: "5", models=401) as (url, _):
        with pytest.raises(UserError, match=r"HTTP 401: it expects a key \(api_key_env\)"):
            check(url)
        monkeypatch.setenv("MY_JUDGE", SECRET)
        with pytest.raises(UserError, match=r"the key in \$MY_JUDGE is refused"):
            check(url, api_key_env="MY_JUDGE")
        with pytest.raises(UserError, match=r"environment variable OTHER_JUDGE is not set"):
            check(url, api_key_env="OTHER_JUDGE")
    with answering(lambda *_: "5", models=404) as (url, _):
        check(url)


def test_a_broken_cache_is_reported_once_and_rewards_continue(tmp_path):
    """The rewards come all the same."""
    (tmp_path / "cache").write_text("a file in the folder's place")
    with answering(lambda *_: "SCORE: 5") as (url, _):
        scorer = judge(url, on_error="raise")
        scores = [score(scorer, [text]) for text in "ab"]
    assert [each.values_kb.tolist() for each in scores] == [[[0.5]], [[0.5]]]
    assert [len(each.problems) for each in scores] == [1, 0]
    assert "judges' answers are not saved" in scores[0].problems[0]
