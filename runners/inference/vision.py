"""Vision-language models, through mlx-vlm (extra `vlm`): conversion, and answers to prompts with images.

mlx-lm has the language part of many of them, which is the part that trains; images need mlx-vlm.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from runners.checkpoints.run_folder import model_of_run
from runners.data.prompts import NO_KWARGS, Message
from runners.errors import UserError
from runners.files.json_files import read_json
from runners.inference.text_generation import Completion, Sampling, Speed, draws, follow, penalty
from runners.machine import install_hints
from runners.models.dtypes import cast_floating, choose_dtype
from runners.models.folders import resolve_model
from runners.tokenization.prompt_settings import PromptSettings, read_prompt
from runners.tokenization.text import TextDecoder
from runners.tokenization.tokenizer_check import check_tokenizer

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from runners.machine.startup import Platform

# Exceptions of these packages for a folder that they cannot read.
_REFUSALS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError, ImportError)


@attrs.frozen(eq=False)
class VisionModel:
    """A vision-language model ready to answer."""

    module: nn.Module  # mlx-vlm's
    processor: Any  # transformers' or mlx-vlm's: images and text to arrays
    tokenizer: TokenizerWrapper  # mlx-lm's wrapper of the processor's tokenizer
    eos_ids: tuple[int, ...]
    prompt: PromptSettings | None  # how it was asked in training; None: not known, or not read


def sees(folder: Path) -> bool:
    """Whether a model folder's config.json has a vision part."""
    config = read_json(folder / "config.json")
    return bool(config.get("vision_config") or config.get("img_processor"))


def load_vision(
    model: str,
    platform: Platform,
    *,
    trust_remote_code: bool = False,
    with_prompt: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> VisionModel:
    """Loads a folder, a run's folder or a Hub name by mlx-vlm, in the compute dtype of `load_inference`.

    With `with_prompt` the result has the folder's grpo_prompt.json, if there is one. `note` gets a line if a
    checkpoint is used in place of a run's final model. Raises UserError if there is no such model, no vision
    part or no mlx-vlm, or if mlx-vlm cannot read the model.
    """
    path = resolve_model(model_of_run(model, note), "MODEL")
    if not sees(path):
        raise UserError(f"{path}: config.json has no vision_config; --image wants a vision-language model")
    _check_code(path, trust_remote_code)
    prompt = read_prompt(path) if with_prompt else None
    check_tokenizer(path)
    mlx_vlm = _mlx_vlm(f"{path} with --image")
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    try:
        with contextlib.redirect_stdout(sys.stderr):
            module, processor = mlx_vlm.load(str(path), trust_remote_code=trust_remote_code)
    except _REFUSALS as error:
        raise UserError(f"{path}: mlx-vlm cannot load it: {_line(error)}") from error
    cast_floating(module, choose_dtype("auto", platform, module))
    mx.eval(module.parameters())
    inner = getattr(processor, "tokenizer", processor)
    eos = tuple(sorted(set(inner.stopping_criteria.eos_token_ids)))
    wrapped = TokenizerWrapper(inner, eos_token_ids=list(eos))
    return VisionModel(module, processor, wrapped, eos, prompt)


def stream_images(
    model: VisionModel,
    messages: Sequence[Message],
    images: Sequence[str],
    sampling: Sampling,
    *,
    nudge: str = "",
    stop: Sequence[str] = (),
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    stopped: Callable[[], bool] = lambda: False,
    speed: Speed | None = None,
) -> Iterator[str | Completion]:
    """An answer to messages with images (files, in their order, before the last message's text).

    Pieces, then the whole Completion, as `runners.inference.text_generation.stream` gives them. Raises
    UserError for a file that is no image, and where the model refuses the prompt.
    """
    import mlx_vlm  # pyright: ignore[reportMissingImports]
    from mlx_vlm.prompt_utils import apply_chat_template  # pyright: ignore[reportMissingImports]

    for image in images:
        _check_image(image)
    penalized = sampling.repetition_penalty != 1
    try:
        prompt: Any = apply_chat_template(
            model.processor, model.module.config, list(messages), num_images=len(images), **template_kwargs
        )
    except _REFUSALS as error:
        raise UserError(f"the prompt does not fit the model's chat template: {_line(error)}") from error
    generate: Any = mlx_vlm.stream_generate  # pyright: ignore[reportPrivateImportUsage]
    responses = generate(
        model.module,
        model.processor,
        prompt + nudge,
        image=list(images),
        max_tokens=sampling.max_tokens,
        sampler=draws(sampling),
        logits_processors=[penalty(sampling, None)] if penalized else [],
        # The penalty has to see the whole prompt in the first call.
        **({"prefill_step_size": None} if penalized else {}),
    )
    decoder = TextDecoder(model.tokenizer)
    yield from follow(
        _checked(responses),
        model.eos_ids,
        decoder=decoder,
        find_stop=decoder.find_stop(stop),
        stopped=stopped,
        speed=speed,
    )


def convert_vision(path: Path, target: Path, *, trust_remote_code: bool = False, **options: Any) -> None:
    """Writes the MLX folder of a vision-language model with `mlx_vlm.convert`, which gets the options.

    Its vision part is never quantized. The folder is opened once more as a check, because mlx-vlm packs
    layers of odd sizes that it cannot read again. Raises UserError without mlx-vlm, and if mlx-vlm refuses
    the model.
    """
    _check_code(path, trust_remote_code)
    _mlx_vlm(f"{path} (its config.json has a vision part; --text-only converts the language part alone)")
    from mlx_vlm.convert import convert  # pyright: ignore[reportMissingImports]
    from mlx_vlm.utils import load_model  # pyright: ignore[reportMissingImports]

    try:
        with contextlib.redirect_stdout(sys.stderr):
            convert(str(path), str(target), trust_remote_code=trust_remote_code, **options)
    except _REFUSALS as error:
        raise UserError(f"{path}: mlx-vlm cannot convert it: {_line(error)}") from error
    try:
        load_model(target, lazy=True, trust_remote_code=trust_remote_code)
    except _REFUSALS as error:
        raise UserError(f"{path}: mlx-vlm cannot open what it made of it: {_line(error)}") from error


def _checked(responses: Iterator[Any]) -> Generator[Any, None, None]:
    """The responses without the last one at the length limit, which repeats a token."""
    try:
        response = next(responses)  # the prompt is read here
    except _REFUSALS as error:
        raise UserError(f"mlx-vlm cannot answer this prompt with these images: {_line(error)}") from error
    while response.finish_reason != "length":
        yield response
        response = next(responses, None)
        if response is None:
            return


def _mlx_vlm(what: str) -> Any:
    try:
        import mlx_vlm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] == "mlx_vlm"
        reason = "" if missing else f" ({_line(error)})"
        raise UserError(f"{what} needs mlx-vlm: {install_hints.extra('vlm')}{reason}") from error
    return mlx_vlm


def _check_code(path: Path, trust_remote_code: bool) -> None:
    """Raises UserError for a model with its own code unless it is trusted: mlx-vlm would always run it."""
    named = read_json(path / "config.json").get("model_file")
    if named and not trust_remote_code:
        raise UserError(f"{path}: config.json names code to run, {named}; --trust-remote-code lets it")


def _check_image(image: str) -> None:
    from PIL import Image

    try:
        with Image.open(image) as opened:
            opened.verify()
    except (OSError, SyntaxError, ValueError) as error:  # SyntaxError: a broken PNG
        raise UserError(f"--image {image}: cannot be read as an image ({_line(error)})") from error


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]).rstrip(",") or type(error).__name__
