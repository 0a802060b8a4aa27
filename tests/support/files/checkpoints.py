"""Checkpoints of tests: one call for a snapshot and its files."""

from runners.checkpoints.snapshot import take_snapshot, write_checkpoint


def save_checkpoint(run_dir, step, state, loaded, trainer_state, loop=None):
    """The whole checkpoint's folder."""
    return write_checkpoint(run_dir, take_snapshot(step, state, loaded, trainer_state, loop))
