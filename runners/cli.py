"""Defines the command line `grpo-run CONFIG`, which is the same as `grpo run CONFIG`.

Only click is imported before a command runs, so that --help is fast.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from runners.commands.base import HELP, LazyGroup, command, ends_with_a_line, flag, option
from runners.commands.options import SET, echo_all, open_config
from runners.errors import UserError, show
from runners.machine.signals import Stopped, StopSignals, to_stderr
from runners.machine.terminal import echo, echo_output, echo_text
from runners.ranks.rank_place import (
    RankPlace,
    let_launcher_sleep,
    read_rank_place,
    share_cores,
)

COMMANDS = {
    "run": "runners.cli:run_command",
    "sft": "runners.cli:sft_command",
    "plan": "runners.commands.check:plan_command",
    "bench": "runners.commands.check:bench_command",
    "init": "runners.commands.init:init_command",
    "check": "runners.commands.check:check_command",
    "difficulty": "runners.commands.check:difficulty_command",
    "runs": "runners.commands.report:runs_command",
    "generate": "runners.commands.generate:generate_command",
    "chat": "runners.commands.generate:chat_command",
    "serve": "runners.commands.serve:serve_command",
    "convert": "runners.commands.conversion:convert_command",
    "export": "runners.commands.conversion:export_command",
    "eval": "runners.commands.eval:eval_command",
    "report": "runners.commands.report:report_command",
    "watch": "runners.commands.report:watch_command",
    "doctor": "runners.commands.doctor:doctor_command",
}
"""The commands of `grpo`: name → module:attribute.

A module imports only click until its command runs.
"""

_LAST = "the last one"  # --resume without a value
_COMPLETION_FILES = {  # where each shell looks for completions; ~/.zshrc must name zsh's file
    "bash": ".local/share/bash-completion/completions/grpo",
    "fish": ".config/fish/completions/grpo.fish",
    "zsh": ".local/share/zsh/grpo-completion.zsh",
}
VERSION = click.version_option(
    package_name="grpo_fn", prog_name="grpo_fn", help="Show the version."
)


def _explain(context: click.Context, _: click.Parameter, key: str | None) -> None:
    if key and not context.resilient_parsing:
        from runners.config.loading import explain

        echo_text(ends_with_a_line(explain)(key))
        context.exit()


@command(
    "run",
    click.argument("config"),
    SET,
    option(
        "--resume=[CHECKPOINT]",
        "Resume from the last complete checkpoint in the run's folder, or from CHECKPOINT.",
        is_flag=False,
        flag_value=_LAST,
    ),
    flag(
        "--allow-config-change",
        "With --resume: resume although the config, data, rewards or model differ.",
    ),
    flag(
        "--overwrite",
        "Start over if the folder contains a run, even an interrupted one; deletes its checkpoints.",
    ),
    flag(
        "--dry-run",
        "Print the resolved config, write it to OUTPUT_DIR/NAME/config.resolved.json, and stop.",
    ),
    option(
        "--explain=KEY",
        "Show what a config key such as optim.eps means, or all keys of a section, and exit.",
        is_eager=True,
        expose_value=False,
        callback=_explain,
    ),
    VERSION,
    notes="""\
\b
Examples:
  grpo-run quickstart                              train the shipped model in about a minute
  grpo-run train.toml                              use your own config
  grpo-run train.toml --set optim.learning_rate=2e-6 --set run.name=hotter
  grpo-run train.toml --set 'rollout.stop=["</answer>"]' --dry-run
  grpo-run train.toml --resume                     resume from the last complete checkpoint

\b
Exit codes:
  0    done
  2    the config, the data, the model or the disk must be changed
  3    too many updates had NaN or infinite values
  130, 143, 129  stopped by Ctrl-C, SIGTERM or SIGHUP: the first signal saves the last finished step, a
       second one quits immediately
  141  saved and stopped, because the output was closed
