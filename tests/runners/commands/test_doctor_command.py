"""`grpo doctor`: the machine in one page, or as JSON without names."""

import getpass
import json
import socket

import pytest

from runners.commands import doctor
from runners.errors import UserError
from runners.machine import startup
from tests.support.commands import grpo


@pytest.fixture(scope="module", name="facts")
def _facts():
    return doctor.examine()


def test_a_machine_that_runs_these_tests_can_start_a_run(facts):
    found, problem = facts
    assert problem == ""
    assert found["memory_bytes"] >= found["free_memory_bytes"] > 0
    assert found["cores"] >= 1
    assert {"mlx", "mlx-lm"} <= found["packages"].keys()


def test_json_names_no_host_user_or_path(facts):
    done = grpo("doctor", "--json")
    text = json.dumps(json.loads(done.output))
    assert "/" not in text.replace("://", "")
    assert socket.gethostname() not in text.split()
    assert f'"{getpass.getuser()}"' not in text
    assert json.loads(text).keys() == {*facts[0], "problem"}


def test_where_no_run_can_start_the_rest_is_shown_with_code_2(monkeypatch):
    def refuse():
        raise UserError("MLX is not installed")

    monkeypatch.setattr(startup, "prepare", refuse)
    done = grpo("doctor", code=2)
    assert "MLX is not installed" in done.output and "python" in done.output
