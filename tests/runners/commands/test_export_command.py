"""`grpo export`: fused and quantized weights, the model card, existing files, and the upload."""

import getpass
import json
import shlex
import socket
import tomllib
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from huggingface_hub import ModelCard

from runners.conversion.model_card import RunFacts, model_card, shareable
from runners.evaluation.comparison import wilson
from runners.tokenization.prompt_settings import PromptSettings
from tests.support.commands import grpo
from tests.support.services.hub import TOKEN, serving
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import train

TOKENS = mx.array([[5, 9, 70, 31, 12]])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by what they trained: "full", "lora", and "packed" (LoRA on 4 bits)."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "full": train(folder, "full", "full", dtype="bfloat16"),
        "lora": train(folder, "lora", "lora", dtype="bfloat16"),
        "packed": train(folder, "packed", "lora", quantize={"group_size": 32, "bits": 4}),
    }


def export(*arguments, code=0):
    """`grpo export …`."""
    return grpo("export", *arguments, code=code)


def logits_of(folder, adapter=None):
    """The logits from mlx-lm's own loader, including the tokenizer, and the module."""
    module: Any = mlx_lm.load(str(folder), adapter_path=None if adapter is None else str(adapter))[0]
    return np.array(module(TOKENS).astype(mx.float32)), module


@pytest.mark.parametrize("kind", ["full", "lora", "packed"])
def test_a_run_gives_its_final_model(runs, tmp_path, kind):
    """The logits are equal; the folder has tokenizer and card, but no adapters or optimizer state."""
    result = export(runs[kind], "--out", "out")
    assert result.stdout.startswith("out: ") and result.stdout.count("\n") == 1
    assert np.array_equal(logits_of(tmp_path / "out")[0], logits_of(runs[kind] / "final")[0])
    names = "README.md config.json grpo_prompt.json model.safetensors model.safetensors.index.json"
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *names.split(), "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["lora", "packed"])
def test_adapters_are_fused(runs, tmp_path, kind):
    """A checkpoint of adapters becomes a model that computes the same as base and adapters."""
    export(runs[kind] / "checkpoint-2", "--out", "out")
    base = runs[kind].parents[1] / f"base-{kind}"
    want = logits_of(base, runs[kind] / "checkpoint-2")[0]
    found, module = logits_of(tmp_path / "out")
    start = logits_of(base)[0]
    assert np.abs(found - want).mean() < 0.1 * np.abs(want - start).mean()
    packed = {name for name, part in module.named_modules() if hasattr(part, "bits")}
    attention = "model.layers.1.self_attn.q_proj"  # adapted, and so unpacked
    assert (attention in packed, "model.embed_tokens" in packed) == (False, kind == "packed")


@pytest.mark.parametrize("kind", ["lora", "gguf"])
def test_a_run_becomes_a_gguf_file(runs, tmp_path, kind):
    """The file computes what the final model does, also with quantized weights and weights from GGUF."""
    pytest.importorskip("gguf")
    if kind == "gguf":
        grpo("export", runs["full"], "--gguf", "base.gguf", "--type", "q4_0")
        grpo("convert", "base.gguf", "--out", "base")
        run = train(tmp_path, kind, "lora", base=tmp_path / "base")
        assert (
            dict(logits_of(tmp_path / "base")[1].named_modules())["model.layers.0.self_attn.q_proj"].bits == 4
        )
    else:
        run = runs[kind]
    export(run, "--gguf", "m.gguf", "--type", "f32", "--force")
    assert "PARAMETER num_predict 8\n" in (tmp_path / "Modelfile").read_text()
    assert "--force replaces it" in export(run, "--gguf", "m.gguf", code=2).stderr
    grpo("convert", "m.gguf", "--out", "back")
    want = logits_of(run / "final")[0]
    assert np.abs(logits_of(tmp_path / "back")[0] - want).max() < 0.01 * np.abs(want).max()


def test_quantization_repacks_every_layer(runs, tmp_path):
    """All layers have the requested format, the card states it, and the logits stay close."""
    export(runs["packed"], "--out", "out", "--bits", "8", "--group-size", "32")
    found, module = logits_of(tmp_path / "out")
    kinds = {(p.bits, p.group_size) for _, p in module.named_modules() if hasattr(p, "bits")}
    assert kinds == {(8, 32)}
    full = logits_of(runs["packed"] / "final")[0]
    assert np.abs(found - full).mean() < 0.05 * np.abs(full).mean()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "quantized: 8 bits, groups of 32. The results were measured in full" in card


