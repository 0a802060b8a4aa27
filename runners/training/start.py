"""A run's start: its folder, its parts, and its first state or a checkpoint's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs

from grpo_fn.backends import disabled
from runners.checkpoints.resume import (
    Origin,
    check_differences,
    check_free,
    decisions,
    differences,
    earlier_decisions,
    find_origin,
)
from runners.checkpoints.run_folder import clear, locked, set_aside
from runners.checkpoints.run_inputs import check_inputs, data_digest, report_differences, run_inputs
from runners.checkpoints.saving import Saver, final_size, free_bytes
from runners.config.loading import Config, write_resolved
from runners.config.sections import LogConfig
from runners.errors import UserError, gigabytes
from runners.machine.arithmetic import arithmetic_facts
from runners.machine.signals import Stopped, StopSignals
from runners.machine.startup import Platform
from runners.ranks.ranks import Ranks
from runners.report import final_report
from runners.telemetry.dashboards import check_dashboards_installed
from runners.telemetry.diary import Diary, start_facts
from runners.telemetry.events import Table
from runners.telemetry.log import MetricsLog
from runners.telemetry.report import Report, Silent, make_report
from runners.training.restoring import check_alike, restore, share_start
from runners.training.run_state import RunState
from runners.training.session import Session
from runners.training.setup import Run, build_run
from runners.user_code.worker import Worker


@contextmanager
def start_or_resume(
    config: Config,
    machine: Platform,
    ranks: Ranks,
    signals: StopSignals,
    report: Report | None,
    worker: Worker,
    *,
    resume: Path | bool,
    allow_config_change: bool,
    overwrite: bool,
) -> Iterator[Session]:
    """The run, ready for its next step; see `run_training`. Afterwards its files are closed."""
    config = config.check()
    ranks.wait_for(config.system.collective_timeout)
    check_dashboards_installed(config.log)
    folder, where = Path(config.run.output_dir) / config.run.name, config.where("run.name")
    with ExitStack() as stack:
        stack.enter_context(disabled(*config.system.disable))
        if ranks.is_rank_zero:
            report = report or make_report(every=config.log.every)
        else:  # this rank's files go into a temporary folder
            config = attrs.evolve(config, log=_silent(config.log))
            report, resume, overwrite = Silent(), False, True
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-rank-")))
        shown = stack.enter_context(Diary(report, whole=signals.deferred))
        stack.enter_context(signals.shown_by(ranks.alert(shown.alert)))
        held = stack.enter_context(locked(folder, where))
        wanted = stack.enter_context(final_report(held, config.log, shown.note))
        origin = None
        if resume is not False:
            origin = find_origin(folder, None if resume is True else resume, shown.note)
        replaces = origin is None or origin.folder.resolve().parent != folder.resolve()
        if not overwrite and (resume is False or (origin is not None and replaces)):
            check_free(folder, where, replace_finished=config.run.overwrite)
        known = None
        if origin is not None:
            found = differences(config, origin)
            if found:
                shown.handle(Table(f"the config, against {origin.folder}", ("key", "was", "is"), found))
            if not allow_config_change:
                check_differences(found, origin)
            known = earlier_decisions(config, origin)
        run = _build(config, machine, ranks, shown, known, worker)
        data, rewards = run.data, run.collector.scorer.rewards
        inputs = run_inputs(run.config, run.loaded, data.train, data.evaluation, rewards)
        computing = arithmetic_facts(machine)
        assert run.learner.state is not None
        state = RunState(train=run.learner.state, micro_batch_tokens=run.config.system.micro_batch_tokens)
        if origin is not None:
            if not allow_config_change:
                check_inputs(inputs, origin)
            shown.status("loading the checkpoint")
            state = restore(run, origin, changed=allow_config_change)
            shown.note(f"resuming from {origin.folder}: batch step {state.batch_step}, update {state.update}")
            report_differences(inputs, computing, origin, shown.note)
        check_alike(ranks, run, inputs)
        state = share_start(ranks, run, state, resumed=origin is not None)
        run.stream.position, run.learner.engine.fallback = state.position, state.fallback
        run.learner.engine.load(state.train.old_params, state.version)
        final = final_size(run.learner.outline or state.train, run.loaded) if ranks.is_rank_zero else 0
        if (free := free_bytes(folder)) < final:
            raise UserError(
                f"{where}: {folder}: the final model takes {gigabytes(final)}, and the disk has "
                f"{gigabytes(free)} free; make room, or choose another run.output_dir"
            )
        keep = _make_room(held.here(), None if replaces else origin, shown)
        if ranks.is_rank_zero:
            write_resolved(run.config)
        for notice in run.notices:
            shown.note(notice)
        facts = {
            "config": config.to_dict(),
            "decided": decisions(run.config),
            "data": data_digest(data.train),
            "inputs": inputs,
            "arithmetic": computing,
        }
        wanted.append(True)  # from now on there is something to report
        settings = run.config
        log = stack.enter_context(
            MetricsLog(
                folder,
                settings.log,
                name=settings.run.name,
                config=settings.to_dict(),
                keep=keep,
                update=state.update,
            )
        )
        saver = stack.enter_context(
            Saver(
                held,
                settings.checkpoint,
                log.names,
                shown.note,
                final=final,
                writes=ranks.is_rank_zero,
            )
        )
        # Otherwise the first weights and moments would stay in memory beside the current ones.
        run = attrs.evolve(run, learner=attrs.evolve(run.learner, state=None))
        shown.open(log, start_facts(settings, machine))
        session = Session(run, state, folder=held, log=log, shown=shown, saver=saver, facts=facts)
        del state

        def save(number: int) -> bool:
            saved = session.save_to_stop("interrupted: ")
            shown.end(Stopped(number))
            return saved

        with shown.ending(), signals.saved_by(save):
            yield session


def _build(
    config: Config,
    machine: Platform,
    ranks: Ranks,
    shown: Diary,
    known: Mapping[str, Any] | None,
    worker: Worker,
) -> Run:
    """The run of this rank; rank 0 decides what depends on a measurement."""
    if ranks.is_rank_zero:
        run = build_run(
            config, machine, shown.status, known, ranks=ranks, worker=worker, advance=shown.advanced
        )
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


def _silent(settings: LogConfig) -> LogConfig:
    return LogConfig(every=settings.every, jsonl=False, completions=False, report=False)


def _make_room(folder: Path, origin: Origin | None, shown: Diary) -> dict[str, int] | None:
    """Removes files that the run does not continue; the bytes of the logs that it continues, if any."""
    if origin is None:
        clear(folder)
        return None
    for name, aside in set_aside(folder, origin.step):
        shown.note(f"{name} belongs to a later step: renamed to {aside}")
    return origin.facts.logs
