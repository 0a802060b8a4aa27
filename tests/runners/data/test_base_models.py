"""Prompts for base models: raw texts, a custom template, and messages about templates that do not fit."""

import json

import attrs
import pytest

from runners.config.loading import load_config
from runners.config.sections import DataConfig
from runners.data.datasets import load_rows
from runners.data.prompts import build_examples
from runners.data.rendering import render
from runners.data.row_files import Row, Rows
from runners.errors import ConfigError, UserError
from runners.models.model_reader import load_tokenizer
from runners.tokenization.prompt_settings import read_prompt
from runners.training.train import run_training
from tests.support.commands import grpo
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, LETTERS, Notes, small

ASKED = ({"role": "user", "content": "Q: 1+1?\nA:"},)
OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</turn>{% endfor %}"
OWN += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model folder."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def tokenizer(base):
    """The model's tokenizer; a test may replace its template."""
    return load_tokenizer(base)


def trained(folder, notes=None, **data):
    """The folder of a run of two steps on these keys of [data], with rewards for letters."""
    (folder / "letters.py").write_text(LETTERS)
    (folder / "small.toml").write_text(small(reward=BY_LETTERS, data=data, model={"path": "base"}))
    config = load_config("small.toml").check()
    run_training(config, report=notes or Notes())
    return folder / "outputs" / "small"


def test_a_raw_prompt_is_unchanged_text(tokenizer):
    """A raw prompt has the configured nudge, no roles, and BOS if the tokenizer adds it."""
    assert render(tokenizer, ASKED, " ", raw=True)[0] == "Q: 1+1?\nA: "
    config = DataConfig(prompt_form="raw", system_prompt="", nudge="")
    rows = Rows([Row({"question": "Q:", "answer": "2"}, "row 1")])
    (example,), _ = build_examples(rows, config, tokenizer)
    assert example.text == "Q:" and example.messages == ({"role": "user", "content": "Q:"},)


def test_a_raw_config_adds_no_prompts(tmp_path, monkeypatch):
    """A raw config sets no chat prompts; options that require a chat are refused by their keys."""
    monkeypatch.chdir(tmp_path)
    common = ["model.path=embedded", "data.source=embedded", 'data.prompt_form="raw"']
    data = load_config(None, common).data
    assert (data.system_prompt, data.nudge) == ("", "")
    assert load_config(None, [*common, 'data.nudge="A:"']).data.nudge == "A:"
    for key in ('data.system_prompt="Be brief."', 'env.factory="a:A"', 'data.image="image"'):
        with pytest.raises(ConfigError, match=key.partition("=")[0].replace(".", r"\.")):
            load_config(None, [*common, key])
    rows = [{"question": [{"role": "user", "content": "Q:"}], "answer": 1}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = attrs.evolve(data, source="rows.jsonl", prompt="question", on_bad_row="raise")
    with pytest.raises(UserError, match=r'line 1: question: expected a text with data.prompt_form = "raw"'):
        load_rows(config)


def test_generate_uses_the_raw_format_of_a_run(base, tmp_path, monkeypatch):
    """`grpo generate` reads the raw format from the run's folder; --raw does the same for any model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(base)
    final = trained(tmp_path, prompt_form="raw") / "final"
    assert getattr(read_prompt(final), "prompt_form", None) == "raw"
    many = ["--num", "2", "--max-tokens", "2"]
    done = grpo("generate", final, "Q: 1+1?", *many)
    assert 'prompt_form = "raw"' in done.stderr
    again = grpo("generate", final, "Q: 1+1?", *many, "--raw", "--no-prompt-file")
    rows = [[json.loads(line)["completion"] for line in each.stdout.splitlines()] for each in (done, again)]
    assert rows[0] == rows[1] and len(rows[0]) == 2
    refused = grpo("generate", final, "Q:", "--raw", "--system", "x", code=2)
    assert "--raw continues a text" in refused.stderr


def test_a_custom_template_is_saved_with_the_model(base, tmp_path, monkeypatch):
    """The template is used for prompts and saved in final/; the base model keeps its template."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(base)
    (tmp_path / "own.jinja").write_text(OWN)
    notes = Notes()
    run = trained(tmp_path, notes, chat_template="own.jinja", nudge="")
    assert any('ends a turn with "</turn>"' in line and "rollout.stop" in line for line in notes.lines)
    assert "<assistant>" not in (base / "tokenizer_config.json").read_text()
    assert (run / "final" / "chat_template.jinja").read_text() == OWN
    text, _ = render(load_tokenizer(run / "final"), ASKED)
    assert text == "<user>Q: 1+1?\nA:</turn><assistant>"
    with pytest.raises(ConfigError, match=r"data\.chat_template: no such file"):
        load_config("small.toml", ["data.chat_template=none.jinja"]).check()