""",
)
def run_command(config: str, overrides: Sequence[str], resume: str | None, **flags: bool) -> None:
    """Fine-tune a language model with GRPO.

    CONFIG is a TOML file, or the name of a packaged preset such as quickstart. MLX-GRPO's TOML files work
    unchanged.
    """
    overwrite = flags["overwrite"]
    allowed = flags["allow_config_change"]
    if resume is not None and overwrite:
        raise click.UsageError(
            "--resume and --overwrite cannot be combined: either resume the run or start over."
        )
    if resume is None and allowed:
        raise click.UsageError("--allow-config-change requires --resume.")
    named = [resume] if resume and resume != _LAST else []
    origin = Path(named[0]).expanduser() if named else resume is not None
    let_launcher_sleep()
    place = read_rank_place()
    leads = place is None or place.rank == 0
    if flags["dry_run"]:
        if leads:
            from runners.config.loading import write_resolved

            resolved = open_config(config, overrides)[0]
            echo_output(resolved.to_toml(), nl=True)
            echo(f"written to {write_resolved(resolved)}", err=True)
        return
    command = _command()
    try:
        with (
            StopSignals(to_stderr if leads else lambda text: None) as signals,
            ExitStack() as stack,
        ):
            if place:
                stack.callback(signals.ignore_launcher)
            _run(
                config,
                overrides,
                place,
                signals,
                resume=origin,
                allow_config_change=allowed,
                overwrite=overwrite,
            )
    except Stopped as stopped:
        same = ["--overwrite"] if overwrite else []
        same += [] if resume is None else ["--resume", *named]
        same += ["--allow-config-change"] if allowed else []
        again = f"{command} {shlex.join(['--resume'] if stopped.begun else same)}".strip()
        stopped.advice = stopped.advice or f"to continue: {again}"
        raise


def _sft(overrides: Sequence[str], **options: Any) -> None:
    assert run_command.callback is not None
    run_command.callback(overrides=(*overrides, "sft.only=true"), **options)


sft_command = click.Command(
    "sft",
    callback=_sft,
    params=run_command.params,
    context_settings=HELP,
    help="""Fine-tune on reference completions.

    Runs only the supervised updates of [sft]; `grpo run` continues with GRPO. CONFIG and the options are the
    same as for `grpo run`. The completions come from data.completion or sft.completions.
    """,
)


@ends_with_a_line
def install_completion(command: click.Command) -> None:
    """Writes click's completion script for the shell in $SHELL, and prints its path.

    Raises UserError for any other shell, or if the file cannot be written.
    """
    from click.shell_completion import get_completion_class

    from runners.files.durable import save_text

    shell = Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(shell) if shell in _COMPLETION_FILES else None
    if kind is None:
        raise UserError(f"SHELL: expected bash, fish or zsh, found {show(shell)}")
    file = Path.home() / _COMPLETION_FILES[shell]
    save_text(file, kind(command, {}, "grpo", "_GRPO_COMPLETE").source())
    then = f"; add to ~/.zshrc: source {file}" if shell == "zsh" else "; open a new shell to use it"
    echo(f"{file}: written{then}")


def _install_completion(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        install_completion(context.command)
        context.exit()


@click.group(cls=LazyGroup, commands=COMMANDS, context_settings=HELP)
@VERSION
@click.option(
    "--install-completion",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_install_completion,
    help="Install Tab completion of commands and options for bash, fish or zsh.",
)
def main() -> None:
    """GRPO fine-tuning of language models on Apple's MLX."""


def _command() -> str:
    """Returns this run's command as it was called, without its other options."""
    context = click.get_current_context()
    program = context.command_path
    name = program.split()[0]
    if Path(sys.argv[0]).name == name and shutil.which(name) is None:
        program = sys.argv[0] + program.removeprefix(name)  # as in .venv/bin/grpo-run
    if "MLX_RANK" in os.environ:
        program = f"mlx.launch ... {program}"
    words = [context.params["config"]]
    for override in context.params["overrides"]:
        words += ["--set", override]
    return f"{program} {shlex.join(words)}"


def _run(
    name: str,
    overrides: Sequence[str],
    place: RankPlace | None,
    signals: StopSignals,
    *,
    resume: Path | bool,
    allow_config_change: bool,
    overwrite: bool,
) -> None:
    from runners.config.loading import load_config
    from runners.machine import startup

    if place:
        share_cores(place, os.environ)
        startup.separate_programs(place.rank, os.environ)
    try:
        found = load_config(name, overrides)
    except UserError as error:
        if place is None:
            raise
        found = error  # reported to the other ranks once all ranks have connected
    notices = startup.prepare().notices  # the BLAS must be loaded before anything imports MLX

    from runners.ranks.ranks import Ranks
    from runners.training.train import run_training

    if isinstance(found, UserError):
        ranks = Ranks(place, signals=signals)
    else:
        ranks = Ranks(place, signals=signals, timeout=found.system.collective_timeout)
    with ranks.ending_together():
        if isinstance(found, UserError):
            raise found
        echo_all((*found.notices, *notices) if ranks.is_rank_zero else ())
        run_training(
            found,
            resume=resume,
            allow_config_change=allow_config_change,
            overwrite=overwrite,
            ranks=ranks,
            signals=signals,
        )


if __name__ == "__main__":
    main()
