"""Precompiles the C++ header that is included in every program that MLX compiles for a CPU.

MLX (0.32) generates a program for each chain of elementwise operations, and g++ needs almost a
second to compile it. Three quarters of that time are spent on a header that all programs include,
and the first update requires about ninety programs. g++ first looks for that header next to the
program, and uses its compiled form if it exists. The programs are in a temporary folder, and so is
the compiled header.

MLX uses only the vector instructions that every x86-64 processor has, which process four numbers at
a time. The compiled form processes eight if the processor supports AVX2, but without fused
products, so that the results stay the same.

Importing this module does not import MLX.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from runners.machine.versions import installed_version

if TYPE_CHECKING:
    from runners.machine.startup import Platform

HEADER = Path("mlx/backend/cpu/compiled_preamble.h")
# MLX's own options; without the last one, g++ rejects the file
_OPTIONS = ("-std=c++17", "-O3", "-Wall", "-fPIC")
# The shell continues even if this process ends, and leaves a complete file or none.
_SHELL = """\
( "$@" "$PART.h" && mv "$PART" "$WHOLE"
rm -f "$PART" "$PART.h" ) </dev/null >/dev/null 2>&1 &
"""


def programs_folder() -> Path:
    """Returns the folder where MLX stores its programs for a CPU."""
    named = filter(None, map(os.environ.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR")))
    return Path(next(named, "/tmp")) / "mlx" / (installed_version("mlx") or "") / "cpu"


def compile_header(platform: Platform) -> Path | None:
    """Starts compiling the header if necessary. Returns the path of the compiled file, or None if
    the header is not compiled on this machine.

    Each version of g++ uses its own file and ignores the others.
    """
    compiler = shutil.which("g++")
    if platform.backend != "cpu" or sys.platform != "linux" or not compiler:
        return None
    import mlx.core as mx

    from grpo_fn.backends import enabled, processor_flags

    include = Path(mx.__file__).parent / "include"
    if not enabled("programs_ahead") or not (include / HEADER).is_file():
        return None
    real = Path(compiler).resolve()
    wide = '#pragma GCC target("avx2")' if "avx2" in processor_flags() else ""
    text = f'#include "{include / HEADER}"\n{wide}\n'
    mark = f"{zlib.crc32(f'{real} {real.stat().st_mtime_ns} {text}'.encode()):08x}"
    whole = programs_folder() / f"{HEADER}.gch" / mark
    # One file per call: concurrent calls each compile their own file, and each file is complete.
    part = programs_folder() / f".{mark}.{secrets.token_hex(6)}"
    try:
        if whole.exists():
            return whole
        whole.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{part}.h").write_text(text, encoding="utf-8")
        options = [*_OPTIONS, "-w", f"-I{include}", "-o", str(part), "-x", "c++-header"]
        subprocess.run(
            ["/bin/sh", "-c", _SHELL, "sh", compiler, *options],
            env={**os.environ, "PART": str(part), "WHOLE": str(whole)},
            start_new_session=True,
            check=False,
        )
    except OSError:  # no space, or another user's folder; MLX compiles as usual
        return None
    return whole