DRAWN: Any = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def test_no_prompt_ends_its_block_of_the_card():
    """A text contains fewer consecutive backticks than the fence around it."""
    prompt = PromptSettings(system_prompt="", nudge="````` [x](y)", stop=(), max_new_tokens=8, **DRAWN)
    card = model_card("m", None, prompt, quantized="", base="", licence={})
    assert "\n``````text\n````` [x](y)\n``````\n" in card


def test_every_part_of_the_card_is_read_as_it_was_meant():
    """Parsers of YAML, Markdown, TOML and shell words read back the same texts."""
    title = "my `model` *1* [x](y) <b> _z_ a_b $(id) 'q\""
    text = 'She said: "`` a ``"\n```\n# no heading\n---\n| a |'
    prompt = PromptSettings(system_prompt=text, nudge="```", stop=("\n", '"'), max_new_tokens=8, **DRAWN)
    config = {
        "model": {"path": title, "tune": "lora"},
        "loss": {"preset": "dapo"},
        "data": {"source": "a/b: c"},
    }
    licence = {"license": "other", "license_name": "x: [y]\n---", "license_link": "#"}
    card = model_card(title, RunFacts(config, [], []), prompt, quantized="4 bits", base="", licence=licence)
    data: Any = ModelCard(card).data
    assert {key: data.get(key) for key in licence} == licence and data.datasets == "a/b: c"
    markdown = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    tokens = markdown.MarkdownIt().parse(ModelCard(card).content)
    fences = {token.info: [each.content for each in tokens if each.info == token.info] for token in tokens}
    headings = [tokens[i + 1] for i, token in enumerate(tokens) if token.type == "heading_open"]
    assert "".join(part.content for part in headings[0].children or ()) == title
    assert [part.type for part in headings[0].children or ()].count("em_open") == 0
    assert [heading.content for heading in headings[1:]] == ["Results", "Prompt", "Config", "Use"]
    assert fences["text"][:2] == [f"{text}\n", "```\n"]
    assert tomllib.loads(fences["toml"][0]) == config
    assert [shlex.split(line)[i] for line, i in zip(fences["sh"], (2, 2), strict=True)] == [title, title]


def test_the_card_describes_the_run_without_machine_or_user(runs, tmp_path):
    """It contains results, config and prompt, but no folder, host or user."""
    export(runs["lora"], "--out", "my-model")
    text = (tmp_path / "my-model" / "README.md").read_text(encoding="utf-8")
    data: Any = ModelCard(text).data
    assert data.library_name == "mlx" and data.tags == ["mlx", "grpo"]
    assert "# my-model\n" in text and "GRPO (grpo, LoRA)" in text
    log = [json.loads(line) for line in (runs["lora"] / "training_log.jsonl").read_text().splitlines()]
    scores, rewards = ([line[key] for line in log if key in line] for key in ("em", "reward"))
    low, high = wilson(round(2 * scores[-1]), 2)
    assert f"| exact match, 2 held-out problems | {scores[0]:.1%} [" in text
    assert f"| {scores[-1]:.1%} [{low:.1%}, {high:.1%}] |" in text
    (last,) = [line for line in log if "time/eval" in line][-1:]
    half = 1.96 * last["eval/reward_std"] / 2**0.5
    mean = last["eval/reward"]
    assert f"| {mean:.4g} [{mean - half:.4g}, {mean + half:.4g}] |" in text
    assert f"| training reward | {rewards[0]:.4g} | {rewards[-1]:.4g} |" in text
    assert "4 updates" in text
    assert "learning_rate = 0.005" in text and "Think first." in text and '"letters.py:letters"' in text
    places = (str(tmp_path), str(runs["lora"].parents[1]), socket.gethostname(), f"/{getpass.getuser()}")
    assert [word for word in (*places, "output_dir") if word in text] == []


