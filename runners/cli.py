"""The command line: `grpo-run CONFIG`, which is also `grpo run CONFIG`.

Only click is imported before a command runs, so that --help answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from runners import __version__
from runners.errors import ConfigError, UserError

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_INTERRUPTED = 130  # 128 + SIGINT, as shells count

_EXAMPLES = """\
\b
Examples:
  grpo-run quickstart                              the shipped model learns in two minutes
  grpo-run train.toml                              a config of your own
  grpo-run train.toml --set optim.learning_rate=2e-6 --set run.name=hotter
  grpo-run train.toml --set 'rollout.stop=["</answer>"]' --dry-run

\b
Exit codes: 0 done, 2 something in the config, the data or the model has to change, 130 interrupted.
"""


@click.command("run", context_settings=_HELP, epilog=_EXAMPLES)
@click.argument("config")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Replace one value of the config; may be given more than once, the last one wins. VALUE is TOML, "
    "and a string needs no quotes.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the resolved config, write it to OUTPUT_DIR/NAME/config.resolved.json, and stop.",
)
@click.version_option(__version__, prog_name="grpo_fn")
def run_command(config: str, overrides: Sequence[str], dry_run: bool) -> None:
    """Fine-tune a language model with GRPO.

    CONFIG is a TOML file, or the name of a packaged preset such as quickstart. MLX-GRPO's TOML files work as
    they are.
    """
    try:
        _run(config, overrides, dry_run)
    except ConfigError as error:
        for problem in error.problems:
            click.echo(problem, err=True)
        sys.exit(2)
    except UserError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(_INTERRUPTED)


@click.group(context_settings=_HELP)
@click.version_option(__version__, prog_name="grpo_fn")
def main() -> None:
    """GRPO fine-tuning of language models on Apple's MLX."""


main.add_command(run_command)


def _run(name: str, overrides: Sequence[str], dry_run: bool) -> None:
    from runners.config import load_config, write_resolved

    config = load_config(name, overrides)
    for notice in config.notices:
        click.echo(notice, err=True)
    if dry_run:
        config = config.check()
        click.echo(config.to_toml())
        click.echo(f"written to {write_resolved(config)}", err=True)
        return

    from runners import platform

    # The BLAS has to be in place before anything imports MLX.
    for notice in platform.prepare(config.system.memory_limit_gb).notices:
        click.echo(notice, err=True)

    from runners.train import run_training

    run_training(config.check())


if __name__ == "__main__":
    main()
