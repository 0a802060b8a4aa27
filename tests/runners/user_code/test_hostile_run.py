"""A run whose tools and rewards fork and exit while it decodes; all kinds are in the campaigns."""

from tests.support.runs.hostile_code import hostile_run


def test_a_run_ends_with_all_its_updates(tmp_path):
    """OpenBLAS and MLX compute in threads while tools fork: in the run's own process that waited for ever."""
    hostile_run(tmp_path / "run", ("forks", "pools", "exits"), "arrival", ranks=1, updates=3)
