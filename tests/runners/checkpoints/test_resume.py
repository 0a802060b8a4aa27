"""A run that is cut off and resumed is the run that was not: weights, moments, log and completions."""

import pytest

from runners.checkpoints.snapshot import checkpoint_folders
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.resuming import SHIPPED, config_in, killed, outcome, saved, straight_run
from tests.support.tiny_runs import Notes
from tests.support.tiny_states import same_bits

ACCUMULATE = ["optim.gradient_accumulation_steps=3", "optim.max_steps=7"]
REUSE = ["optim.num_iterations=2", "optim.minibatches=2", "optim.max_steps=3"]
CASES = {
    # name: settings, where to cut, and how often that has come
    "in a rollout of the shipped model": (SHIPPED, "sampling", 4),
    "in a rollout": ([], "sampling", 4),
    "before a gradient": ([], "learning", 3),
    "after an update": ([], "step", 5),
    "inside gradient accumulation": (ACCUMULATE, "learning", 5),
    "in the last, shorter accumulation": (ACCUMULATE, "sampling", 7),
    "between updates of one rollout": (REUSE, "step", 7),
    "between updates of two rollouts": ([*REUSE, "optim.gradient_accumulation_steps=2"], "step", 2),
    "at an epoch's end": (["optim.batch_size=6"], "sampling", 4),
    "across an epoch's end": (["optim.batch_size=5"], "sampling", 5),
    "before a late sync": (["loss.sync_every=3"], "sampling", 3),
    "right after a sync": (["loss.sync_every=3"], "sampling", 4),
    "late syncs of quantized rollouts": (
        ["loss.sync_every=2", "rollout.quantization=affine-4", "loss.correction=token_truncate"],
        "learning",
        4,
    ),
    "packed rollouts": (["rollout.quantization=mxfp8", "rollout.storage=packed"], "sampling", 3),
    "a reference that moves": (["loss.beta=0.05", "loss.ref_sync_every=3"], "sampling", 5),
    "a quantized reference": (["loss.beta=0.05", "loss.ref_quantization=affine-8"], "learning", 2),
    "adapters": (["model.tune=lora", "model.lora={rank=4}", "loss.beta=0.05"], "step", 3),
    "dynamic sampling": ([*SHIPPED, "loss.dynamic_sampling=true", "rollout.temperature=0.3"], "sampling", 4),
    "in an evaluation": ([], "evaluating", 3),
    "in the last evaluation": ([], "eval", 4),
    "in the final save": ([], "saving the final", 1),
    "before the first checkpoint": ([], "learning", 1),
    "with skipped updates": (["optim.learning_rate=1e39", "optim.max_bad_updates=0"], "step", 4),
    "before it ends early": (['stop.when=["update >= 2 for 3"]'], "sampling", 4),
    "with several micro-batches": (["system.micro_batch_tokens=120"], "learning", 4),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_cut_off_anywhere_goes_on_bit_for_bit(name):
    """Straight against killed and resumed: state, log, completions, final model and every checkpoint."""
    settings, what, count = CASES[name]
    straight = straight_run(*settings)
    # Beside the other: the path of the reward's file is a part of the config.
    config = config_in(straight.folder.parents[1] / name, *settings)
    killed(config, what, count)
    resumed = run_training(config, report=Quiet(), resume=True)
    assert same_bits(resumed.state, straight.state)
    assert outcome(resumed.folder) == outcome(straight.folder)
    for path in checkpoint_folders(straight.folder).values():
        assert saved(resumed.folder / path.name) == saved(path)
    assert (resumed.first_em, resumed.last_em) == (straight.first_em, straight.last_em)


class Start(Notes):
    """Keeps what a report is told at the start as well."""

    def start(self, total_updates, header, *, done=0, scores=()):
        """The run begins."""
        self.done, self.scores = done, scores


CONVERGES = """
def letters(completions, trainer_state, **_):
    if trainer_state.global_step < 2:
        return [float(n % 2) for n in range(len(completions))]
    return [0.5] * len(completions)  # its maximum, which all completions reach
"""


def test_a_resumed_run_is_told_of_as_one_with_what_was_before(tmp_path):
    """No line on a reward that gave more than one value before the cut; the display gets the first score."""
    settings = ["optim.max_steps=13", "checkpoint.every=2", "eval.every=0", "rollout.max_new_tokens=2"]
    config = config_in(tmp_path / "b", *settings)
    (tmp_path / "letters.py").write_text(CONVERGES)
    killed(config, "sampling", 3)
    report = Start()
    result = run_training(config, report=report, resume=True)
    assert [line for line in report.lines if "teaches nothing" in line] == []
    assert (report.done, report.scores) == (2, (result.first_em,))
