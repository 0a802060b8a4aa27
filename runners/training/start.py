"""Starts a run: creates its folder and its parts, and creates its initial state or restores the
state from a checkpoint.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

import attrs

from grpo_fn.backends import disabled
from runners.checkpoints.checkpoint import prune_checkpoints
from runners.checkpoints.manifest import digest
from runners.checkpoints.resume import (
    Origin,
    check_free,
    compare_config,
    compare_inputs,
    decisions,
    earlier_decisions,
    find_origin,
    first_start,
)
from runners.checkpoints.run_folder import clear, locked, place_of, restore_best, set_aside
from runners.checkpoints.run_inputs import data_digest, run_inputs
from runners.config.loading import Config, write_resolved
from runners.config.sections import LogConfig
from runners.engines.apart import RankEngine
from runners.errors import UserError, gigabytes
from runners.files.own_folder import remember
from runners.files.run_files import OWN_RUNS
from runners.machine.signals import StopSignals
from runners.machine.startup import Platform
from runners.memory.sizes import models_bytes
from runners.ranks.ranks import Ranks
from runners.report.page import final_report
from runners.telemetry.diary import Diary, start_facts
from runners.telemetry.log import MetricsLog, check_dashboards_installed
from runners.telemetry.report import PlainReport, Quiet, Report
from runners.training.run_state import RunState, check_alike, first_state, restore, share_start
from runners.training.session import Session
from runners.training.setup import Run, SetUp
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
    """Yields a run that is ready for its next step; see `run_training`. The run's files are closed
    at the end of the block.
    """
    config = config.check()
    ranks.watchdog.timeout = config.system.collective_timeout
    check_dashboards_installed(config)
    folder = Path(config.run.output_dir) / config.run.name
    with ExitStack() as stack:
        stack.enter_context(disabled(*config.system.disable))
        if ranks.is_rank_zero:
            report = report or make_report(every=config.log.every)
        else:  # this rank's files go into a temporary folder
            silent = LogConfig(every=config.log.every, jsonl=False, completions=False, report=False)
            config = attrs.evolve(config, log=silent)
            report = Report()
            resume = False
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-rank-")))
        shown = Diary(stack.enter_context(report))
        stack.enter_context(signals.shown_by(ranks.alert(shown.alert)))
        stack.enter_context(locked(folder, config.where("run.name")))
        origin = None
        known = None
        if resume is not False:
            origin = find_origin(folder, None if resume is True else resume, shown.note)
        # Whether the run continues the run in its folder; otherwise, it replaces that run.
        continues = origin is not None and origin.folder.resolve().parent == folder.resolve()
        if not overwrite and (resume is False or (origin is not None and not continues)):
            check_free(folder, config.where("run.name"), replace_finished=config.run.overwrite)
        if origin is not None:
            compare_config(config, origin, shown.note, allowed=allow_config_change)
            known = earlier_decisions(config, origin)
        starts = ranks.all_gather_object("the start", first_start(origin).isoformat())
        run = SetUp(
            config,
            machine,
            shown.status,
            known,
            start=datetime.fromisoformat(starts[0]),
            ranks=ranks,
            worker=worker,
            advance=shown.advanced,
            note=shown.note,
        ).build()
        inputs = run_inputs(
            run.config,
            run.loaded,
            run.data.train,
            run.data.evaluation,
            run.collector.scorer.rewards,
            run.data.gold,
        )
        facts = {
            "config": config.to_dict(),
            "decided": decisions(run.config),
            "data": data_digest(run.data.train),
            "inputs": inputs,
            "arithmetic": machine.arithmetic(),
        }
        state = first_state(run)
        if origin is not None:
            compare_inputs(
                inputs, facts["arithmetic"], origin, shown.note, allowed=allow_config_change
            )
            shown.status("loading the checkpoint")
            state = restore(run, origin, changed=allow_config_change)
            shown.note(
                f"resuming from {origin.folder}: batch step {state.batch_step}, update "
                f"{state.update}"
            )
        check_alike(ranks, run, inputs)
        if config.ranks.samplers:
            run = _apart(run, stack)
        state = share_start(run.ranks, run, state, resumed=origin is not None)
        log = _files(run, state, folder, origin if continues else None, shown)
        if origin is not None:
            restore_best(folder, origin.folder)
        if config.log.report:  # from now on, a report can be written
            stack.callback(_report, folder, place_of(folder), shown.note)
        stack.enter_context(log)
        # Otherwise, the initial weights and moments would stay in memory next to the current ones.
        run = attrs.evolve(run, learner=attrs.evolve(run.learner, state=None))
        shown.open(log, start_facts(run.config, machine))
        session = Session(run, state, log=log, shown=shown, facts=facts)
        session.plan.load(state)
        if session.ahead is not None:
            stack.callback(session.ahead.close)
            for flight in state.flights:
                shown.note(
                    f"batch step {flight.batch_step + 1} was in progress: it is sampled again "
                    f"with the weights of update {flight.update}"
                )
        del state

        with shown.ending():
            yield session


def _apart(run: Run, stack: ExitStack) -> Run:
    """Returns this rank's part of a run in which rank 0 learns and the other ranks only sample. On
    rank 0, the engine uses the other ranks.
    """
    ranks = run.ranks.apart()
    learner = run.learner
    if ranks.is_rank_zero:
        engine = stack.enter_context(closing(RankEngine(run.ranks)))
        learner = attrs.evolve(learner, engine=engine)
    collector = attrs.evolve(run.collector, ranks=ranks)
    return attrs.evolve(run, learner=learner, collector=collector, ranks=ranks)


def _report(folder: Path, place: object, note: Callable[[str], None]) -> None:
    """Writes a run's report, unless its folder has been moved."""
    if place_of(folder) == place:
        final_report(folder, note)


