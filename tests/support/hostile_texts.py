"""Texts that a stranger writes into files of a model, a data set or a run, and what commands do with them."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from markdown_it import MarkdownIt

from runners.config.loading import load_config
from runners.tokenization.prompt_settings import PromptSettings, write_prompt
from tests.support.commands import grpo
from tests.support.runs.report_runs import make_run
from tests.support.tiny_models import make_model_folder

TEXTS = (
    "4\ntrust_remote_code = true\nFORGED = 1\n#",
    '"\ntrust_remote_code = true\nFORGED = "',
    '"""\n[model]\ntrust_remote_code = true\n"""',
    "x\nFORGED: a line of its own",
    "x\r\nFORGED\r",
    "x\u2028FORGED\u2029FORGED\x85FORGED",
    "\x1b]0;evil\x07\x1b[2J\x1b[31mred",
    "\x9b31mred \x7f\x08\x08",
    "\u202egnp.exe\u202c \u2066hidden\u2069\u200f",
    "half a pair: \ud83d",
    "</code><script>alert(1)</script><img src=x onerror=alert(1)>",
    "``` `` ` [x](javascript:alert(1)) ![y](https://evil.example/y.png) | a | b |",
    "\n\n# FORGED\n\n<iframe src=https://evil.example></iframe>\n\n---\nlicense: mit\n---\n",
    "{{ 7 * 7 }} {% raw %} ${7*7} $(touch PWNED) `touch PWNED`; touch PWNED",
    "../../../etc/passwd",
    "",
    "x" * 5000,
)
NAMES = [text.replace("/", "|") for text in TEXTS if "\ud83d" not in text and 0 < len(text) < 200]
_BAD = {*range(9), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_MORE = {  # keys that a config.json may have, besides those of the folder that is made
    "quantization": {"bits": 4, "group_size": 32, "mode": "affine", "lm_head": False},
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "model_file": "evil.py",
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    "_name_or_path": "somebody/model",
}
_NAMES = ("config", "tokenizer_config", "tokenizer", "generation_config")
_MODEL_FILES = [f"model/{name}.json" for name in _NAMES]
_RUN_FILES = [f"runs/one/{name}.json" for name in ("config.resolved", "final/grpo_prompt", "final/config")]


def places(value: Any, path: tuple = (), most: int = 40) -> Iterator[tuple]:
    """The path of every leaf of a JSON value, of large tables and lists the first ones."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:most]:
        yield from places(inner, (*path, key))
    if path:
        yield path


def replaced(value: Any, path: tuple, text: Any, as_key: bool) -> Any:
    """The value with a text at this place, or as the name of a table's entry."""
    key, *rest = path
    if rest:
        inner = replaced(value[key], tuple(rest), text, as_key)
    elif as_key and isinstance(value, dict):
        return {(text if name == key else name): each for name, each in value.items()}
    else:
        inner = text
    if isinstance(value, list):
        return [inner if number == key else each for number, each in enumerate(value)]
    return {**value, key: inner}


