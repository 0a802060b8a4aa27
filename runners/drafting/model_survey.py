"""What a model is, without loading it: its size, its bits, its chat template, and how it counts tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from runners.data.messages import Message
from runners.data.rendering import has_template, render
from runners.errors import UserError, first_line
from runners.files.json_files import read_json
from runners.models.folders import resolve_model
from runners.models.model_reader import load_tokenizer
from runners.quickstart import MODELS
from runners.tokenization.text import encode


@attrs.frozen
class ModelSurvey:
    """A model as its folder describes it."""

    parameters: int
    bits: int | None  # of its packed weights; None: not packed
    tokenizer: Any
    shipped: bool  # one of the small models in the package, which answer in tags

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template; a base model has none."""
        return has_template(self.tokenizer)

    @property
    def words(self) -> str:
        """The size, the bits and the kind, for people."""
        size = (
            f"{self.parameters / 1e9:.1f} billion"
            if self.parameters >= 1e9
            else f"{self.parameters / 1e6:.3g} million"
        )
        packed = f", {self.bits} bits" if self.bits else ""
        return f"{size} parameters{packed}{'' if self.has_template else ', no chat template'}"

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(encode(self.tokenizer, text, add_special_tokens=False))

    def longest(self, conversations: Sequence[Sequence[Message]]) -> int:
        """Tokens of the longest of these prompts."""
        return max((len(render(self.tokenizer, messages)[1]) for messages in conversations), default=0)


def survey_model(name: str) -> ModelSurvey:
    """Looks at a folder, a name on the Hub or a shipped model; of weights only shapes are read.

    Raises UserError as a run does for a model that cannot be used.
    """
    folder = resolve_model(name, "MODEL")
    packed = read_json(folder / "config.json").get("quantization")
    bits = packed.get("bits") if isinstance(packed, dict) else None
    tokenizer = load_tokenizer(folder)
    return ModelSurvey(_parameters(folder, bits), bits, tokenizer, name in MODELS)


def _parameters(folder: Path, bits: int | None) -> int:
    """The weights' number; a packed word of 32 bits holds 32 / bits of them."""
    count = 0
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            arrays: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{file}: cannot be read as safetensors ({first_line(error)})") from error
        for name, array in arrays.items():
            if bits and array.dtype == mx.uint32:
                count += array.size * 32 // bits
            elif not bits or not name.endswith((".scales", ".biases")):
                count += array.size
    return count
