"""What every judge is, besides a function that is called like a reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any


class Judge:
    """A model that rewards completions."""

    if TYPE_CHECKING:
        __call__: Callable[..., Any]
    grouped = False  # whether it takes the number of completions of a prompt, as `group_size`

    def check(self) -> None:
        """Raises UserError if it cannot judge: no server, no weights, no key."""

    def take_notices(self) -> list[str]:
        """Lines on faults besides the verdicts, each once."""
        return []