def make_files(folder: Path) -> None:
    """Creates a model with its own code, rows, and a run with a final model in `folder`."""
    model = make_model_folder(folder / "model", layers=1)
    evil = f"open({str(folder / 'PWNED')!r}, 'w')\n"
    (model / "evil.py").write_text(evil)
    rows = [{"question": f"What is {n}?", "answer": str(n), "more": {"a": [n]}} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = make_run(folder / "runs" / "one")
    settings = load_config("quickstart", [f"model.path={model}", "data.source=somebody/rows"]).to_dict()
    (run / "config.resolved.json").write_text(json.dumps(settings))
    shutil.copytree(model, run / "final")
    write_prompt(run / "final", PromptSettings.of(settings))


@st.composite
def changes(draw: Any, folder: Path) -> tuple[str, Any]:
    """A file below `folder` and its new content; or, with a slash, a name for `apply` to change."""
    kind = draw(st.sampled_from(("model", "model", "rows", "run", "log", "name")))
    if kind == "name":
        return draw(st.sampled_from(("model/", "rows.jsonl/", "runs/one/"))), draw(st.sampled_from(NAMES))
    text, as_key = draw(st.sampled_from(TEXTS)), draw(st.booleans())
    if kind in ("rows", "log"):
        name = "rows.jsonl" if kind == "rows" else "runs/one/training_log.jsonl"
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        path = draw(st.sampled_from(sorted(places(lines[0]), key=repr)))
        lines = [replaced(line, path, text, as_key) for line in lines if path[0] in line]
        return name, "".join(json.dumps(line) + "\n" for line in lines)
    name = draw(st.sampled_from(_MODEL_FILES if kind == "model" else _RUN_FILES))
    content = json.loads((folder / name).read_text()) if (folder / name).exists() else {"eos_token_id": [2]}
    if name == "model/config.json":
        more = draw(st.sampled_from(sorted(_MORE)))
        content = {**content, more: _MORE[more]}
    path = draw(st.sampled_from(sorted(places(content), key=repr)))
    return name, json.dumps(replaced(content, path, text, as_key))


def apply(folder: Path, change: tuple[str, Any]) -> dict[str, Path]:
    """Makes a change, and returns the paths of the model, the rows and the run."""
    at = {name: folder / name for name in ("model", "rows.jsonl", "runs/one")}
    name, new = change
    if name.endswith("/"):
        old = name.rstrip("/")
        at[old] = (folder / old).with_name(new + "".join(Path(old).suffixes))
        (folder / old).rename(at[old])
    else:
        (folder / name).write_text(new, encoding="utf-8")
    return at


def try_commands(folder: Path, change: tuple[str, Any]) -> None:
    """After a change, all commands that read such files show, run and write nothing hostile."""
    at = apply(folder, change)
    model, rows, run = map(str, at.values())
    config = folder / "made.toml"
    with contextlib.chdir(folder):
        if _quiet("init", model, rows, "--out", config):
            made = load_config(str(config))
            assert not made.model.trust_remote_code
            assert (made.model.path, made.data.source) == (model, rows)
            _quiet("check", config, "--problems", "2")
            _quiet("plan", config)
        _quiet("convert", model, "--out", "converted", "--bits", "4", "--group-size", "32")
        for source in (model, run):
            if _quiet("export", source, "--out", "exported", "--force"):
                check_card((folder / "exported" / "README.md").read_text(encoding="utf-8"))
        _quiet("runs", "runs")
        _quiet("runs", "runs", "--json")
        if _quiet("report", run, "--out", "page.html"):
            assert "<script>alert" not in (folder / "page.html").read_text()
    assert not list(folder.rglob("PWNED"))


def _quiet(*words: object) -> bool:
    """Whether the command succeeds; its output is harmless in any case."""
    done = grpo(*words, code=None)
    said = done.stdout + done.stderr
    assert done.exit_code in (0, 2), said
    assert not {letter for letter in said if ord(letter) in _BAD or "\ud800" <= letter <= "\udfff"}, said
    assert not [line for line in said.split("\n") if line.startswith(("FORGED", "trust_remote"))], said
    assert "Traceback" not in said
    return done.exit_code == 0


def check_card(text: str) -> None:
    """A model card has no HTML, link or picture, and only the expected keys in its head."""
    _, head, body = text.split("---\n", 2)
    keys = {line.partition(":")[0] for line in head.splitlines() if line[:1].isalpha()}
    assert keys <= {"library_name", "pipeline_tag", "tags", "base_model", "datasets", "license"}, head
    flat = [each for block in MarkdownIt().parse(body) for each in (block, *(block.children or ()))]
    kinds = {each.type for each in flat}
    assert not kinds & {"html_block", "html_inline", "link_open", "image", "hr"}, body
    titles = [flat[n + 1].content for n, each in enumerate(flat) if each.type == "heading_open"]
    assert not [title for title in titles if title.startswith("FORGED")], body
    assert not {letter for letter in body if ord(letter) in _BAD}, body
    assert os.linesep == "\n" or "\r" not in body
