"""A run writes its prompt format to grpo_prompt.json, and the commands use it for the trained model."""

import json
import shutil

import pytest
from click.testing import CliRunner

from runners import cli
from runners.checkpoints.manifest import model_of_run
from runners.config.loading import load_config
from runners.engines.local import LocalEngine
from runners.errors import UserError
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.tokenization.prompt_settings import PROMPT_FILE, PromptSettings, read_prompt, write_prompt
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, ran, small, train

CPU = Platform(backend="cpu")
SETTINGS = PromptSettings(
    system_prompt='Be "brief". 🙂\nÄ',
    nudge="<r>\x7f",
    stop=("</a>", "\n\n"),
    max_new_tokens=7,
    temperature=0.5,
    top_p=0.9,
    top_k=4,
    min_p=0.1,
    chat_template_kwargs={"enable_thinking": False, "a b": "ä", "depth": 2},
)
# The options that correspond to the prompt format of `train`.
TRAINED = ("--system", "Think first.", "--nudge", "<reasoning>", "--max-tokens", "8")
USED = (
    'as in training (grpo_prompt.json): system_prompt = "Think first.", nudge = "<reasoning>", '
    "max_new_tokens = 8"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of each kind, with checkpoints, and `bare`: a final model without the file."""
    folder = tmp_path_factory.mktemp("runs")
    found = {tune: train(folder, tune, tune) for tune in ("full", "lora")}
    bare = shutil.copytree(found["full"] / "final", folder / "bare")
    (bare / PROMPT_FILE).unlink()
    return {**found, "bare": bare}


@pytest.fixture
def grpo(tmp_path, monkeypatch):
    """Runs `grpo …` in this process, in a fresh folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **options):
        return CliRunner().invoke(cli.main, list(map(str, arguments)), **options)

    return run


def test_settings_are_read_as_written(tmp_path):
    """Every field is kept in a file and in a config's sections."""
    assert read_prompt(tmp_path) is None
    write_prompt(tmp_path, SETTINGS)
    assert read_prompt(tmp_path) == SETTINGS
    config = load_config(None, recorded=SETTINGS.sections() | {"model": {"path": "embedded"}})
    assert PromptSettings.of(config.to_dict()) == SETTINGS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, 'expected {format = "grpo_fn.prompt", version = 3}, found {format = "other"'),
        ({"version": 4}, 'found {format = "grpo_fn.prompt", version = 4}'),
        ({"chat_template_kwargs": {"a": [1]}}, "expected a table of strings, numbers, true or false, found"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "arguments that the template itself reads, found {tokenize =",
        ),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "kwargs: expected text that UTF-8 can represent"),
        ({"nudg": "x"}, 'unknown key "nudg"; did you mean nudge?'),
        ({"nudge": None}, "nudge: expected a string, found None"),
        ({"stop": [""]}, "expected a list of strings: no empty string, found"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer >= 1, found 0"),
        ({"temperature": float("nan")}, "temperature: expected a finite number, found nan"),
        ({"top_p": 2}, "top_p: expected a number: 0 < x <= 1, found 2"),
        ({"system_prompt": "\ud800"}, "system_prompt: expected text that UTF-8 can represent"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, change, message):
    """The error names the file, the key, what was expected and what was found, in one line."""
    write_prompt(tmp_path, SETTINGS)
    file = tmp_path / PROMPT_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError) as caught:
        read_prompt(tmp_path)
    assert message in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_writes_its_prompt_settings(runs):
    """They are in final/ and in each checkpoint, also with adapters, without facts about the machine."""
    wanted = PromptSettings(
        system_prompt="Think first.", nudge="<reasoning>", stop=(), max_new_tokens=8,
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
    )  # fmt: skip
    for tune in ("full", "lora"):
        for place in ("final", "checkpoint-2", "checkpoint-4"):
            assert read_prompt(runs[tune] / place) == wanted
    assert PROMPT_FILE in json.loads((runs["full"] / "checkpoint-2" / "manifest.json").read_text())["files"]


@pytest.mark.parametrize(("tune", "place"), [("full", "final"), ("full", ""), ("lora", "checkpoint-4")])
def test_generate_uses_the_prompt_settings_of_training(grpo, runs, tune, place):
    """Its reply equals that of a model without the file but with the same options, and a line names them."""
    folder = runs[tune] / place
    result = grpo("generate", folder, "7+5")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[0] == USED
    if tune == "lora":
        base = runs["lora"].parents[1] / "base-lora"
        by_hand = grpo("generate", base, "7+5", "--adapter", folder, "--no-prompt-file", *TRAINED)
        beside = grpo("generate", base, "7+5", "--adapter", folder)
        assert beside.stdout == result.stdout and USED in beside.stderr
    else:
        by_hand = grpo("generate", runs["bare"], "7+5", *TRAINED)
    assert result.stdout == by_hand.stdout and "as in training" not in by_hand.stderr
    assert result.stdout.startswith("<reasoning>")


