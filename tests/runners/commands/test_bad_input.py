"""Malicious and mistaken input: a command prints one line, exits with code 2 and leaves nothing half done."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from runners.files.tensor_files import load_arrays, save_arrays
from tests.support.commands import grpo
from tests.support.damage import containing, stating
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import small

ROWS = [{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(12)]


@pytest.fixture(autouse=True)
def place(tmp_path, fresh_folder):
    """A fresh current folder with rows, a reward and a config of the embedded model."""
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("mine.py").write_text("def good(completions, **_):\n    return [0.0] * len(completions)\n")
    write_config()
    return tmp_path


def write_config(model="embedded", data="rows.jsonl"):
    settings = {"model": {"path": model}, "reward": {"functions": ["mine.py:good"]}}
    data_keys = {"source": data, "eval_split": "test", "nudge": "<reasoning>"}
    Path("train.toml").write_text(small(run={"output_dir": "out"}, data=data_keys, **settings))


def files():
    """All files of the folder, except Python's bytecode and a run's empty lock."""
    return {
        path for path in Path().rglob("*") if path.is_file() and not path.name.endswith((".pyc", ".lock"))
    }


def refused(*arguments):
    """Returns the error of a command, which starts nothing and shows no traceback."""
    before = files()
    lines = grpo(*arguments, code=2, input="hello\n").stderr.splitlines()
    lines = [line for line in lines if not line.startswith("BLAS") and "OpenBLAS" not in line]
    assert lines and all(line.isprintable() and len(line) < 2100 for line in lines), lines
    assert not any("Traceback" in line for line in lines)
    assert files() == before
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "line"),
    [("[model\n", "train.toml: not TOML"), ("model.path = 3\n", "model.path: expected a string, found 3")],
)
def test_bad_configs(text, line):
    """All commands with a config report the same error."""
    Path("train.toml").write_text(text)
    for command in ("run", "sft", "plan", "check", "bench", "difficulty"):
        assert line in refused(command, "train.toml")


LONG = "x" * 10_000_000


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", json.dumps(ROWS[0]) + "\n" + LONG + "\n", "a.jsonl, line 2: not JSON"),
        ("a.jsonl", json.dumps({LONG: 1, "questio": ""}) + "\n", "no field named"),
        ("a.jsonl", json.dumps({"question": LONG, "answer": 1}) + "\n" + "[" * 100_000, "line 2: not "),
        ("a.csv", f"question,answer\n{LONG},1\n1,2\n", "at most 2,097,152 characters, found 10"),
    ],
    ids=lambda part: str(part)[:30],
)
def test_bad_data(name, content, line):
    """The line names the file and, if possible, the row."""
    Path(name).write_text(content)
    write_config(data=name)
    for command in ("run", "check"):
        assert line in refused(command, "train.toml")


def test_tokens_that_the_model_has_no_embedding_for(place):
    """A prompt is refused if an added token, as in the default nudge here, has no embedding."""
    make_model_folder(place / "model", vocab_size=316, tokenizer_size=320)
    write_config(model="model")
    line = "prompt 0 has the token id 316: expected 0 <= id < 316, the rows of the model's token embedding"
    assert f"train data, {place}/model: {line}" in refused("run", "train.toml")
    for command in (["generate", "model", "2"], ["chat", "model"]):
        assert f"{place}/model: {line}" in refused(*command, "--nudge", "<reasoning>")
    Path("prompts.txt").write_text("2\n")
    assert line in refused("generate", "model", "--prompts", "prompts.txt", "--nudge", "<reasoning>")
    assert line in refused("eval", "model", "--config", "train.toml")


def arrays_with(change):
    """Returns a function that rewrites the weights after `change` has modified them."""

    def spoil(folder):
        weights, metadata = load_arrays(folder / "model.safetensors")
        change(weights)
        save_arrays(folder / "model.safetensors", weights, metadata)

    return spoil


def link_out(folder):
    """Replaces the weights by a link to another file of this machine."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/etc/hostname")


NORM = "model.norm.weight"
SPOILED = {  # more than tests/runners/models/test_loaded_model.py has for the loader alone
    "a header as long as the world": containing("model.safetensors", b"\xff" * 8 + b"{}"),
    "wrong shapes": arrays_with(lambda w: w.update({NORM: mx.ones((7,))})),
    "a missing tensor": arrays_with(lambda w: w.pop(NORM)),
    "a size beyond memory": stating("config.json", hidden_size=2**40),
    "a type that leads elsewhere": stating("config.json", model_type="../../evil"),
    "an index that climbs": stating("model.safetensors.index.json", weight_map={"a": "../x.safetensors"}),
    "weights that are a link out": link_out,
    "a tokenizer of bytes": containing("tokenizer.json", b"\xff\xfe"),
    "a tokenizer with code": stating(
        "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]}
    ),
    "own code": stating("config.json", model_file="evil.py"),
    "own code as transformers has it": stating(
        "config.json", model_type="evil", auto_map={"AutoModel": "evil.M"}
    ),
    "a config nested too deeply": containing("config.json", b"[" * 100_000),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_bad_models(place, spoil):
    """A damaged, too new or malicious model folder is refused by two commands, and none of its code runs."""
    write_config(model="model")
    model = make_model_folder(place / "model")
    (model / "evil.py").write_text(f"open({str(place / 'ran')!r}, 'w')\nM = Evil = Model = ModelArgs = 3")
    spoil(model)
    for command in (["run", "train.toml"], ["generate", model, "hello"]):
        assert "model" in refused(*command)
    assert not (place / "ran").exists()
