"""Memory while a run goes: nothing piles up."""

import json

from tests.support.processes.new_process import in_new_process
from tests.support.tiny_runs import PROBLEMS

STEPS = f"""
import gc, json, sys
import mlx.core as mx
from grpo_fn.trees import nbytes
from runners.config.loading import load_config
from runners.telemetry.events import Updated
from runners.telemetry.report import Quiet
from runners.training.train import run_training

class Noting(Quiet):
    active = []

    def handle(self, event):
        if isinstance(event, Updated):
            if event.metrics["update"] == 5:
                gc.collect()
            self.active.append(mx.get_active_memory())
            self.swap = event.metrics["memory/swap_gb"]

small = '''rollout.num_generations=2 rollout.max_new_tokens=8 rollout.launch=eval optim.batch_size=2
    optim.max_steps=16 eval.at_start=false eval.every=0 eval.samples=2 data.source={PROBLEMS}
    data.eval_split=valid log.completions=false'''
shown = Noting()
config = load_config("quickstart", [*small.split(), "run.output_dir=" + sys.argv[1]])
result = run_training(config, report=shown)
held = nbytes(result.state.params, result.state.opt_state)
print(json.dumps([shown.active[4], shown.active[15], held, shown.swap]))
"""


def test_memory_does_not_grow_with_the_steps(tmp_path):
    """Active memory after step 5 and after step 16, and it is weights and moments alone, to 2 %.

    In a process of its own: there what other tests have left neither counts nor goes meanwhile.
    """
    early, late, held, swap = json.loads(in_new_process(STEPS, tmp_path))
    assert abs(late - early) < 0.02 * early
    assert 0.98 * held < late < 1.02 * held
    assert swap >= 0
