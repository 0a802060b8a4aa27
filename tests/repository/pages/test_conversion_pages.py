"""The commands of docs/conversion.md, on tiny models and a Hub of this machine."""

import shlex
import shutil

import mlx_lm
import pytest

from tests.support.pages import ROOT, snippets
from tests.support.processes.new_process import python
from tests.support.services.hub import serving
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import train

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}  # packed in groups of 64


def commands():
    """The words of the page's lines, in their order."""
    return [
        shlex.split(line, comments=True)
        for snippet in snippets(ROOT / "docs/conversion.md")
        if snippet.language == "sh"
        for line in snippet.text.splitlines()
        if line.startswith(("grpo ", "mlx_lm.")) and not line.startswith("mlx_lm.server")  # it does not end
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The runs, models and files that the pages name; models of the Hub are folders of the same names."""
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("pages")
    base = make_model_folder(folder / "Qwen/Qwen2.5-1.5B-Instruct", **WIDE)
    lora = train(folder, "lora", "lora", base=base)
    shutil.copytree(lora / "checkpoint-2", lora / "checkpoint-200")
    train(folder, "my-first", "full", base=base)
    make_model_folder(folder / "Qwen/Qwen2.5-0.5B-Instruct", "qwen2", **WIDE)
    for name in ("meta-llama/Llama-3.2-1B", "SmolLM2-135M-Instruct"):
        make_model_folder(folder / name, **WIDE)
    (folder / "prompts.txt").write_text("What is 7+5?\nWhat is 2+2?\n")
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    run(["grpo", "export", "SmolLM2-135M-Instruct", "--gguf", file, "--type", "q4_1"], folder)
    return folder


def run(words, folder, start=python):
    """In a process of its own."""
    module = "runners.cli" if words[0] == "grpo" else words[0]
    code = f"import runpy, sys; sys.argv = {words!r}; runpy.run_module({module!r}, run_name='__main__')"
    start("-c", code, cwd=folder)


def test_the_commands_of_the_page_run(folder):
    """In their order: later lines use what earlier ones made. A target that exists is replaced."""
    for words in commands():
        forced = [*words, "--force"] if words[0] == "grpo" else words
        if "--push" in words:
            with serving() as hub:
                run(forced, folder, hub.python)
                assert "model.safetensors" in hub.repos["someone/my-model"]
        else:
            run(forced, folder)
        for option in ("--out", "--save-path"):
            if option in words:
                assert mlx_lm.load(str(folder / words[words.index(option) + 1]))
        for option in ("--gguf", "--peft"):
            assert option not in words or (folder / words[words.index(option) + 1]).exists(), words
