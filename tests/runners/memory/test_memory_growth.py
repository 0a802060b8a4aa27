"""Memory does not grow during a run."""

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
    """Active memory is equal after steps 5 and 16, and equals weights and moments, to 2 %.

    It runs in a separate process, in which memory of other tests does not count.
    """
    early, late, held, swap = json.loads(in_new_process(STEPS, tmp_path))
    assert abs(late - early) < 0.02 * early
    assert 0.98 * held < late < 1.02 * held
    assert swap >= 0


ARRAYS = """
import gc, json
import grpo_fn as g
import mlx.core as mx
from benchmarks.architectures.small_models import small_model

mx.set_cache_limit(0)  # a buffer that is used again may be larger than its array
policy = g.Policy.from_module(small_model("qwen3_5"))
optimizer = g.adamw(1e-4)
grad_step = g.make_grad_step(policy, g.preset("dapo"))
update_step = g.make_update_step(optimizer)
state = g.init_state(policy.params, optimizer, key=mx.random.key(0), ref_params=policy.params)
sampling = g.Sampling(num_generations=2, max_new_tokens=4)
found = []
for step in range(60):
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    rollout = g.generate(policy, state.old_params, prompts, sampling, key=g.fold_in(state.key, step))
    batch = g.make_batch(rollout, mx.array([[1.0, -1.0], [0.5, -0.5]]))
    state, _ = grad_step(state, batch)
    state, _ = update_step(state)
    state = g.sync_old(state)
    del rollout, batch, _
    g.materialize(state)
    if step % 10 == 9:
        gc.collect()
        arrays = sum(type(each) is mx.array for each in gc.get_objects())
        found.append([arrays, mx.get_active_memory()])
print(json.dumps(found))
"""


def test_the_number_of_arrays_does_not_grow_with_the_steps():
    """Metal limits the number of arrays, and models with the gated delta rule have reached that limit.

    After every ten steps, the number of arrays and the active memory are the same.
    """
    first, *later = json.loads(in_new_process(ARRAYS))
    assert first[0] > 20 and later == [first] * 5
