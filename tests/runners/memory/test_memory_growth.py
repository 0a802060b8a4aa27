"""Memory while a run goes: nothing piles up."""

import gc
import json

import mlx.core as mx

from runners.config.loading import load_config
from runners.telemetry.events import Updated
from runners.telemetry.report import Quiet
from runners.training.train import run_training  # noqa: F401 (for SIXTEEN_STEPS)
from tests.support.processes.new_process import in_new_process
from tests.support.tiny_runs import PROBLEMS


class Noting(Quiet):
    """Keeps the active memory after each update."""

    def __init__(self):
        self.active = []

    def handle(self, event):
        if isinstance(event, Updated):
            if event.metrics["update"] in (5, 30):
                gc.collect()
            self.active.append(mx.get_active_memory())
            self.metrics = dict(event.metrics)


def settings(folder, *overrides):
    """A few steps of the embedded model, as small as they get."""
    small = f"""run.output_dir={folder} rollout.num_generations=2 rollout.max_new_tokens=8 optim.batch_size=2
        eval.at_start=false eval.every=0 eval.samples=2 data.source={PROBLEMS} data.eval_split=valid
        log.completions=false"""
    return load_config("quickstart", [*small.split(), *overrides])


SIXTEEN_STEPS = """
import json, sys
from grpo_fn.trees import nbytes
from tests.runners.memory.test_memory_growth import Noting, run_training, settings
shown = Noting()
result = run_training(settings(sys.argv[1], "optim.max_steps=16", "rollout.launch=eval"), report=shown)
held = nbytes(result.state.params, result.state.opt_state)
print(json.dumps([shown.active[4], shown.active[15], held, shown.metrics["memory/swap_gb"]]))
"""


def test_memory_does_not_grow_with_the_steps(tmp_path):
    """Active memory after step 5 and after step 16, and it is weights and moments alone, to 2 %.

    In a process of its own: there what other tests have left neither counts nor goes meanwhile.
    """
    early, late, held, swap = json.loads(in_new_process(SIXTEEN_STEPS, tmp_path))
    assert abs(late - early) < 0.02 * early
    assert 0.98 * held < late < 1.02 * held
    assert swap >= 0
