"""A run's model check records what has passed, and can be switched off."""

import attrs
import pytest

import grpo_fn as g
from runners.config.loading import Config
from runners.config.sections import ModelConfig, SystemConfig
from runners.errors import UserError
from runners.machine.startup import Platform
from runners.models import model_check
from runners.models.model_check import check_model
from tests.support.tiny_policies import tiny_policy

PROMPTS = [list(range(3, 33)), [7, 8, 9], [9, 8, 2, 5, 1]]
CONFIG = Config(model=ModelConfig(path="embedded"))
FACTS = {"model_config": {"model_type": "afm7"}, "platform": Platform(backend="cpu"), "share_prompts": True}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """An empty user cache."""
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "cache"))


def check(of, **changes):
    """The result of checking a policy."""
    return check_model(CONFIG, of, of.params, PROMPTS, **FACTS | changes)


def test_a_model_that_passed_is_not_checked_again(monkeypatch):
    """Another model or MLX version is checked, and every model if the cache cannot be written."""
    calls, compare, of = [], g.check_policy, tiny_policy()
    monkeypatch.setattr(g, "check_policy", lambda *a, **k: calls.append(1) or compare(*a, **k))
    for count, changes in ((1, {}), (1, {}), (2, {"model_config": {"model_type": "other"}})):
        assert check(of, **changes).given_up == () and len(calls) == count
    monkeypatch.setattr(model_check.importlib.metadata, "version", lambda name: "9.9")
    assert check(of).given_up == () and len(calls) == 3
    monkeypatch.setenv("GRPO_FN_CACHE", "/proc/nowhere")
    for count in (4, 5):
        assert check(of).given_up == () and len(calls) == count


def test_a_path_is_given_up_each_time():
    """afm7 cannot share prompts in the learner; every check says so."""
    for found in (check(tiny_policy("afm7")), check(tiny_policy("afm7"))):
        assert found.given_up == ("share_prompts",) and "separately" in found.notices[0]


@pytest.mark.parametrize(
    "fault, key", [("checkpointed blocks give", "grad_checkpoint"), ("log-probs differ", "check_model")]
)
def test_a_fault_names_the_key_that_skips_the_check(fault, key, monkeypatch):
    """The error is one line with that key."""

    def refuse(*_, **__):
        raise ValueError(fault)

    monkeypatch.setattr(g, "check_policy", refuse)
    with pytest.raises(UserError, match=f"^{fault}; system.{key} = false trains the model anyway$"):
        check(tiny_policy())


def test_it_can_be_switched_off(monkeypatch):
    """system.check_model = false compares nothing and changes nothing."""
    monkeypatch.setattr(g, "check_policy", lambda *a, **k: pytest.fail("it was compared"))
    of = tiny_policy("afm7")
    config = attrs.evolve(CONFIG, system=SystemConfig(check_model=False))
    found = check_model(config, of, of.params, PROMPTS, **FACTS)
    assert found.policy is of and not found.given_up
