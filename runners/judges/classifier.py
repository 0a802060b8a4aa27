"""A judge from a folder: a decoder with a head for scores or labels, as transformers saves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

import grpo_fn as g
from grpo_fn.trees import named_leaves
from runners.config.sections import JudgeConfig
from runners.errors import Failure, UserError, did_you_mean, error_line, listed, show
from runners.judges.base import Judge
from runners.models.dtypes import cast_floating
from runners.models.folders import resolve_model
from runners.models.model_reader import check_finite, load_by_mlx_lm, load_tokenizer
from runners.tokenization.text import encode

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_HEADS = (
    "score.weight",
    "score.bias",
    "classifier.weight",
    "classifier.bias",
    "v_head.weight",
    "v_head.bias",
)
_BUCKET = 32  # tokens: rows are padded to a multiple of it


@attrs.frozen(eq=False)
class _Model:
    policy: g.Policy
    head_kd: mx.array  # K labels or scores
    bias_k: mx.array | None
    column: int | None  # the label whose probability counts; None: the one score as it is
    tokenizer: TokenizerWrapper


@attrs.define(eq=False, slots=False)
class ClassifierJudge(Judge):
    """Called like a reward, in the run's own thread, where MLX's arrays can be computed."""

    name: str
    settings: JudgeConfig
    _model: _Model | None = attrs.field(init=False, default=None)

    def check(self) -> None:
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
        self.check()
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
    path = resolve_model(settings.path, key=f"judge.{name}.path")
    where = f"judge.{name}.path: {path}"
    heads: dict[str, mx.array] = {}

    def without_head(model: Any) -> Any:
        class Model(model):
            __module__ = model.__module__

            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                heads.update({key: weights.pop(key) for key in _HEADS if key in weights})
                weights.pop("lm_head.weight", None)
                weights = super().sanitize(weights) if hasattr(model, "sanitize") else weights
                own = named_leaves(self.parameters())
                return {key: own[key] for key in own if "lm_head" in key.split(".")} | weights

        return Model

    try:
        # Tied, so that no language-model head is made, which a verdict does not use.
        module, config = load_by_mlx_lm(path, adapt=without_head, tie_word_embeddings=True)
    except UserError as error:
        raise UserError(f"judge.{name}.path: {error}") from error
    head = next((heads[key] for key in _HEADS if key in heads and key.endswith("weight")), None)
    bias = next((heads[key] for key in _HEADS if key in heads and key.endswith("bias")), None)
    if head is None:
        kinds = listed([str(kind) for kind in config.get("architectures") or ["none"]])
        raise UserError(
            f"{where}: expected a reward model or classifier that transformers saved as "
            f"...ForSequenceClassification, found no {' or '.join(_HEADS[::2])} (architectures: {kinds})"
        )
    if head.shape[-1] != _width(module):
        shape = list(head.shape)
        raise UserError(f"{where}: its head: expected the shape [labels, {_width(module)}], found {shape}")
    tokenizer = load_tokenizer(path)
    module.eval()
    module.freeze()
    if mx.default_device() == mx.cpu:
        cast_floating(module, mx.float32)  # 16 bits are computed slowly there
    check_finite({"head": head} | named_leaves(module.parameters()), path)
    mx.eval(module.parameters(), head)
    column = _column(name, settings.label, config, head.shape[0])
    return _Model(g.Policy.for_inference(module), head, bias, column, tokenizer)


def _width(module: nn.Module) -> int:
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    table = next(layer for _, layer in module.named_modules() if isinstance(layer, kinds))
    return table(mx.array([0])).shape[-1]  # only its shape: nothing is computed


def _column(name: str, label: str, config: Mapping[str, Any], heads: int) -> int | None:
    key = f"judge.{name}.label"
    labels = [str((config.get("id2label") or {}).get(str(i), f"LABEL_{i}")) for i in range(heads)]
    if heads == 1 and not label:
        return None
    if heads == 1:
        raise UserError(f"{key}: expected no label, as the model gives one score, found {show(label)}")
    if label not in labels:
        found = show(label) + did_you_mean(label, labels) if label else "none"
        raise UserError(f"{key}: expected one of {listed(labels)}, found {found}")
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