def test_a_config_is_shared_without_the_machines_paths():
    """Files keep their names; Hub names, answer forms and other values are unchanged."""
    config = {
        "env": {"factory": "/home/me/shop.py:Shop", "tools": ["/home/me/tools.py:add"], "workers": 4},
        "answer": {"form": "json:answer"},
        "model": {"path": "/models/base", "loader": "", "lora": {"rank": 8}},
        "rollout": {"launch": "eval", "top_k": 3},
        "system": {"compile": True},
    }
    assert shareable(config) == {
        "env": {"factory": "shop.py:Shop", "tools": ["tools.py:add"], "workers": 4},
        "answer": {"form": "json:answer"},
        "model": {"path": "base", "loader": "", "lora": {"rank": 8}},
        "rollout": {"top_k": 3},
    }


def test_faults_are_lines(runs, tmp_path):
    """The code is 2, nothing is written, and even --force never replaces the source or its folders."""
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "run" / "config.resolved.json").write_text("{}")
    places = (runs["full"] / "final", runs["full"], runs["full"].parent)
    for arguments, message in (
        (["./nope", "--out", "out"], 'MODEL = "./nope": there is no such folder'),
        (["run", "--out", "out"], "run: this run has no final model and no complete checkpoint"),
        ([runs["full"], "--out", "out", "--mode", "mxfp4", "--bits", "8"], "requires bits to be 4"),
        ([runs["full"]], "expected one of --out DIR, --gguf FILE and --peft DIR"),
        ([runs["full"], "--gguf", "m", "--out", "out"], "expected one of --out DIR, --gguf FILE"),
        ([runs["full"], "--gguf", "m", "--bits", "4"], "and --dtype require --out DIR"),
        ([runs["full"], "--gguf", "m", "--type", "q3"], "--type q3: expected"),
        ([runs["full"], "--out", "out", "--private"], "--private requires --push"),
        ([runs["full"], "--out", "out", "--type", "f16"], "--type requires --gguf"),
        *(([runs["full"], "--out", place, "--force"], "expected a different folder") for place in places),
    ):
        result = export(*arguments, code=2)
        assert not result.stdout and message in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_upload_happens_when_asked_for(runs, tmp_path):
    """Every file is uploaded unchanged, and the card has the repository's name."""
    with serving() as hub:
        name = "someone/my-model"
        words = ("export", runs["full"], "--out", "out", "--push", name, "--private")
        done = hub.grpo(*words, cwd=tmp_path)
        assert done.stdout.splitlines()[-1].startswith(f"uploaded: {hub.url}/{name}/commit/")
        files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
        assert hub.repos == {name: files} and b"# someone/my-model\n" in files["README.md"]
    failed = export(runs["full"], "--out", "other", "--push", "a b", code=2)
    assert '--push "a b": the upload failed' in failed.stderr and "other is complete" in failed.stderr
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in text for text in (*kept, done.stdout.encode(), done.stderr.encode()))


CARD = """---
license: other
license_name: "my-licence"
license_link: https://a.b/LICENSE
tags: [a]
---
license: mit
"""


def licence_of(folder):
    data: Any = ModelCard.load(folder / "README.md").data
    return data.license, data.license_name, data.license_link, data.tags


def test_the_bases_licence_is_on_the_card(tmp_path):
    """From its card beside it, or on the Hub if something is sent there; nothing else of that card, and no
    lists: references to lists would have 10^20 parts when spelled."""
    base = make_model_folder(tmp_path / "base")
    export("base", "--out", "none")
    assert licence_of(tmp_path / "none") == (None, None, None, ["mlx"])
    (base / "README.md").write_text(CARD)
    export("base", "--out", "beside")
    with serving() as hub:
        hub.add("someone/base", base)
        (base / "README.md").unlink()
        hub.grpo("export", "someone/base", "--out", "online", "--push", "me/mine", cwd=tmp_path)
    for place in ("beside", "online"):
        wanted = ("other", "my-licence", "https://a.b/LICENSE", ["mlx"])
        assert licence_of(tmp_path / place) == wanted
    lists = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]" for n in range(20)]
    front = ["---", *lists, "license: *a19", "license_name: 3", "license_link: a.b", "---", ""]
    (base / "README.md").write_text("\n".join(front))
    export("base", "--out", "made")
    assert licence_of(tmp_path / "made") == (None, None, "a.b", ["mlx"])
