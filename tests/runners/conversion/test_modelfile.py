"""Ollama reads the prompt format of training from a Modelfile, for any texts."""

import json
import shutil
import subprocess

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.config.loading import load_config
from runners.conversion.modelfile import modelfile
from runners.data.rendering import render
from runners.errors import UserError
from runners.models.model_reader import load_tokenizer
from runners.tokenization.prompt_settings import PromptSettings
from tests.runners.conversion.modelfiles import ask, execute, read_modelfile
from tests.support.tiny_models import make_model_folder

PROMPT = PromptSettings.of(load_config("quickstart").to_dict())
QUESTION = {"role": "user", "content": "What is {{7}}+5?"}
ANSWER = {"role": "assistant", "content": "12"}
BRACES = """{% for m in messages %}{"{{ m.role }}": {{ '{' }}{{ m.content }}{{ '}' }}},
{% endfor %}{% if add_generation_prompt %}{"assistant": {{ '{{' }}{% endif %}"""
TEXTS = st.text(st.sampled_from('ab {}"\\\n\r\t\u00a0\u200b😀é'), max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_model_folder(tmp_path_factory.mktemp("models") / "m"))


@pytest.fixture(scope="module")
def braces(tmp_path_factory):
    """A tokenizer whose template puts braces and quotes around each message."""
    folder = make_model_folder(tmp_path_factory.mktemp("models") / "m")
    (folder / "chat_template.jinja").write_text(BRACES)
    return load_tokenizer(folder)


def values(text, name):
    return [value for command, value in read_modelfile(text) if command == name]


def conversations(system):
    before = [{"role": "system", "content": system}] if system.strip() else []
    return [QUESTION], [QUESTION, ANSWER, QUESTION], before


@pytest.mark.parametrize("system", ["", "Think {{first}}."])
def test_a_modelfile_has_the_prompt_format_of_training(tokenizer, system):
    """Its template renders the run's prompts, turn by turn, and its parameters are the run's."""
    prompt = attrs.evolve(PROMPT, system_prompt=system, nudge="<think>", stop=("</a>", "\n"), temperature=0.8)
    text = modelfile("m.gguf", tokenizer, prompt)
    one, more, before = conversations(system)
    assert ask(text, one) == render(tokenizer, [*before, *one], "<think>")[0]
    said = ask(text, more)
    assert said.replace("<think>12", "12") == render(tokenizer, [*before, *more], "<think>")[0]
    assert values(text, "FROM") == ["./m.gguf"] and values(text, "SYSTEM") == [system] * bool(system)
    assert values(text, "stop") == ["</a>", "\n"]
    assert values(text, "temperature") == ["0.8"] and values(text, "repeat_penalty") == ["1.0"]
    raw = modelfile("m.gguf", tokenizer, attrs.evolve(prompt, prompt_form="raw"))
    assert values(raw, "TEMPLATE") == ["{{ .Prompt }}<think>"] and not values(raw, "SYSTEM")


@given(system=TEXTS, nudge=TEXTS, stop=TEXTS)
def test_any_text_comes_out_of_a_modelfile_as_it_went_in(braces, system, nudge, stop):
    """System message, nudge and stop string are kept; a stop string that cannot be written is refused."""
    prompt = attrs.evolve(PROMPT, system_prompt=system, nudge=nudge, stop=(stop,))
    try:
        text = modelfile("m.gguf", braces, prompt)
    except UserError as error:
        assert "a stop string cannot be written to a Modelfile" in str(error)
        assert not stop.isprintable() and ('"""' in stop or "\u00a0" in stop or "\u200b" in stop)
        return
    one, more, before = conversations(system)
    assert values(text, "stop") == [stop]
    assert ask(text, one) == render(braces, [*before, *one], nudge)[0]
    if "12" not in nudge:
        assert ask(text, more).replace(f"{nudge}12", "12") == render(braces, [*before, *more], nudge)[0]
    other = {"role": "system", "content": "Other."}
    assert ask(text, [other, *one]) == render(braces, [other, *one], nudge)[0]


@pytest.mark.parametrize("stop", ['a\n"""\nb', "\u00a0", "\u200b"])
def test_a_stop_string_that_ollama_would_change_is_a_line(tokenizer, stop):
    """Stop strings that end the value, or contain characters that Ollama's parser drops, are refused."""
    with pytest.raises(UserError, match=r"a stop string cannot be written to a Modelfile: [^\n]+; found "):
        modelfile("m.gguf", tokenizer, attrs.evolve(PROMPT, stop=(stop,)))


GO = """package main

import ("encoding/json"; "os"; "strings"; "text/template")

type Message struct { Role, Content string }
type Case struct { Template string; Messages []Message; System string }

func main() {
	var cases []Case
	if err := json.NewDecoder(os.Stdin).Decode(&cases); err != nil { panic(err) }
	var shown []string
	for _, c := range cases {
		var out strings.Builder
		values := map[string]any{"Messages": c.Messages, "System": c.System}
		parsed := template.Must(template.New("").Parse(c.Template))
		if err := parsed.Execute(&out, values); err != nil { panic(err) }
		shown = append(shown, out.String())
	}
	json.NewEncoder(os.Stdout).Encode(shown)
}
"""


@pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed")
def test_go_reads_templates_alike(braces, tmp_path):
    """Go's text/template and tests/support/modelfiles.py render the same texts."""
    texts = ["", "{", "{{", "}}", '"', '"""\n', "\u00a0", "\u200b{", '{"a": "b\\"}', "a\tb\r\n", "😀"]
    cases = []
    wanted = []
    for text in texts:
        prompt = attrs.evolve(PROMPT, system_prompt=text, nudge=text, stop=())
        (template,) = values(modelfile("m.gguf", braces, prompt), "TEMPLATE")
        for before in ([], [{"role": "system", "content": text}]):
            messages = [*before, QUESTION, ANSWER, QUESTION]
            cases.append({"Template": template, "Messages": messages, "System": text if before else ""})
            wanted.append(execute(template, messages))
    (tmp_path / "main.go").write_text(GO)
    command = ["go", "run", tmp_path / "main.go"]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == wanted