def _files(
    run: Run, state: RunState, folder: Path, origin: Origin | None, shown: Diary
) -> MetricsLog:
    """Prepares the run's folder and shows the notices. Returns the log.

    Afterwards, the folder contains only files of this run up to and including `origin`.
    """
    config = run.config
    loaded = run.loaded
    needed = models_bytes(
        config, loaded.num_parameters, loaded.num_trainable, loaded.source_dtype.size
    )
    free = shutil.disk_usage(folder).free  # if there is an old run, it is removed later
    if run.ranks.is_rank_zero and free < needed:
        raise UserError(
            f"{config.where('run.name')}: {folder}: the final and the best model need "
            f"{gigabytes(needed)}, but the disk has {gigabytes(free)} free; free space, or "
            f"choose a different run.output_dir"
        )
    keep = None
    if origin is None:
        clear(folder)
    else:
        for name, aside in set_aside(folder, origin.facts.step):
            shown.note(f"{name} belongs to a later step and was renamed to {aside}")
        keep = origin.facts.logs  # bytes to keep of each log
    if run.ranks.is_rank_zero:
        remember(OWN_RUNS, digest(write_resolved(config)))
    for notice in run.notices:
        shown.note(notice)
    with suppress(OSError):  # if a run was killed before pruning, pruning is still due
        prune_checkpoints(
            folder, keep_last=config.checkpoint.keep_last, keep_best=config.checkpoint.keep_best
        )
    return MetricsLog(folder, config, keep=keep, update=state.update)


def make_report(*, every: int = 1, stream: TextIO | None = None) -> Report:
    """Creates a report of plain lines. If `stream` (stdout by default) is a terminal that can move
    its cursor, a live line is shown below them.

    NO_COLOR in the environment turns off colors, and TERM=dumb turns off the live line. If standard
    output is closed, nothing is shown.
    """
    output = stream or sys.stdout
    if output is None or output.closed:
        return Quiet()
    if output.isatty() and os.environ.get("TERM") != "dumb":
        from runners.telemetry.live import LiveReport

        return LiveReport(output)
    return PlainReport(output, every=every)
