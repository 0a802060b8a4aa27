"""How far a rollout has come."""

from __future__ import annotations

import time

import mlx.nn as nn

import grpo_fn as g
from grpo_fn.rollout import PREFILL_TOKENS, Column
from runners.engines.engine import Advance, Requests

PAUSE = 0.2  # seconds between two reports


class Meter:
    """Counts prompt tokens until the first token is drawn, then the steps of decoding, all rows at once."""

    def __init__(
        self,
        advance: Advance | None,
        requests: Requests,
        sampling: g.Sampling,
        max_batch: int,
        module: nn.Module,
    ) -> None:
        """`max_batch`, `module`: those of the decoding; without `advance` nothing is reported."""
        together = max(max_batch // sampling.num_generations, 1) if max_batch else len(requests.prompts)
        parts = -(-len(requests.prompts) // together)  # decoded one after the other
        lengths = list(map(len, requests.prompts[:together]))
        # A prefill gives control after each layer of each piece.
        self._pieces = -(-max(lengths) // PREFILL_TOKENS) * max(len(getattr(module, "layers", ())), 1)
        self._prompt_tokens, self._most = sum(lengths), sampling.max_new_tokens
        self._advance, self._total = advance, parts * sampling.max_new_tokens
        self._computed = self._steps = self._before = 0
        self._rows: set[int] = set()  # that are decoded, or were
        self._reported = 0.0

    def count(self, column: Column | None) -> None:
        """Takes what the decoding has given."""
        if column is None:
            self._computed += 1
        elif column.rows[0] in self._rows:
            self._steps += 1
        else:  # the next part
            self._before += self._most if self._rows else 0
            self._rows.update(column.rows)
            self._steps = 1
        now = time.perf_counter()
        if self._advance is None or now < self._reported + PAUSE:
            return
        self._reported = now
        if self._rows:
            self._advance("tokens", self._before + min(self._steps, self._most), self._total)
        else:
            share = min(self._computed / self._pieces, 1.0)
            self._advance("prompt tokens", round(self._prompt_tokens * share), self._prompt_tokens)
