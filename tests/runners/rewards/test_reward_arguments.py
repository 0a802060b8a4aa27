"""The arguments of a reward in a run, as in the table of docs/rewards.md."""

import json
from typing import Any

import pytest

from runners.config.names import REWARD_ARGUMENTS
from runners.data.prompts import reward_columns
from runners.files.json_files import read_lines
from tests.support.tiny_runs import ran, small

ARGUMENTS = (*REWARD_ARGUMENTS, "self", "answer")
REWARD = """
import json
from pathlib import Path


def seen(completions, prompts, completion_ids, answer, column_answer, unit, rare, trainer_state, **others):
    others["log_extra"]("first", [each[0]["content"][:3] for each in completions])
    others["log_metric"]("mine/size", len(completions))
    given = {name: value for name, value in others.items() if not name.startswith("log_")}
    given |= {"completions": completions, "prompts": prompts, "ids": completion_ids, "answer": answer}
    given["names"] = sorted(others)
    given |= {"column_answer": column_answer, "unit": unit, "rare": rare, "step": trainer_state.global_step}
    with (Path(__file__).parent / "seen.jsonl").open("a") as file:
        file.write(json.dumps(given, default=str) + "\\n")
    completions.clear()
    return [1.0] * len(prompts)


def after(completions, **_):
    return [float(len(each)) for each in completions]
"""


@pytest.mark.parametrize("timeout", [20, 0])
def test_a_reward_receives_the_documented_arguments(tmp_path, timeout):
    """Every argument, and columns of these names as `column_…`; a column of some rows, or of one split, is
    None in the others; what a reward does to its lists reaches no other reward."""
    (tmp_path / "data").mkdir()
    (tmp_path / "rewards.py").write_text(REWARD)
    for split, more in (("train", {"unit": "km"}), ("valid", {})):
        rows: list[dict[str, Any]] = [
            {"question": f"q{n}", "solution": f"long #### {n}", "column_self": "both", **more}
            | {name: f"own {name} {n}" for name in ARGUMENTS}
            for n in range(4)
        ]
        rows[3]["rare"] = 3
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "data" / f"{split}.jsonl").write_text(text)
    text = small(
        data={"source": "data", "answer": "solution", "nudge": "<r>"},
        reward={"functions": ["rewards.py:seen", "rewards.py:after"], "timeout": timeout},
        optim={"max_steps": 1},
        eval={"samples": 4, "at_start": True},
    )
    run = ran(tmp_path, text=text)
    calls = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    training = next(call for call in calls if call["unit"] == ["km"] * 8)
    assert any(call["unit"] == [None] * len(call["prompts"]) for call in calls)  # the evaluation
    for call in calls:
        numbers = [prompt[-1]["content"].removeprefix("q") for prompt in call["prompts"]]
        assert call["answer"] == numbers
        for name in ARGUMENTS:
            column = "column_column_self" if name == "self" else f"column_{name}"
            assert call[column] == [f"own {name} {n}" for n in numbers]
        assert call["column_self"] == ["both"] * len(numbers)
        assert call["rare"] == [3 if n == "3" else None for n in numbers]
        assert call["solution"] == [f"long #### {n}" for n in numbers]
        assert all(each[0]["content"].startswith("<r>") for each in call["completions"])
        assert all(len(ids) <= 8 for ids in call["ids"])
        named = {"completions", "prompts", "completion_ids", "answer", "trainer_state"}
        columns = {f"column_{name}" for name in ARGUMENTS if name not in ("self", "answer")}
        others = {
            *REWARD_ARGUMENTS,
            *columns,
            "column_column_self",
            "column_self",
            "question",
            "solution",
        } - named
        assert {*call["names"]} == others - {"environments", "printed"}
    assert training["step"] == 0
    assert len({*training["answer"][:4]}) == 1  # the completions of a prompt follow one another
    assert run.updates[0]["mine/size"] == 8 and run.updates[0]["rewards/after/mean"] == 1.0
    extras = [line["extra"] for line in read_lines(run.result.folder / "completions.jsonl")]
    assert {entry["first"] for entry in extras} == {"<r>"}


def test_columns_named_like_arguments():
    """The reference answers are the column `answer`, and no other column is lost."""
    row = {"answer": "1", "prompts": "a", "column_prompts": "b", "x": 2}
    renamed = {"column_column_prompts": "prompts", "column_prompts": "column_prompts", "x": "x"}
    assert reward_columns([row]) == {"answer": "answer", **renamed}
    assert reward_columns([row], "x") == {"column_answer": "answer", "answer": "x", **renamed}
    assert reward_columns([row], "") == {"answer": "answer", **renamed}
