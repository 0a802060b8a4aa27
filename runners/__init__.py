"""The shell around grpo_fn: every file, clock, process and terminal that a training run touches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_fn import __version__
else:

    def __getattr__(name: str) -> str:
        """`__version__` is grpo_fn's. It is read at its first use, as that import loads the BLAS."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from grpo_fn import __version__

        return __version__


__all__ = ["__version__"]
