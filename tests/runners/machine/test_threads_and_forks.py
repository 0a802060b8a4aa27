"""Runs work in threads, and are refused in processes that were forked after MLX was used."""

import os
import signal
from contextlib import suppress

import pytest

from runners.machine.signals import Interrupts, Stopped, StopSignals
from tests.support.processes.new_process import digest_of, in_new_process
from tests.support.tiny_runs import small

IN_THREADS = """
import os
import sys
import threading

from runners.config.loading import load_config
from runners.telemetry.report import Quiet
from runners.training.train import run_training


def train(name):
    folders.append(run_training(load_config(sys.argv[1], [f"run.name={name}"]), report=Quiet()).folder)


folders = []
threads = [threading.Thread(target=train, args=(name,)) for name in ("one", "two")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
train("alone")
print(len(folders), flush=True)
os._exit(0)  # before Python 3.13 MLX may still be freeing the threads' programs
"""


def test_two_runs_in_threads_do_not_affect_each_other(tmp_path):
    """Both end with the weights of a run without threads."""
    config = tmp_path / "small.toml"
    config.write_text(small(run={"output_dir": str(tmp_path)}))
    assert in_new_process(IN_THREADS, str(config)) == "3\n"
    folders = [tmp_path / name / "final/model.safetensors" for name in ("one", "two", "alone")]
    assert len({digest_of(file) for file in folders}) == 1


FORKED = """
import os
import signal
import sys

import grpo_fn as g
import mlx.core as mx
from runners.machine import startup
from runners.config.loading import load_config
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.tiny_policies import tiny_policy


def roll(policy):
    sampling = g.Sampling(num_generations=2, max_new_tokens=2)
    return g.generate(policy, policy.params, [[1, 2]], sampling, key=mx.random.key(0))


def train():
    return run_training(load_config(sys.argv[1]), report=Quiet())


def in_child(action):
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends it where it hangs
        try:
            action()
            line = "fine"
        except Exception as error:
            line = f"{type(error).__name__}: {error}"
        print(line, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child was ended"


startup.prepare()
in_child(lambda: roll(tiny_policy()))
policy = tiny_policy()
state = g.init_state(policy.params, g.adamw(1e-3), key=mx.random.key(0))
update_step = g.make_update_step(g.adamw(1e-3))
double = g.compiled(lambda x: 2 * x, enabled=False)
roll(policy)
for action in (
    lambda: roll(policy),
    lambda: update_step(state),
    lambda: g.materialize(state),
    lambda: double(mx.ones(2)),
    lambda: g.Policy.from_module(policy.module),
    lambda: g.Policy.for_inference(policy.module),
    train,
):
    in_child(action)
"""


def test_a_process_forked_after_use_is_refused_with_a_line(tmp_path):
    """Every function that uses MLX raises an error instead of hanging; run_training raises a UserError.

    Importing MLX or reading the machine's properties does not count as use.
    """
    config = tmp_path / "small.toml"
    config.write_text(small(run={"output_dir": str(tmp_path)}))
    before, *after = in_new_process(FORKED, str(config)).splitlines()
    assert before == "fine" and [line.split(":")[0] for line in after] == ["RuntimeError"] * 6 + ["UserError"]
    assert all("after MLX was used there" in line and 'get_context("spawn")' in line for line in after)


@pytest.mark.parametrize("kind", [Interrupts, StopSignals])
def test_a_forked_child_has_the_signal_handlers_from_before_the_run(kind):
    """Otherwise a SIGTERM to a pool's worker, as in data.transform, would stop the run through the shared
    pipe, and the worker would not end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with suppress(Stopped), kind() as signals:
        child = os.fork()
        if child == 0:
            alike = [signal.getsignal(number) for number in numbers] == before
            os._exit(0 if alike and signal.set_wakeup_fd(-1) == -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.kill(os.getpid(), signal.SIGINT)  # this process still has the run's
    assert signals.stopped
