"""Vision-language models: messages without mlx-vlm (the extra `vlm`), and a tiny Qwen2-VL with it."""

import importlib
import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

from runners import cli
from runners.files.tensor_files import load_arrays
from runners.models.model_reader import load_tokenizer
from runners.tokenization.text import TextDecoder
from tests.support.tiny_models import make_model_folder
from tests.support.vision_models import make_vision_folder, needs_mlx_vlm, without_mlx_vlm, write_picture


@pytest.fixture
def grpo(tmp_path, monkeypatch):
    """Runs `grpo …` in this process, in the test's folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli.main, [*arguments])


@pytest.fixture
def with_vision(tmp_path):
    """A folder whose config.json has a vision part that does not exist."""
    folder = make_model_folder(tmp_path / "seeing")
    config = json.loads((folder / "config.json").read_text())
    config |= {"vision_config": {"depth": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_without_the_extra_one_line_names_it(grpo, with_vision, monkeypatch):
    """Only images require mlx-vlm; the whole model is converted by mlx-vlm's own command."""
    without_mlx_vlm(monkeypatch)
    shutil.copytree(with_vision, with_vision.parent / "qwen")
    stated = json.loads((with_vision / "config.json").read_text()) | {"model_type": "qwen2_vl"}
    (with_vision.parent / "qwen" / "config.json").write_text(json.dumps(stated))
    result = grpo("generate", "qwen", "hello", "--image", "x.png")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.stderr
    assert "pip install -e '.[vlm]' in a clone" in result.stderr
    result = grpo("convert", "seeing", "--out", "out")
    assert result.exit_code == 2 and "mlx_vlm.convert" in result.stderr and "--text-only" in result.stderr
    assert not (with_vision.parent / "out").exists()
    assert grpo("convert", "seeing", "--out", "out", "--text-only").exit_code == 0


def test_images_require_a_vision_model(grpo, tmp_path):
    """A text model, and options that --image does not support, are refused before anything is loaded."""
    make_model_folder(tmp_path / "blind")
    result = grpo("generate", "blind", "hello", "--image", "x.png")
    assert result.exit_code == 2 and "no vision_config" in result.stderr
    for extra in (("--num", "2"), ("--out", "x"), ("--tools", "x")):
        assert "--image requires a single" in grpo("generate", "m", "p", "--image", "x", *extra).stderr
    assert "--image requires a single" in grpo("generate", "m", "--prompts", "f", "--image", "x").stderr


@pytest.fixture
def source(tmp_path):
    """A random Qwen2-VL with two layers and two vision blocks, a tokenizer and an image processor."""
    return make_vision_folder(tmp_path / "qwen")


@needs_mlx_vlm
@pytest.mark.filterwarnings("ignore")
def test_an_answer_equals_mlx_vlm_s(grpo, source, tmp_path):
    """The text consists of the most likely tokens; stderr shows the speed; a stop string ends it."""
    mlx_vlm = importlib.import_module("mlx_vlm")

    def answer(*options):
        result = grpo("generate", "qwen", "How many?", *options, "--temperature", "0", "--max-tokens", "8")
        assert result.exit_code == 0, result.stderr
        return result

    image = str(write_picture(tmp_path / "0.png", 24, 32))
    module, processor = mlx_vlm.load(str(source))
    shown = "<|vision_start|><|image_pad|><|vision_end|>How many?"
    text = f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=[text], images=[image], add_special_tokens=False)
    images = {name: mx.array(inputs[name]) for name in ("pixel_values", "image_grid_thw")}
    ids, tokens = mx.array(inputs["input_ids"]), []
    for _ in range(8):
        module.language_model._rope_deltas = module.language_model._position_ids = None
        logits = module(ids, **images).logits
        tokens.append(int(logits[0, -1].argmax()))
        ids = mx.concatenate([ids, mx.array([[tokens[-1]]], ids.dtype)], axis=1)
        if tokens[-1] == 2:
            break
    decoder = TextDecoder(load_tokenizer(source))
    one = answer("--image", image)
    assert one.stdout == decoder.decode(tokens) + "\n"
    assert f"completion {len(tokens)} tokens" in one.stderr
    stop = decoder.decode(tokens[:2])
    assert answer("--image", image, "--stop", stop).stdout == stop + "\n"


@needs_mlx_vlm
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_is_no_image_is_named(grpo, source, tmp_path):
    """The error is one line with the file's name."""
    (tmp_path / "text.png").write_text("no")
    for name in ("text.png", "absent.png"):
        result = grpo("generate", "qwen", "How?", "--image", name)
        assert result.exit_code == 2 and f"{name}: cannot be read as an image" in result.stderr


@needs_mlx_vlm
@pytest.mark.filterwarnings("ignore")
def test_the_language_part_equals_mlx_lm_s(grpo, source, tmp_path):
    """`--text-only` omits the vision part."""
    import mlx_lm

    assert grpo("convert", "qwen", "--out", "text", "--text-only").exit_code == 0
    tokens = mx.array([[5, 9, 70, 31]])
    found = [np.array(mlx_lm.load(str(tmp_path / name))[0](tokens)) for name in ("text", "qwen")]
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert not any("vis" in name for name in load_arrays(tmp_path / "text" / "model.safetensors")[0])
    result = grpo("generate", "text", "How?", "--image", "x.png")
    assert result.exit_code == 2 and "no vision_config" in result.stderr
