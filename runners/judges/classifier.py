"""A judge from a folder: a decoder with a head for scores or labels, as transformers saves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

import grpo_fn as g
from runners.config.sections import JudgeConfig
from runners.errors import Failure, UserError, did_you_mean, error_line, is_out_of_memory, listed, show
from runners.files.json_files import read_json
from runners.files.tensor_header import check_header
from runners.models.dtypes import cast_floating
from runners.models.folders import resolve_model
from runners.models.model_reader import check_finite, load_tokenizer
from runners.models.rope_keys import with_rope_keys
from runners.tokenization.text import encode

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_HEADS = ("score.weight", "classifier.weight", "v_head.weight")
_BUCKET = 32  # tokens: rows are padded to a multiple of it


@attrs.frozen(eq=False)
class _Model:
    policy: g.Policy
    head_kd: mx.array  # K labels or scores
    bias_k: mx.array | None
    column: int | None  # the label whose probability counts; None: the one score as it is
    tokenizer: TokenizerWrapper


@attrs.define(eq=False)
class ClassifierJudge:
    """Called like a reward, in the run's own thread, where MLX's arrays can be computed."""

    name: str
    settings: JudgeConfig
    _model: _Model | None = attrs.field(init=False, default=None)

    def load(self) -> None:
        """Reads the folder. Raises UserError if it is not a usable classifier."""
        if self._model is None:
            self._model = _load(self.name, self.settings)

    def __call__(
        self,
        *,
        completions: Sequence[Sequence[Mapping[str, str]]],
        prompts: Sequence[Sequence[Mapping[str, Any]]],
    ) -> list[float | Failure]:
        """The score, or the label's probability, of each conversation that ends with the completion."""
        self.load()
        assert self._model is not None
        rows = [
            self._tokens([*prompt, dict(completion[0])])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        positions, most = self._model.policy.positions, f"judge.{self.name}.max_length"
        limit = self.settings.max_length
        if positions is not None and positions < limit:
            limit, most = positions, f"{positions:,}"
        verdicts: list[float | Failure] = [
            Failure(f"reads {most} tokens at most", f"{len(row):,} tokens") for row in rows
        ]
        fitting = [i for i, row in enumerate(rows) if len(row) <= limit]
        for part in _batches(rows, fitting, self.settings.batch_tokens):
            for i, value in zip(part, _scores(self._model, [rows[i] for i in part]), strict=True):
                verdicts[i] = value
        return verdicts

    def _tokens(self, conversation: list[Mapping[str, Any]]) -> list[int]:
        assert self._model is not None
        tokenizer = self._model.tokenizer
        templated = bool(tokenizer.has_chat_template)
        if templated:
            try:
                text = tokenizer.apply_chat_template(conversation, tokenize=False)
            except Exception as error:  # the template is foreign code
                raise UserError(
                    f"judge.{self.name}.path: its chat template fails: {error_line(error)}"
                ) from error
        else:
            text = "\n\n".join(str(message["content"]) for message in conversation)
        return list(encode(tokenizer, text, add_special_tokens=not templated)) or [0]


def _load(name: str, settings: JudgeConfig) -> _Model:
    from mlx_lm import utils

    path = resolve_model(settings.path, key=f"judge.{name}.path")
    where = f"judge.{name}.path: {path}"
    stated = read_json(path / "config.json")
    weights: dict[str, mx.array] = {}
    for file in sorted(path.glob("model*.safetensors")):
        check_header(file)
        weights |= cast(dict[str, mx.array], mx.load(str(file)))
    heads = [head for head in _HEADS if head in weights]
    if not heads:
        kinds = listed([str(kind) for kind in stated.get("architectures") or ["none"]])
        raise UserError(
            f"{where}: found no {' or '.join(_HEADS)} in its weights (architectures: {kinds}), want a "
            "reward model or classifier that transformers saved as ...ForSequenceClassification"
        )
    weights.pop("lm_head.weight", None)
    head, bias = weights.pop(heads[0]), weights.pop(heads[0].replace("weight", "bias"), None)
    try:
        # Tied, so that no language-model head is made, which a verdict does not use.
        config = with_rope_keys(utils.load_config(path)) | {"tie_word_embeddings": True}
        model_class, args_class = utils._get_classes(config)
        module = model_class(args_class.from_dict(config))
        weights = module.sanitize(weights) if hasattr(module, "sanitize") else weights
        quantization = config.get("quantization")
        if isinstance(quantization, dict):
            nn.quantize(
                module,
                **quantization,
                class_predicate=lambda key, layer: (
                    hasattr(layer, "to_quantized") and f"{key}.scales" in weights
                ),
            )
        module.load_weights(list(weights.items()), strict=False)
    except Exception as error:  # mlx-lm's module may fail in any way for an untrusted config
        if is_out_of_memory(error):
            raise
        raise UserError(f"{where}: the model cannot be loaded: {error_line(error)}") from error
    _check_complete(module, weights, where)
    if head.shape[-1] != _width(module):
        raise UserError(
            f"{where}: {heads[0]} has the shape {list(head.shape)}, want [labels, {_width(module)}]"
        )
    tokenizer = load_tokenizer(path)
    module.eval()
    module.freeze()
    if mx.default_device() == mx.cpu:
        cast_floating(module, mx.float32)  # 16 bits are computed slowly there
    check_finite({"head": head} | weights, path)
    mx.eval(module.parameters(), head)
    column = _column(name, settings.label, stated, head.shape[0])
    return _Model(g.Policy.for_inference(module), head, bias, column, tokenizer)


def _check_complete(module: nn.Module, weights: Mapping[str, mx.array], where: str) -> None:
    """Raises UserError unless the file has every weight of the module but the language-model head's."""
    from mlx.utils import tree_flatten

    wanted = {name for name, _ in tree_flatten(module.parameters())}
    missing = [name for name in sorted(wanted - set(weights)) if "lm_head" not in name.split(".")]
    unknown = sorted(set(weights) - wanted)
    if missing or unknown:
        what = f"lacks {listed(missing)}" if missing else f"has {listed(unknown)} besides"
        raise UserError(f"{where}: the file {what}, which does not fit its config.json")


def _width(module: nn.Module) -> int:
    tables = [
        layer
        for _, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding)
    ]
    one = tables[0](mx.array([0]))  # only its shape: nothing is computed
    return one.shape[-1]


