"""Loads a model for use without training. Adapters are applied, and packed weights stay packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from grpo_fn.checks import check_positions, check_token_ids
from runners.checkpoints.manifest import model_of_run
from runners.data.messages import Message
from runners.data.prompts import Example
from runners.data.rendering import NO_KWARGS, opening, render, use_template
from runners.engines.engine import Engine, Weights
from runners.engines.local import LocalEngine
from runners.engines.settings import usual_launch
from runners.errors import UserError
from runners.files.json_files import read_json
from runners.images.image_files import ImageFile
from runners.images.processor import check_family, mlx_vlm_module
from runners.images.tower import VisionPart, prepare_vision
from runners.machine.memory_readings import keep_model_resident
from runners.models.adapters import base_of, check_adapters, read_adapters
from runners.models.folders import TEMPLATE_FILE, is_adapter_folder, resolve_model
from runners.models.model_reader import cast_floating, choose_dtype, custom_loader, read_model
from runners.tokenization.prompt_settings import PromptSettings, read_prompt
from runners.tokenization.text import TextDecoder
from runners.tokenization.tokenizer_check import check_tokenizer

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from runners.machine.startup import Platform


def check_prompts(
    where: str,
    prompts: Sequence[Sequence[int]],
    most: int,
    vocabulary: int | None,
    positions: int | None,
) -> None:
    """Raises UserError for tokens without an embedding, which a tokenizer may have added, and if a
    prompt plus `most` new tokens exceeds the model's learned positions. `most` is 0 if the prompts
    include the new tokens.
    """
    longest = max(map(len, prompts), default=0)
    counted = f"{longest} tokens"
    if most:
        counted = f"a prompt of {longest} tokens and a length limit of {most}"
    try:
        check_token_ids(prompts, vocabulary)
        check_positions(counted, longest + most - 1, positions)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


@attrs.frozen(eq=False)
class InferenceModel:
    """A model that is ready to sample."""

    module: nn.Module  # floating leaves in the compute dtype, packed ones unchanged
    policy: g.Policy  # of the same module
    engine: Engine  # samples with these weights
    tokenizer: TokenizerWrapper
    decoder: TextDecoder
    path: Path  # the folder it was loaded from
    eos_ids: tuple[int, ...]
    prompt: PromptSettings | None  # prompt format used in training; None: unknown or not read
    notices: tuple[str, ...]
    vision: VisionPart | None = None  # the vision part, if requested

    def check(self, prompts: Sequence[Sequence[int]], most: int) -> None:
        """See `check_prompts`."""
        check_prompts(str(self.path), prompts, most, self.policy.vocabulary, self.policy.positions)

    def example(
        self,
        messages: Sequence[Message],
        *,
        columns: Mapping[str, Any] = NO_KWARGS,
        images: Sequence[ImageFile] = (),
        most: int = 1,
        nudge: str = "",
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        raw: bool = False,
    ) -> Example:
        """Creates a prompt. For `nudge`, `tools`, `template_kwargs` and `raw`, see `render`.

        `columns` are passed to an environment. At most `most` tokens follow the prompt. Raises the
        errors of `check`.
        """
        text, tokens = render(
            self.tokenizer,
            messages,
            nudge,
            tools=tools,
            template_kwargs=template_kwargs,
            images=images,
            processor=self.vision.processor if self.vision else None,
            raw=raw,
        )
        self.check([tokens], most)
        return Example(
            tuple(messages),
            text,
            tokens,
            "",
            dict(columns),
            tuple(images),
            opening=opening(self.tokenizer, template_kwargs, raw=raw),
        )


def load_inference(
    model: str,
    platform: Platform,
    *,
    adapter: str = "",
    dtype: str = "auto",
    loader: str = "",
    folders: Sequence[Path] = (),
    trust_remote_code: bool = False,
    with_prompt: bool = False,
    images: bool = False,
    image_max_pixels: int = 0,
) -> InferenceModel:
    """Loads a model from a folder, a Hub name or "embedded". For a folder of adapters, the base
    model is also loaded.

    Args:
        model: as `model.path` in a config, a folder of adapters whose adapter_config.json names the
            base model, or a run's folder (its final model or, without one, its newest complete
            checkpoint).
        adapter: a folder that contains adapters, which are applied to the model.
        loader, folders: the function that loads the folder instead of mlx-lm, and the folders in
            which this function is looked up.
        with_prompt: whether grpo_prompt.json, if it exists, is read into the result's `prompt`.
        images: whether prompts may have images.

    Raises the errors of `load_model`, and UserError if adapters are missing or do not fit the
    model.
    """
    notes: list[str] = []
    function = custom_loader(loader, folders, "--loader")
    path, adapters = find_model(model, adapter, notes.append, custom_loader=function is not None)
    prompt = prompt_settings_of(path, adapters) if with_prompt else None
    if images:
        family = check_family(read_json(path / "config.json"), path)
        mlx_vlm_module(f"models.{family}")  # before reading weights for minutes
    module, _, tokenizer, notices = read_model(path, trust_remote_code, function)
    if adapters is not None:
        read_adapters(module, adapters, path)
        own = adapters / TEMPLATE_FILE
        if own.is_file() and own.read_text(encoding="utf-8") != tokenizer.chat_template:
            check_tokenizer(adapters)
            use_template(tokenizer, str(own))
    module.freeze()
    module.eval()
    keep_model_resident()
    compute_dtype = choose_dtype(dtype, platform, module)
    cast_floating(module, compute_dtype)
    mx.async_eval(module.parameters())  # while the policy inspects the model
    vision = prepare_vision(module, path, compute_dtype, image_max_pixels) if images else None
    # On a CPU, checking which rows have ended is free and saves their remaining steps.
    is_async = usual_launch(platform) == "async"
    decoding = g.Decoding(pipelined=is_async, check_every=8 if is_async else 1)
    policy = g.Policy.for_inference(module)
    decoder = TextDecoder(tokenizer)
    engine = LocalEngine(decoder, decoding)
    engine.load(Weights(policy, {}, 0))  # the weights are in the module
    mx.eval(module.parameters())
    return InferenceModel(
        module=module,
        policy=policy,
        engine=engine,
        tokenizer=tokenizer,
        decoder=decoder,
        path=path,
        eos_ids=tuple(sorted(tokenizer.eos_token_ids)),
        prompt=prompt,
        notices=(*notes, *notices),
        vision=vision,
    )


def find_model(
    model: str,
    adapter: str = "",
    note: Callable[[str], None] = lambda line: None,
    *,
    custom_loader: bool = False,
) -> tuple[Path, Path | None]:
    """Returns a model's folder, and the folder with its adapters, if any. The model is named as for
    `load_inference`.
    """
    named = Path(model_of_run(model, note)).expanduser()
    adapters = Path(adapter).expanduser() if adapter else None
    source = str(named) if named.exists() else model
    if is_adapter_folder(named):
        adapters = named
    if adapters is not None:
        check_adapters(adapters)  # before a download, and before reading weights for minutes
    if adapters == named:
        if adapter:
            raise UserError(
                f"{model} contains adapters, and {adapter} is also given; expected only one of them"
            )
        source = base_of(named)
    return resolve_model(source, "MODEL", custom_loader=custom_loader), adapters


def prompt_settings_of(path: Path, adapters: Path | None) -> PromptSettings | None:
    """Returns the prompt format that was used to train a model. The format is read from the
    adapters, which were trained last, or else from the model's folder.
    """
    return (read_prompt(adapters) if adapters is not None else None) or read_prompt(path)
