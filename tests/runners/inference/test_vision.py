"""Vision-language models: what is said without mlx-vlm, and with it a tiny Qwen2-VL from end to end.

The second part needs the extra `vlm` and PyTorch; CI installs neither, so there it is skipped.
"""

import json
import shutil
import sys
from importlib.util import find_spec

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

from runners import cli
from tests.support.tiny_models import make_model_folder
from tests.support.vision_models import vision_settings, write_processor

needs_vlm = pytest.mark.skipif(
    not (find_spec("mlx_vlm") and find_spec("torch")), reason="wants mlx-vlm and PyTorch"
)


@pytest.fixture
def grpo(tmp_path, monkeypatch):
    """Runs `grpo …` in this process, in the test's folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli.main, [*arguments])


@pytest.fixture
def with_vision(tmp_path):
    """A folder whose config.json says that it has a vision part; no more of it is there."""
    folder = make_model_folder(tmp_path / "seeing")
    config = json.loads((folder / "config.json").read_text())
    config |= {"vision_config": {"depth": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_without_the_extra_one_line_names_it(grpo, with_vision, monkeypatch):
    """Images need it, and the language part alone does not; the whole is for mlx-vlm's own command."""
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
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


def test_images_want_a_model_that_sees(grpo, tmp_path):
    """A model of text is refused before anything is loaded, and so is what images do not go with."""
    make_model_folder(tmp_path / "blind")
    result = grpo("generate", "blind", "hello", "--image", "x.png")
    assert result.exit_code == 2 and "no vision_config" in result.stderr
    for extra in (("--num", "2"), ("--out", "x"), ("--tools", "x")):
        assert "--image goes with one PROMPT" in grpo("generate", "m", "p", "--image", "x", *extra).stderr
    assert "--image goes with one PROMPT" in grpo("generate", "m", "--prompts", "f", "--image", "x").stderr


@pytest.fixture(scope="module")
def theirs():
    """A Qwen2-VL of two layers and two vision blocks, random, in PyTorch."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(**settings())).eval()
    with torch.no_grad():
        for weight in model.parameters():  # the usual small weights would leave all logits alike
            weight.copy_(torch.randn_like(weight) * 0.25)
    return model


def settings():
    """config.json of the model, in the form of the models on the Hub."""
    found = vision_settings() | {"bos_token_id": 0}
    found["vision_config"]["in_chans"] = 3
    return found


@pytest.fixture
def source(tmp_path, theirs):
    """The model as a Hugging Face folder, with a tokenizer and an image processor."""
    folder = tmp_path / "qwen"
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings()))
    write_processor(folder)
    return folder


@pytest.fixture
def images(tmp_path):
    """One of noise, one that is white."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    for number, pixels in enumerate((noise, np.full_like(noise, 255))):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return ["0.png", "1.png"]


def inputs_of(folder, images):
    """The arrays that mlx-vlm makes of a question about images, and the model."""
    import mlx_vlm
    from mlx_vlm.prompt_utils import apply_chat_template
    from mlx_vlm.utils import prepare_inputs

    module, processor = mlx_vlm.load(str(folder), trust_remote_code=False)
    prompt = apply_chat_template(processor, module.config, "How many?", num_images=len(images))
    return module, prepare_inputs(processor, images=images, prompts=prompt, add_special_tokens=False)


@needs_vlm
@pytest.mark.filterwarnings("ignore")
def test_an_answer_is_that_of_the_model(grpo, source, images):
    """The text is that of the model's likeliest tokens; stderr has the speed; a stop string ends it."""
    from runners.tokenization.text import TextDecoder

    def answer(*options):
        result = grpo("generate", "qwen", "How many?", *options, "--temperature", "0", "--max-tokens", "8")
        assert result.exit_code == 0, result.stderr
        return result

    module, inputs = inputs_of(source, images[:1])
    ids, tokens = inputs["input_ids"], []
    for _ in range(8):
        logits = module(ids, inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"]).logits
        tokens.append(int(logits[0, -1].argmax()))
        ids = mx.concatenate([ids, mx.array([[tokens[-1]]], ids.dtype)], axis=1)
        if tokens[-1] == 2:
            break
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import AutoTokenizer

    tokenizer = TokenizerWrapper(AutoTokenizer.from_pretrained(source), eos_token_ids=[2])
    one = answer("--image", images[0])
    assert one.stdout == TextDecoder(tokenizer).decode(tokens) + "\n"
    assert f"completion {len(tokens)} tokens" in one.stderr
    stop = TextDecoder(tokenizer).decode(tokens[:2])
    assert answer("--image", images[0], "--stop", stop).stdout == stop + "\n"


@needs_vlm
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_is_no_image(grpo, source, tmp_path):
    """One line, with its name."""
    (tmp_path / "text.png").write_text("no")
    for name in ("text.png", "absent.png"):
        result = grpo("generate", "qwen", "How?", "--image", name)
        assert result.exit_code == 2 and f"--image {name}: cannot be read as an image" in result.stderr


@needs_vlm
@pytest.mark.filterwarnings("ignore")
def test_the_language_part_alone_is_mlx_lm_s(grpo, source, tmp_path):
    """`--text-only` leaves the vision part out."""
    import mlx_lm

    assert grpo("convert", "qwen", "--out", "text", "--text-only").exit_code == 0
    tokens = mx.array([[5, 9, 70, 31]])
    found = [np.array(mlx_lm.load(str(tmp_path / name))[0](tokens)) for name in ("text", "qwen")]
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert not any("vis" in name for name in mx.load(str(tmp_path / "text" / "model.safetensors")))
    result = grpo("generate", "text", "How?", "--image", "x.png")
    assert result.exit_code == 2 and "no vision_config" in result.stderr
