"""Functions that start processes, on several threads: each process has its own folder of compiled programs.

MLX writes the programs that it compiles for CUDA in place, and reads whatever it finds: of two processes that
compile the same one, the second may run half of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    function: Callable[[Item, dict[str, str]], Result], items: Sequence[Item], jobs: int
) -> list[Result]:
    """The results of `function(item, environment)` for each item, computed by `jobs` threads.

    The environment is for the processes that the function starts. With it products of float32 are products
    in float32 on CUDA, and MLX begins with the programs that earlier processes have compiled.
    """
    with tempfile.TemporaryDirectory() as parent, ThreadPoolExecutor(jobs) as pool:
        finished = Path(parent) / "finished"

        def computed(item: Item) -> Result:
            own = tempfile.mkdtemp(dir=parent)
            _link_programs(finished, Path(own))
            environment = {"MLX_ENABLE_TF32": "0", "MLX_PTX_CACHE_DIR": own}
            result = function(item, os.environ | environment)
            _link_programs(Path(own), finished)
            return result

        return [*pool.map(computed, items)]


def _link_programs(source: Path, target: Path) -> None:
    """Links the programs that the target lacks; MLX writes a program's source last, and reads its code first."""
    whole = (path for path in source.rglob("*.cu") if path.stat().st_size)
    for path in (program.with_suffix(suffix) for program in whole for suffix in (".cu", ".txt", ".ptx")):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.link(path, place)
