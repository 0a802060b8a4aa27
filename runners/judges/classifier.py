"""A judge from a folder: a decoder with a head for scores or labels, as transformers saves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from grpo_fn.trees import named_leaves
from runners.config.sections import JudgeConfig
from runners.errors import Failure, UserError, did_you_mean, error_line, listed, show
from runners.judges.base import Judge
from runners.models.dtypes import cast_floating
from runners.models.folders import resolve_model
from runners.models.model_reader import check_finite, load_by_mlx_lm, load_tokenizer
from runners.tokenization.text import encode

_HEAD = "score.weight"
_BUCKET = 32  # tokens: rows are padded to a multiple of it


@attrs.frozen(eq=False)
class _Model:
    policy: g.Policy
    head_kd: mx.array  # K labels or scores
    column: int | None  # the label whose probability counts; None: the one score as it is
    tokenizer: Any


@attrs.define(eq=False, slots=False)
class ClassifierJudge(Judge):
    """Called like a reward, in the run's own thread, where MLX's arrays can be computed."""

    name: str
    settings: JudgeConfig
    _model: _Model | None = attrs.field(init=False, default=None)

    def check(self) -> None:
        """Reads the folder. Raises UserError if it is not a usable classifier."""
        self._model = self._model or _load(f"judge.{self.name}", self.settings)

    def __call__(
        self,
        *,
        completions: Sequence[Sequence[Mapping[str, str]]],
        prompts: Sequence[Sequence[Mapping[str, Any]]],
    ) -> list[float | Failure]:
        """The score, or the label's probability, of each conversation that ends with the completion."""
        self.check()
        assert self._model is not None
        model = self._model
        rows = [
            self._tokens(model.tokenizer, [*prompt, dict(completion[0])])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        limit, most = self.settings.max_length, f"judge.{self.name}.max_length"
        if model.policy.positions is not None and model.policy.positions < limit:
            limit, most = model.policy.positions, f"{model.policy.positions:,}"
        verdicts: list[float | Failure] = [
            Failure(f"reads {most} tokens at most", f"{len(row):,} tokens") for row in rows
        ]
        fitting = [i for i, row in enumerate(rows) if len(row) <= limit]
        for part in _batches(rows, fitting, self.settings.batch_tokens):
            for i, value in zip(part, _scores(model, [rows[i] for i in part]), strict=True):
                verdicts[i] = value
        return verdicts

    def _tokens(self, tokenizer: Any, conversation: list[Mapping[str, Any]]) -> list[int]:
        templated = bool(tokenizer.has_chat_template)
        text = "\n\n".join(str(message["content"]) for message in conversation)
        if templated:
            try:
                text = tokenizer.apply_chat_template(conversation, tokenize=False)
            except Exception as error:  # the template is foreign code
                line = error_line(error)
                raise UserError(f"judge.{self.name}.path: its chat template fails: {line}") from error
        return list(encode(tokenizer, text, add_special_tokens=not templated)) or [0]


def _load(judge: str, settings: JudgeConfig) -> _Model:
    path = resolve_model(settings.path, key=f"{judge}.path")
    heads: list[mx.array] = []

    def without_head(model: Any) -> Any:
        class Model(model):
            __module__ = model.__module__

            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                heads.extend(weights.pop(key) for key in (_HEAD,) if key in weights)
                weights.pop("lm_head.weight", None)
                weights = super().sanitize(weights) if hasattr(model, "sanitize") else weights
                own = named_leaves(self.parameters())
                return {key: own[key] for key in own if "lm_head" in key.split(".")} | weights

        return Model

    try:
        # Tied, so that no language-model head is made, which a verdict does not use.
        module, config = load_by_mlx_lm(path, adapt=without_head, tie_word_embeddings=True)
    except UserError as error:
        raise UserError(f"{judge}.path: {error}") from error
    if not heads:
        kinds = listed([str(kind) for kind in config.get("architectures") or ["none"]])
        raise UserError(
            f"{judge}.path: {path}: expected a reward model or classifier that transformers saved as "
            f"...ForSequenceClassification, found no {_HEAD} (architectures: {kinds})"
        )
    head, tables = heads[0], (nn.Embedding, nn.QuantizedEmbedding)
    table = next(layer for _, layer in module.named_modules() if isinstance(layer, tables))
    width = table(mx.array([0])).shape[-1]  # only its shape: nothing is computed
    if head.shape[-1] != width:
        expected = f"expected the shape [labels, {width}], found {list(head.shape)}"
        raise UserError(f"{judge}.path: {path}: its head: {expected}")
    tokenizer = load_tokenizer(path)
    module.eval()
    module.freeze()
    if mx.default_device() == mx.cpu:
        cast_floating(module, mx.float32)  # 16 bits are computed slowly there
    check_finite({"head": head} | named_leaves(module.parameters()), path)
    mx.eval(module.parameters(), head)
    column = _column(f"{judge}.label", settings.label, config, head.shape[0])
    return _Model(g.Policy.for_inference(module), head.astype(mx.float32), column, tokenizer)


def _column(key: str, label: str, config: Mapping[str, Any], heads: int) -> int | None:
    if heads == 1:
        if label:
            raise UserError(f"{key}: expected no label, as the model gives one score, found {show(label)}")
        return None
    labels = [str((config.get("id2label") or {}).get(str(i), f"LABEL_{i}")) for i in range(heads)]
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
    logits_bk = last_bd.astype(mx.float32) @ model.head_kd.T
    column = model.column
    values_b = logits_bk[:, 0] if column is None else mx.softmax(logits_bk, axis=-1)[:, column]
    return values_b.tolist()  # pyright: ignore[reportReturnType]
