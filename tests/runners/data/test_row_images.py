"""From a row's column of images to the prompt: the folder of the files and the chat template."""

from typing import Any, cast

import attrs
import datasets
import pytest

from runners.config.sections import DataConfig
from runners.data.datasets import load_rows
from runners.data.prompts import build_examples, image_folder
from runners.images.image_files import ImageFile, image_files
from tests.support.vision_runs import write_vision_data

pytest.importorskip("PIL")


class Processor:
    """A processor for which each image is three tokens."""

    template = "the processor's"

    def expanded(self, tokens, images):
        """The prompt with three zeros for each image in front."""
        return (0,) * 3 * len(images) + tuple(tokens)


class Tokenizer:
    """A tokenizer whose template shows images and whose tokens are letters."""

    chat_template = "yes"

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, chat_template):
        """The parts of the only message."""
        assert chat_template == Processor.template
        content = messages[-1]["content"]
        parts = content if isinstance(content, list) else [{"text": content}]
        return " ".join(part.get("text", "<image>") for part in parts)

    def encode(self, text, add_special_tokens):
        """One token per letter."""
        return [ord(letter) for letter in text]


def data_config(tmp_path, **changes):
    """The config for `write_vision_data`'s file."""
    own = {"image": "image", "system_prompt": "", "nudge": "", **changes}
    return DataConfig(source=str(tmp_path / "train.jsonl"), **own)


def test_files_lie_beside_the_data(tmp_path):
    """Paths are relative to the source's folder or to data.image_folder."""
    write_vision_data(tmp_path)
    assert image_folder(data_config(tmp_path)) == tmp_path
    assert image_folder(DataConfig(source=str(tmp_path), image="image")) == tmp_path
    assert image_folder(data_config(tmp_path, image_folder=str(tmp_path / "pics"))) == tmp_path / "pics"


def test_examples_have_their_images_and_rewards_the_column(tmp_path):
    """Messages stay texts, the column stays unchanged, and the template shows images first."""
    write_vision_data(tmp_path)
    config, shown = data_config(tmp_path), cast(Any, Processor())
    examples, _ = build_examples(load_rows(config)[0], config, Tokenizer(), processor=shown)
    assert [len(example.images) for example in examples] == [1, 2, 1, 0, 1, 1, 2, 0, 1, 1]
    second = examples[1]
    assert second.text == "<image> <image> How many rolls? 1"
    assert second.messages == ({"role": "user", "content": "How many rolls? 1"},)
    assert second.columns["image"] == ["pics/1.png", "pics/0.png"]
    assert second.tokens[:7] == (0, 0, 0, 0, 0, 0, ord("<"))
    assert isinstance(second.images[0], ImageFile)
    assert examples[3].text == "How many rolls? 3" and examples[3].columns["image"] is None


def test_images_of_the_hub_come_as_files(monkeypatch):
    """Images, lists of images and sounds are read as files, not as pixels."""
    from PIL import Image

    pixels = Image.new("RGB", (4, 2), (1, 2, 3))
    texts = dict.fromkeys(("question", "answer"), datasets.Value("string"))
    kinds = {"one": datasets.Image(), "many": datasets.List(datasets.Image()), **texts}
    row = {"one": pixels, "many": [pixels, pixels], "question": "a", "answer": "1"}
    found = datasets.Dataset.from_list([row] * 2, datasets.Features(kinds))
    found = found.add_column("sound", [{"bytes": b"RIFF", "path": None}] * 2)
    found = found.cast_column("sound", datasets.Audio())  # to decode it takes a package more
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    config = DataConfig(source="a/b", image="one")
    (row,), _ = load_rows(attrs.evolve(config, eval_split="train"))
    (file,) = image_files(row["one"], image_folder(config))
    assert file.data is not None and file.data.startswith(b"\x89PNG")
    assert len(image_files(row["many"], None)) == 2
    assert row["sound"] == {"bytes": b"RIFF", "path": None}
