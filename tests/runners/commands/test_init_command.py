"""`grpo init` writes a config that loads and passes `grpo check` for each form of model and data."""

import json

import pytest

from runners.config.loading import load_config
from tests.support.commands import grpo
from tests.support.tiny_models import make_model_folder


@pytest.fixture(autouse=True)
def llama(fresh_folder, tmp_path):
    """A model in the folder of the data."""
    make_model_folder(tmp_path / "llama")


def write_rows(file, *columns, count=40):
    """Writes rows as JSON lines: each column is a name and a function of the row's number."""
    rows = [{name: value(n) for name, value in columns} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def question(n):
    return f"What is {n} plus {n}?"


TALK = ("prompt", lambda n: [{"role": "user", "content": question(n)}])
FORMS = {
    # what the data's other column holds: its name, a value, the form that is found, `data.answer`
    "####": (("answer", lambda n: f"{n} + {n} = {2 * n}\n#### {2 * n}"), "last_number", "answer"),
    "boxed": (("solution", lambda n: f"So it is $\\boxed{{{2 * n}}}$."), "boxed", "solution"),
    "numbers": (("answer", lambda n: 2 * n), "last_number", "answer"),
    "truth": (("answer", lambda n: n % 2 == 0), "exact", "answer"),
    "tests": (("answer", lambda n: [f"assert f({n}) == {2 * n}"]), "code", "answer"),
    "letters": (("Label", lambda n: "ABCD"[n % 4]), "letter", "Label"),
    "labels": (("label", lambda n: ("positive", "negative")[n % 2]), "exact", "label"),
    "short texts": (("answer", lambda n: f"the number {'abcdefgh'[n % 8]}{n}"), "exact", "answer"),
    "long texts": (("response", lambda n: f"Well, {n} and {n} make {2 * n}. " * 9), "none", ""),
    "nothing": (("source", lambda n: True), "none", ""),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_answers_gives_a_config_that_checks(tmp_path, name):
    """The form, the columns and the reward are found; `grpo check` accepts the file without a warning."""
    column, form, answer = FORMS[name]
    write_rows(tmp_path / "rows.jsonl", ("problem", question), column)
    grpo("init", "llama", "rows.jsonl")
    config = load_config("train.toml")
    assert (config.model.path, config.data.source, config.data.question) == ("llama", "rows.jsonl", "problem")
    assert (config.answer.form, config.data.answer) == (form, answer)
    own = ("train_reward.py:reward",) if form == "none" else ("correctness_reward_func",)
    assert config.reward.functions == own
    checked = grpo("check", "train.toml")
    lines = [line for line in checked.stdout.splitlines() if line.startswith("warning: ")]
    assert not [line for line in lines if "reward" in line and form != "none"], lines
    text = (tmp_path / "train.toml").read_text()
    assert len(text.splitlines()) < 45 and "  # " in text
    assert 'eval_split = "train"  # the last tenth' in text


def test_messages_and_splits_are_found(tmp_path):
    """A column of messages becomes the prompt, and a folder's own evaluation split is used."""
    (tmp_path / "talks").mkdir()
    for split in ("train", "validation"):
        write_rows(tmp_path / f"talks/{split}.jsonl", TALK, ("answer", lambda n: str(n)))
    grpo("init", "llama", "talks", "--out", "a.toml")
    data = load_config("a.toml").data
    assert (data.prompt, data.eval_split, data.system_prompt) == ("prompt", "valid", "")
    grpo("check", "a.toml")


def spoken(n, *roles):
    """A conversation with these roles."""
    return [{"role": role, "content": question(n) if role == "user" else f"It is {n}."} for role in roles]


CHATS = {
    # The columns of a row; `data.prompt`, `data.completion`, `data.answer`
    "mlx-lm": (
        (("messages", lambda n: spoken(n, "system", "user", "assistant")),),
        "messages",
        "messages",
        "",
    ),
    "turns": (
        (("messages", lambda n: spoken(n, "user", "assistant", "user", "assistant")), ("id", lambda n: n)),
        *("messages", "messages", ""),
    ),
    "TRL": (
        (("prompt", lambda n: spoken(n, "user")), ("completion", lambda n: spoken(n, "assistant"))),
        *("prompt", "completion", ""),
    ),
    "answers": (
        (("messages", lambda n: spoken(n, "user", "assistant")), ("answer", lambda n: str(2 * n))),
        *("messages", "messages", "answer"),
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_messages_that_the_assistant_ends_are_prompt_and_completion(tmp_path, name):
    """In files for mlx-lm, TRL and OpenAI, the messages before the last turn are the prompt."""
    columns, prompt, completion, answer = CHATS[name]
    write_rows(tmp_path / "rows.jsonl", *columns, count=12)
    grpo("init", "llama", "rows.jsonl")
    data = load_config("train.toml").data
    assert (data.prompt, data.completion, data.answer) == (prompt, completion, answer)
    assert "11 problems to train on" in grpo("check", "train.toml").stdout
    small = ["optim.max_steps=1", "rollout.max_new_tokens=32", "eval.every=0", "eval.samples=2"]
    grpo("sft", "train.toml", *(word for each in small for word in ("--set", each)))


def table(tmp_path):
    """Writes a CSV file whose column names are German."""
    lines = [f'{n},"Was kosten {n} Äpfel zu 2 €, und warum so viel?",{2 * n} €,Heft' for n in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["Nr,Frage,Musterlösung,Quelle", *lines]), encoding="utf-8")


def test_columns_of_other_names_are_listed_and_chosen(tmp_path):
    """`--question` and `--answer` name them; a misspelling is answered with the nearest name."""
    table(tmp_path)
    shown = grpo("init", "llama", "rows.csv").stdout
    assert "columns  Nr, Frage, Musterlösung, Quelle\n" in shown and "--answer sets the column" in shown
    chosen = ("--out", "b.toml", "--question", "Frage", "--answer")
    found = grpo("init", "llama", "rows.csv", *chosen, "Musterloesung", code=2)
    assert "did you mean Musterlösung?" in found.stderr
    shown = grpo("init", "llama", "rows.csv", *chosen, "Musterlösung")
    config = load_config("b.toml")
    assert (config.data.question, config.data.answer) == ("Frage", "Musterlösung")
    assert (config.answer.form, "Frage → Musterlösung: numbers" in shown.stdout) == ("last_number", True)
    grpo("check", "b.toml")
    write_rows(tmp_path / "holes.jsonl", ("question", question), ("key", lambda n: "" if n == 3 else "x"))
    assert (
        "--answer key: expected an answer in each row"
        in grpo("init", "llama", "holes.jsonl", "--out", "c.toml", "--answer", "key", code=2).stderr
    )


def test_answers_that_are_named_later_replace_the_example_reward(tmp_path):
    """This holds while the example is unchanged; a modified reward is kept."""
    table(tmp_path)
    grpo("init", "llama", "rows.csv")
    checked = grpo("check", "train.toml", "--set", "data.answer=Musterlösung")
    assert "correctness_reward_func" in checked.stdout
    assert "train.toml: data.answer replaces the example reward" in checked.stderr
    config = load_config("train.toml", ["data.answer=Musterlösung", "answer.form=last_number"])
    assert config.reward.functions == ("correctness_reward_func",)
    own = tmp_path / "train_reward.py"
    own.write_text(own.read_text().replace("120", "60"))
    config = load_config("train.toml", ["data.answer=Musterlösung"])
    assert (config.reward.functions, config.answer.form) == (("train_reward.py:reward",), "none")
    assert config.notices == ()


@pytest.mark.parametrize(
    ("options", "tune", "rate"),
    [({"quantize": {"group_size": 32, "bits": 4}}, "lora", 1e-5), ({}, "full", 1e-6)],
)
def test_weights_of_few_bits_have_adapters(tmp_path, options, tune, rate):
    """The learning rate is the one for adapters."""
    make_model_folder(tmp_path / "other", **options)
    write_rows(tmp_path / "rows.jsonl", ("question", question), ("answer", lambda n: 2 * n))
    assert "model    " in grpo("init", "other", "rows.jsonl").output
    config = load_config("train.toml")
    assert (config.model.tune, config.optim.learning_rate) == (tune, rate)
    grpo("check", "train.toml")


def test_a_base_model_and_labels(tmp_path):
    """The prompt names the labels; rewards and `grpo check` do not count the nudge as part of the answer."""
    make_model_folder(tmp_path / "base", chat_template=False)
    write_rows(tmp_path / "rows.jsonl", ("problem", question), FORMS["labels"][0])
    grpo("init", "base", "rows.jsonl")
    config = load_config("train.toml")
    nudge = "\nOne of negative, positive.\nAnswer:"
    assert (config.data.prompt_form, config.data.nudge, config.rollout.stop) == ("raw", nudge, ("\n",))
    form = config.answer_form
    assert form and form.is_right(f"{nudge} positive\n", "positive") and not form.is_right(nudge, "positive")
    checked = grpo("check", "train.toml")
    (line,) = (row for row in checked.stdout.splitlines() if row.split()[:1] == ["correctness_reward_func"])
    assert line.split()[1:] == ["2", "0", "0"], checked.stdout


def test_the_shipped_model_and_data():
    """The shipped model answers in tags."""
    grpo("init", "embedded", "embedded", "--out", "toy.toml")
    config = load_config("toy.toml")
    assert (config.answer.form, config.run.name) == ("xml", "embedded")
    checked = grpo("check", "toy.toml", "--sample", "4", "--set", "rollout.temperature=0.01")
    assert "(right)" in checked.stdout and "warning" not in checked.stdout


def test_packed_weights_whose_config_says_no_bits(tmp_path):
    """`grpo init` accepts them; loading the model reports the error, if there is one."""
    file = make_model_folder(tmp_path / "other") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization": {"group_size": 32}}))
    write_rows(tmp_path / "rows.jsonl", ("question", question), ("answer", lambda n: 2 * n))
    assert "model    ? bits per weight" in grpo("init", "other", "rows.jsonl").output


def test_what_a_config_cannot_hold_is_a_line(tmp_path):
    """Half of a surrogate pair as a column name, or bits given as a text: nothing is written."""
    write_rows(tmp_path / "rows.jsonl", ("\ud83d question", question), ("answer", lambda n: 2 * n))
    assert "data.question: expected text that UTF-8" in grpo("init", "llama", "rows.jsonl", code=2).stderr
    file = make_model_folder(tmp_path / "other") / "config.json"
    packed = {"group_size": 32, "bits": "4\ntrust_remote_code = true\n#"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization": packed}))
    write_rows(tmp_path / "rows.jsonl", ("question", question), ("answer", lambda n: 2 * n))
    line = r'quantization.bits: expected an integer from 1 to 8, found "4\ntrust'
    assert line in grpo("init", "other", "rows.jsonl", code=2).stderr
    assert not list(tmp_path.glob("*.toml"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nope/nope/x", "rows.jsonl"], 'MODEL = "nope/nope/x": there is no such folder'),
        (["llama", "https://hf.co/datasets/a/b"], 'a Hub address; expected the name, "a/b"'),
        (["llama", "none.jsonl"], "none.jsonl cannot be read: No such file"),
        (["llama", "empty.jsonl"], "expected rows with a question, found no"),
        (["llama", "numbers.jsonl"], "expected a column of questions, found a, b"),
        (["llama", "rows.jsonl", "--out", "taken.toml"], "--out taken.toml: expected the name of a new file"),
        (
            ["llama", "rows.jsonl", "--answer", "answr"],
            "expected one of question, answer; did you mean answer?",
        ),
        (["llama", "rows.jsonl", "--question", "q"], "--question q: expected one of question, answer"),
        (["llama", "rows.jsonl", "--question", "answer"], "expected a column of questions, found answer"),
    ],
)
def test_faults_are_lines_and_nothing_is_replaced(tmp_path, arguments, line):
    """The code is 2, and no file is new or changed."""
    write_rows(tmp_path / "rows.jsonl", ("question", question), ("answer", lambda n: n))
    write_rows(tmp_path / "numbers.jsonl", ("a", lambda n: n), ("b", lambda n: n))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "taken.toml").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert line in grpo("init", *arguments, code=2).stderr
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "taken.toml").read_text() == "mine"
