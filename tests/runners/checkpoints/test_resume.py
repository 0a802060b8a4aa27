"""An interrupted and resumed run equals an uninterrupted one: weights, moments, log and completions."""

import pytest

from runners.checkpoints.run_folder import checkpoint_folders
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.resuming import SHIPPED, SHORT, config_in, killed, outcome, saved, straight_run
from tests.support.tiny_states import same_bits

SYNCED_LATE = ["loss.sync_every=3", "optim.batch_size=5"]
LATE_QUANTIZED = ["loss.sync_every=2", "rollout.quantization=affine-4", "loss.correction=token_truncate"]
PACKED = ["rollout.quantization=mxfp8", "rollout.storage=packed"]
CALIBRATED = ["rollout.quantization=affine-4", "rollout.storage=packed", "rollout.mismatch_limit=0"]
CALIBRATED += ["rollout.bits_budget=5"]
ADAPTERS = ["model.tune=lora", "model.lora={rank=4}", "loss.beta=0.05"]
SUPERVISED = ["sft.updates=2", "sft.learning_rate=1e-3", "rollout.max_new_tokens=44"]
CASES = {
    # name: settings, and interruptions with their counts since the last resume
    "from the start to the final model": (
        [],
        [
            ("learning", 1),  # before the first checkpoint, and before a gradient
            ("sampling", 4),
            ("step", 1),  # after an update
            ("evaluating", 1),
            ("eval", 2),  # after the last evaluation
            ("saving the final", 1),
        ],
    ),
    "inside gradient accumulation, and in the last, shorter one": (
        ["optim.gradient_accumulation_steps=3", "optim.max_steps=7"],
        [("sampling", 5), ("learning", 1), ("sampling", 2)],
    ),
    "between updates of two rollouts, and of one": (
        [
            "optim.num_iterations=2",
            "optim.minibatches=2",
            "optim.gradient_accumulation_steps=2",
            "optim.max_steps=3",
        ],
        [("step", 2), ("step", 6)],
    ),
    "before a late sync, and right after it, across an epoch's end": (
        SYNCED_LATE,
        [("sampling", 3), ("sampling", 2)],
    ),
    "late syncs of quantized rollouts": (LATE_QUANTIZED, [("learning", 4)]),
    "packed rollouts and a quantized reference": (
        [*PACKED, "loss.beta=0.05", "loss.ref_quantization=affine-8"],
        [("sampling", 3)],
    ),
    "before and after calibrated rollouts and a calibrated reference": (
        [*CALIBRATED, "loss.beta=0.05", "loss.ref_quantization=affine-3"],
        [("sampling", 1), ("learning", 1), ("sampling", 3)],
    ),
    "a reference that moves, several micro-batches": (
        ["loss.beta=0.05", "loss.ref_sync_every=3", "system.micro_batch_tokens=120"],
        [("learning", 5)],
    ),
    "adapters, at an epoch's end": ([*ADAPTERS, "optim.batch_size=6"], [("sampling", 4)]),
    "supervised updates before GRPO's, from both and at the switch": (
        [*SUPERVISED, *ADAPTERS, "optim.gradient_accumulation_steps=2", "loss.sync_every=3"],
        [("step", 1), ("learning", 1), ("sampling", 1), ("sampling", 3)],
    ),
    "supervised updates alone": ([*SUPERVISED, "sft.only=true"], [("step", 1), ("eval", 1)]),
    "dynamic sampling of the shipped model": (
        [*SHIPPED, "loss.dynamic_sampling=true", "rollout.temperature=0.3"],
        [("sampling", 4)],
    ),
    "an adaptive curriculum, groups in two stages, a rollout of several batch steps": (
        [
            "data.curriculum=adaptive",
            "data.pass_reward=0.5",
            "data.explore=0.3",
            "rollout.first_stage=2",
            "optim.gradient_accumulation_steps=2",
        ],
        [("sampling", 2), ("learning", 1), ("step", 1)],
    ),
    "a teacher that is the student at the start": (
        ["teacher.path=self", "teacher.hint= It is {answer}.", "loss.sync_every=2"],
        [("step", 2), ("learning", 1)],
    ),
    "a teacher in the loss of adapters": (
        [*ADAPTERS, "teacher.path=self", "teacher.hint={answer}", "teacher.form=loss"],
        [("step", 2), ("learning", 1)],
    ),
    "experts, whose choices are replayed": (
        [
            "model.path={mixtral}",
            "loss={router_aux_coef=0.01, router_replay=true, sync_every=2}",
            "optim.num_iterations=2",
        ],
        [("sampling", 2), ("learning", 1)],
    ),
    "with skipped updates": (["optim.learning_rate=1e39", "optim.max_bad_updates=0"], [("step", 4)]),
    "before it ends early": (['stop.when=["update >= 2 for 3"]'], [("sampling", 4)]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_run_is_resumed_bit_for_bit(name):
    """State, log, completions, final model and every checkpoint are equal."""
    settings, cuts = CASES[name]
    straight = straight_run(*settings)
    # In the same folder, because the path of the reward's file is part of the config.
    config = config_in(straight.folder.parents[1] / name.replace(",", ""), *settings)
    for number, (what, count) in enumerate(cuts):
        killed(config, what, count, resume=number > 0)
    resumed = run_training(config, report=Quiet(), resume=True)
    assert same_bits(resumed.state, straight.state)
    assert outcome(resumed.folder) == outcome(straight.folder)
    for path in checkpoint_folders(straight.folder).values():
        assert saved(resumed.folder / path.name) == saved(path)
    assert (resumed.first_em, resumed.last_em) == (straight.first_em, straight.last_em)


def test_a_resume_prunes_what_a_killed_run_did_not():
    """After its last checkpoint, the run does not save again, so the start has to prune."""
    settings = [*SHORT, "checkpoint.keep_best=0"]
    straight = straight_run(*settings).folder
    config = config_in(straight.parents[1] / "unpruned", *settings)
    killed(config, "saving the final", 1)
    keep_two = config_in(straight.parents[1] / "unpruned", *settings, "checkpoint.keep_last=2")
    resumed = run_training(keep_two, report=Quiet(), resume=True)
    assert [*checkpoint_folders(resumed.folder)] == [2, 3]
    assert outcome(resumed.folder) == outcome(straight)
