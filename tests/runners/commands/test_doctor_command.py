"""`grpo doctor`: the machine in one page, or as JSON without names."""

import getpass
import json
import socket

from runners.errors import UserError
from runners.machine import startup
from tests.support.commands import grpo


def test_a_machine_that_runs_these_tests_can_start_a_run():
    """The JSON names no host, user or path."""
    text = grpo("doctor", "--json").output
    found = json.loads(text)
    assert found["problem"] is None
    assert found["memory_bytes"] >= found["free_memory_bytes"] > 0
    assert found["cores"] >= 1
    assert {"mlx", "mlx-lm"} <= found["packages"].keys()
    assert "/" not in text.replace("://", "")
    assert socket.gethostname() not in text.split()
    assert f'"{getpass.getuser()}"' not in text


def test_where_no_run_can_start_the_rest_is_shown_with_code_2(monkeypatch):
    def refuse():
        raise UserError("MLX is not installed")

    monkeypatch.setattr(startup, "prepare", refuse)
    done = grpo("doctor", code=2)
    assert "MLX is not installed" in done.output and "\ngrpo_fn " in f"\n{done.output}"