def _column(name: str, label: str, config: Mapping[str, Any], heads: int) -> int | None:
    key = f"judge.{name}.label"
    labels = [str((config.get("id2label") or {}).get(str(i), f"LABEL_{i}")) for i in range(heads)]
    if heads == 1 and not label:
        return None
    if heads == 1:
        raise UserError(f"{key}: found {show(label)}, but the model gives one score, want no label")
    if label not in labels:
        found = f"found {show(label)}" if label else "missing"
        raise UserError(
            f"{key}: {found}, want one of {listed(labels)}{did_you_mean(label, labels) if label else ''}"
        )
    return labels.index(label)


def _batches(rows: Sequence[Sequence[int]], chosen: Sequence[int], tokens: int) -> list[list[int]]:
    """Groups rows of similar length: at most `tokens` tokens with padding, at least one row."""
    batches: list[list[int]] = []
    for i in sorted(chosen, key=lambda i: len(rows[i])):
        if batches and (len(batches[-1]) + 1) * _padded(len(rows[i])) <= tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _padded(length: int) -> int:
    return -(-length // _BUCKET) * _BUCKET


def _scores(model: _Model, rows: Sequence[Sequence[int]]) -> list[float]:
    """For each row the head at its last token. Attention only looks back: padding after it has no effect."""
    width = _padded(max(map(len, rows)))
    tokens_bl = mx.array([[*row, *[0] * (width - len(row))] for row in rows])
    hidden_bld = model.policy.hidden(model.policy.params, tokens_bl)
    last_bd = hidden_bld[mx.arange(len(rows)), mx.array([len(row) - 1 for row in rows])]
    logits_bk = last_bd.astype(mx.float32) @ model.head_kd.astype(mx.float32).T
    if model.bias_k is not None:
        logits_bk = logits_bk + model.bias_k.astype(mx.float32)
    values_b = logits_bk[:, 0] if model.column is None else mx.softmax(logits_bk, axis=-1)[:, model.column]
    return np.array(values_b).tolist()