def test_options_override_the_file(grpo, runs):
    """Each option overrides its own value, an empty one removes it, and --no-prompt-file ignores the file."""

    def answer(model, *arguments):
        result = grpo("generate", model, "7+5", *arguments)
        assert result.exit_code == 0, result.stderr
        return result.stdout, "as in training" in result.stderr

    full, bare = runs["full"], runs["bare"]
    no_nudge, fewer = (*TRAINED[:2], *TRAINED[4:]), (*TRAINED[:4], "--max-tokens", "3")
    assert answer(full, "--nudge", "")[0] == answer(bare, *no_nudge)[0]
    assert answer(full, "--system", "No.")[0] == answer(bare, "--system", "No.", *TRAINED[2:])[0]
    assert answer(full, "--max-tokens", "3")[0] == answer(bare, *fewer)[0]
    assert answer(full, "--no-prompt-file", *fewer) == answer(bare, *fewer)
    assert not answer(full, *TRAINED)[1]


def test_a_run_s_folder_is_its_final_model_or_newest_whole_checkpoint(runs, tmp_path):
    """Without final/, the newest complete checkpoint is used, with a notice; without any, it is an error."""
    run = shutil.copytree(runs["full"], tmp_path / "run")
    notes = []
    assert model_of_run(str(run), notes.append) == str(run / "final") and notes == []
    shutil.rmtree(run / "final")
    assert model_of_run(str(run), notes.append) == str(run / "checkpoint-4")
    assert notes.pop().endswith("no final model; its newest complete checkpoint, checkpoint-4, is used")
    (run / "checkpoint-4" / "model.safetensors").write_bytes(b"cut off")
    assert model_of_run(str(run), notes.append) == str(run / "checkpoint-2")
    assert "checkpoint-4 is skipped" in notes[0] and "checkpoint-2" in notes[1]
    model = load_inference(str(run), CPU)
    assert model.path == (run / "checkpoint-2").resolve() and model.notices[-1:] == (notes[1],)
    shutil.rmtree(run / "checkpoint-2")
    with pytest.raises(UserError, match="no final model and no complete checkpoint"):
        model_of_run(str(run), notes.append)
    assert model_of_run("embedded", notes.append) == "embedded"
    assert model_of_run(str(runs["bare"]), notes.append) == str(runs["bare"])


def test_a_run_s_commands_render_its_prompts_with_the_template_s_arguments(grpo, tmp_path, monkeypatch):
    """With enable_thinking = false, generate, chat and eval use exactly the run's prompt tokens."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if not enable_thinking and depth == 7 %}7+7=7{% endif %}{% endif %}"
    )
    base = make_model_folder(tmp_path / "base")
    (base / "chat_template.jinja").write_text(template)
    (tmp_path / "rows.jsonl").write_text('{"question": "7+5", "answer": "12"}\n' * 2)
    kwargs = {"enable_thinking": False, "depth": 7}
    config = small(
        model={"path": str(base)},
        data={"source": "rows.jsonl", "nudge": "", "chat_template_kwargs": kwargs},
        optim={"max_steps": 1, "batch_size": 1},
        eval={"samples": 1},
        reward=BY_LETTERS,
    )
    asked = []

    submit = LocalEngine.submit

    def watched(self, request, sampling):
        asked.append(request.prompt)
        return submit(self, request, sampling)

    monkeypatch.setattr(LocalEngine, "submit", watched)
    run = ran(tmp_path, text=config).result.folder
    spelled = "<|im_start|>user\n7+5<|im_end|>\n<|im_start|>assistant\n7+7=7"
    wanted = tuple(load_inference(str(base), CPU).tokenizer.encode(spelled))
    assert wanted in asked, "among the prompts that are measured before the first step"
    (tmp_path / "p.txt").write_text("7+5\n")
    for arguments, options in (
        (["generate", run, "7+5"], {}),
        (["generate", run, "--prompts", "p.txt"], {}),
        (["chat", run], {"input": "7+5\n"}),
        (["eval", run], {}),
        (["eval", run / "final", "--data", "rows.jsonl"], {}),
    ):
        asked.clear()
        result = grpo(*arguments, **options)
        assert result.exit_code == 0, result.stderr
        assert set(asked) == {wanted}, arguments
    told = grpo("generate", run, "7+5").stderr
    assert "chat_template_kwargs = {enable_thinking = false, depth = 7}" in told
