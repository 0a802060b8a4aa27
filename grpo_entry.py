"""The entry point of `grpo` and `grpo-run`, which checks that `runners` is the package that belongs
to grpo_fn.

`runners` is a common name. A different package of that name may be found instead of ours, and a
traceback does not show it. This module is outside the packages, because importing grpo_fn loads
MLX.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

OURS = Path(__file__).resolve().parent / "runners"


def main() -> None:
    """`grpo`."""
    _check_runners()
    from runners.cli import main

    main()


def run_command() -> None:
    """`grpo-run`."""
    _check_runners()
    from runners.cli import run_command

    run_command()


def _check_runners() -> None:
    problem = runners_problem()
    if problem:
        sys.stderr.write(problem + "\n")
        sys.exit(2)


def runners_problem() -> str | None:
    """The reason why `import runners` would not import our package, and what to do, in one line;
    None if it would.
    """
    spec = find_spec("runners")  # imports nothing
    origin = spec.origin if spec else None
    found = Path(origin).resolve() if origin else OURS / "__init__.py"
    if found != OURS / "__init__.py":
        place = found.parent if found.name == "__init__.py" else found
        return (
            f"{place} hides grpo_fn's package runners, which is {OURS}: rename it, take "
            f"{place.parent} off PYTHONPATH, or install grpo_fn into a separate environment"
        )
    return None
