"""A run from its config, or from a checkpoint, to its final model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import attrs

from grpo_fn.backends import disabled  # import this before MLX: it loads the BLAS
from runners.checkpoints.disk_room import disk_room
from runners.checkpoints.resume import (
    Origin,
    check_differences,
    check_free,
    data_digest,
    decisions,
    differences,
    earlier_decisions,
    find_origin,
)
from runners.checkpoints.run_folder import clear, locked, set_aside
from runners.checkpoints.run_inputs import check_inputs, run_inputs, tell_differences
from runners.checkpoints.saving import NoSaver, Saver
from runners.config.loading import Config, write_resolved
from runners.config.sections import LogConfig
from runners.environments.own_code import start_worker
from runners.machine import startup
from runners.machine.arithmetic import arithmetic_facts
from runners.machine.signals import Stopped, StopSignals
from runners.ranks.rank_place import read_rank_place
from runners.ranks.ranks import Ranks
from runners.report import final_report
from runners.telemetry.dashboards import check_dashboards_installed
from runners.telemetry.diary import Diary, start_facts
from runners.telemetry.events import Table
from runners.telemetry.log import MetricsLog
from runners.telemetry.report import Report, Silent, make_report
from runners.training.loop import Loop, RunResult
from runners.training.loop_state import LoopState
from runners.training.restoring import check_alike, restore, share_start
from runners.training.setup import Run, build_run
from runners.user_code.worker import Worker

__all__ = ["RunResult", "run_training"]


def run_training(
    config: Config,
    *,
    report: Report | None = None,
    resume: Path | bool = False,
    allow_config_change: bool = False,
    overwrite: bool = False,
    ranks: Ranks | None = None,
    signals: StopSignals | None = None,
) -> RunResult:
    """Train as the config says; everything is written to OUTPUT_DIR/NAME.

    Args:
        config: see `load_config`.
        report: the display; by default the terminal.
        resume: continue from the last whole checkpoint of the run's folder (True), or from the one in this
            folder. A run without a checkpoint starts over.
        allow_config_change: continue even if keys differ on which the weights depend.
        overwrite: start over even if the folder holds an interrupted run, and remove its checkpoints.
            run.overwrite replaces only a finished run.
        ranks: those that share the run; by default all that `mlx.launch` has started, including this
            process. Rank 0 has the folder and the display.
        signals: those that stop the run, already active; None: SIGINT, SIGTERM and SIGHUP while it runs.

    Raises UserError or ConfigError for bad input, before the first step. After the state is saved, raises
    Stopped (a KeyboardInterrupt) after SIGINT, SIGTERM or SIGHUP, OutputLost if the display can no longer be
    written, and NumbersError if too many updates in a row were skipped.
    """
    how = {"resume": resume, "allow_config_change": allow_config_change, "overwrite": overwrite}
    with ExitStack() as stack:
        signals = signals or stack.enter_context(StopSignals())
        worker = stack.enter_context(closing(start_worker(config)))
        machine = startup.prepare(config.system.memory_limit_gb)
        if ranks is None:  # else their owner ends them
            ranks = Ranks(read_rank_place(), signals=signals)
            stack.enter_context(ranks.ending_together())
        return _train(config, machine, ranks, signals, report, worker, **how)


def _train(
    config: Config,
    machine: startup.Platform,
    ranks: Ranks,
    signals: StopSignals,
    report: Report | None,
    worker: Worker,
    *,
    resume: Path | bool,
    allow_config_change: bool,
    overwrite: bool,
) -> RunResult:
    config = config.check()
    ranks.wait_for(config.system.collective_timeout)
    check_dashboards_installed(config.log)
    folder = Path(config.run.output_dir) / config.run.name
    where = config.where("run.name")
    written = config if ranks.is_rank_zero else _writing_nothing(config)
    with ExitStack() as stack:
        stack.enter_context(disabled(*config.system.disable))
        if ranks.is_rank_zero:
            report = report or make_report(every=config.log.every)
        else:  # this rank's files go into a temporary folder
            report, resume, overwrite = Silent(), False, True
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-rank-")))
        shown = stack.enter_context(Diary(report, whole=signals.deferred))
        stack.enter_context(signals.shown_by(ranks.alert(shown.alert)))
        held = stack.enter_context(locked(folder, where))
        wanted = stack.enter_context(final_report(held, written.log, shown.note))
        origin = None
        if resume is not False:
            origin = find_origin(folder, None if resume is True else resume, shown.note)
        elsewhere = origin and origin.folder.resolve().parent != folder.resolve()
        if not overwrite and (resume is False or elsewhere):
            check_free(folder, where, replace_finished=config.run.overwrite)
        known = None
        if origin is not None:
            found = differences(config, origin)
            if found:
                shown.handle(Table(f"the config, against {origin.folder}", ("key", "was", "is"), found))
            if not allow_config_change:
                check_differences(found, origin)
            known = earlier_decisions(config, origin)
        run, at = _build(config, machine, ranks, shown, known, worker), LoopState()
        state = run.learner.state
        data, rewards = run.data, run.collector.scorer.rewards
        inputs = run_inputs(run.config, run.loaded, data.train, data.evaluation, rewards)
        computing = arithmetic_facts(machine)
        if origin is not None:
            if not allow_config_change:
                check_inputs(inputs, origin)
            shown.status("loading the checkpoint")
            state, at = restore(run, origin, changed=allow_config_change)
            shown.note(f"resuming from {origin.folder}: batch step {at.batch_step}, update {at.update}")
            tell_differences(inputs, computing, origin, shown.note)
        check_alike(ranks, run, inputs)
        state, at, origin = share_start(ranks, run, origin, state, at)
        anew = origin is None or origin.folder.resolve().parent != folder.resolve()
        room, scarce = None, []
        if ranks.is_rank_zero:
            room = disk_room(folder, run.learner.outline or state, run.loaded)
            left = run.length.batch_steps - at.batch_step
            scarce = room.check_start(config.checkpoint, where, batch_steps=left, anew=anew)
        keep = _make_room(held.here(), origin, shown)
        if ranks.is_rank_zero:
            write_resolved(run.config)
        for notice in (*run.notices, *scarce):
            shown.note(notice)
        facts = {
            "config": config.to_dict(),
            "decided": decisions(run.config),
            "data": data_digest(run.data.train),
            "inputs": inputs,
            "arithmetic": computing,
        }
        settings = run.config if ranks.is_rank_zero else _writing_nothing(run.config)
        saver_type = Saver if ranks.is_rank_zero else NoSaver
        wanted.append(True)  # from now on there is something to report
        with (
            MetricsLog(
                folder,
                settings.log,
                name=settings.run.name,
                config=settings.to_dict(),
                keep=keep,
                update=at.update,
            ) as log,
            saver_type(held, settings.checkpoint, log.names, shown.note, room) as saver,
        ):
            # Otherwise the first weights and moments would stay in memory beside the current ones.
            run = attrs.evolve(run, learner=attrs.evolve(run.learner, state=None))
            shown.open(log.event, start_facts(settings, machine))
            loop = Loop(run, state, at, folder=held, log=log, report=shown, saver=saver, facts=facts)
            del state
            if origin is not None:
                loop.restore(origin.facts)

            def save(number: int) -> bool:
                saved = loop.save_now()
                shown.end(Stopped(number))
                return saved

            with shown.ending(), signals.saved_by(save):
                return loop.run_to_end()


def _build(
    config: Config,
    machine: startup.Platform,
    ranks: Ranks,
    shown: Diary,
    known: Mapping[str, Any] | None,
    worker: Worker,
) -> Run:
    """The run of this rank; rank 0 decides what depends on a measurement."""
    if ranks.is_alone:
        return build_run(config, machine, shown.status, known, ranks=ranks, worker=worker)
    if ranks.is_rank_zero:
        run = build_run(config, machine, shown.status, known, ranks=ranks, worker=worker)
        ranks.all_gather_object("the decisions", decisions(run.config))
    else:
        run = build_run(
            config,
            machine,
            shown.status,
            lambda: ranks.all_gather_object("the decisions")[0].value,
            ranks=ranks,
        )
    budgets = ranks.all_gather_object("the budgets", run.config.system.micro_batch_tokens)
    fewest = min(message.value for message in budgets)  # all ranks must cut a batch in the same way
    system = attrs.evolve(run.config.system, micro_batch_tokens=fewest)
    return attrs.evolve(run, config=attrs.evolve(run.config, system=system))


def _writing_nothing(config: Config) -> Config:
    silent = LogConfig(every=config.log.every, jsonl=False, completions=False, report=False)
    return attrs.evolve(config, log=silent)


def _make_room(folder: Path, origin: Origin | None, shown: Diary) -> dict[str, int] | None:
    """Removes files that the run does not continue; the bytes of the logs that it continues, if any."""
    if origin is None or origin.folder.resolve().parent != folder.resolve():
        clear(folder)
        return None
    for name, aside in set_aside(folder, origin.step):
        shown.note(f"{name} belongs to a later step: renamed to {aside}")
    return {name: size for name, size in origin.table("logs").items() if isinstance(size, int)}
