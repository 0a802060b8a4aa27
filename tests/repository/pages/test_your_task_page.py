"""Each config of docs/your-task.md runs as it stands, with the row that the page shows."""

import json
import re
from pathlib import Path

import pytest

from runners.answers.forms import answer_form
from runners.answers.values import answers_agree, parse_number, parse_quantity
from runners.config.loading import load_config
from runners.training.train import run_training
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import Notes

PAGE = (Path(__file__).parents[3] / "docs" / "your-task.md").read_text(encoding="utf-8")
SECTIONS = {
    text.partition("\n")[0]: text
    for text in PAGE.split("\n## ")[1:]
    if "```json" in text and "\n### " not in text
}
FEW = (
    "optim.max_steps=1", "rollout.num_generations=2", "rollout.max_new_tokens=6", "eval.samples=2",
    "checkpoint.every=0", "data.max_prompt_length=2000", "log.report=false", "system.check_model=false",
)  # fmt: skip


def block(section, language):
    """A code block of a section."""
    found = re.search(rf"```{language}\n(.*?)```", SECTIONS[section], re.DOTALL)
    return found[1] if found else ""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model."""
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("section", SECTIONS)
def test_a_task_runs_as_it_stands(section, tmp_path, monkeypatch, model):
    """At most ten lines; the log has exact match if the rows have answers, and rewards in any case."""
    monkeypatch.chdir(tmp_path)
    text, row = block(section, "toml"), json.loads(block(section, "json"))
    assert len(text.strip().splitlines()) <= 10
    Path("train.toml").write_text(text)
    Path("rewards.py").write_text(block(section, "python"))
    source = re.search(r'source = "(.*?)"', text)
    Path(source[1]).write_text(f"{json.dumps(row)}\n" * 20)
    config = load_config("train.toml", [f"model.path={model}", *FEW])
    shown = Notes()
    result = run_training(config.check(), report=shown)
    lines = [json.loads(line) for line in (result.folder / "training_log.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "time/eval" in line]
    answered = "answer" in row or config.data.answer in row
    assert len(evaluations) == 2 and all("eval/reward" in line for line in evaluations)
    assert all(("em" in line) is answered for line in evaluations)
    assert bool(config.data.system_prompt) is answered  # nothing is put before whole prompts
    assert not answered or len(config.reward.functions) == (5 if config.answer.form == "xml" else 1)


def spans(text):
    """The code in a text of Markdown."""
    return re.findall(r"`([^`]+)`", text)


def test_answers_are_compared_as_the_page_says():
    """Each spelling of the table has its value, the last row's have a unit; what is a text is no number."""
    section = PAGE.partition("## How answers are compared\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (`.*) \|$", section, re.MULTILINE)]
    *valued, (united, _) = rows
    for spellings, meanings in valued:
        values = [re.split(r"[:.;] ", each)[0] for each in meanings.split("; ")]
        read = [parse_number(each) for each in spans(spellings)]
        assert read == [parse_number(each) for each in values] * (len(read) // len(values))
    assert len(valued) > 5 and all(parse_quantity(each).unit for each in spans(united))
    percent, *same = spans(section.partition("and a share: ")[2].partition("\n")[0])
    assert len(same) == 3 and all(answers_agree(percent, each) for each in same)
    texts = spans(section.partition("Everything else is text, including ")[2].partition(" (only")[0])
    assert len(texts) > 8 and [each for each in texts if parse_quantity(each)] == []


def test_letters_and_last_numbers_are_read_as_the_page_says():
    """Each text that the page calls an answer has it, each that it calls none has none."""
    for spec, answer in (("letter", "B"), ("last_number", "5 m")):
        section = PAGE.partition(f'\n[answer]\nform = "{spec}"')[0].rpartition("\n## ")[2]
        said = section.partition("```json")[0]
        refusals = said.partition("There is no answer")[2] or said.partition("no\n   answer.")[2]
        right, wrong = spans(said.removesuffix(refusals)), spans(refusals.partition("Digits in")[0])
        assert [answer_form(spec).read(each) for each in wrong] == [None] * len(wrong) != []
        assert {answer_form(spec).read(each) for each in right} - {None} == {answer}


def test_the_forms_of_the_page_are_all_there_are():
    """Each form of the registry has its config or is named."""
    from runners.answers.forms import SPELLINGS

    named = set(re.findall(r'form = "(\w+)', PAGE)) | {"xml"}
    assert named >= {spelling.partition(":")[0] for spelling in SPELLINGS}
