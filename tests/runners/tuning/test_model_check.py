"""The model check of a run: its answer is kept, and it can be switched off."""

import attrs
import pytest

import grpo_fn as g
from runners.config.loading import Config
from runners.config.sections import ModelConfig, SystemConfig
from runners.errors import UserError
from runners.machine.startup import Platform
from runners.tuning import model_check
from runners.tuning.model_check import check_model
from tests.support.tiny_policies import tiny_policy

PROMPTS = [list(range(3, 33)), [7, 8, 9], [9, 8, 2, 5, 1]]
CONFIG = Config(model=ModelConfig(path="embedded"))
FACTS = {"model_config": {"model_type": "afm7"}, "platform": Platform(backend="cpu"), "share_prompts": True}


def test_the_answer_is_kept(tmp_path, monkeypatch):
    """A second run compares nothing; another version of mlx does; so does a damaged answer."""
    monkeypatch.setattr(model_check, "cache_file", lambda: tmp_path / "tuning.json")
    of, calls, check = tiny_policy("afm7"), [], g.check_policy
    monkeypatch.setattr(g, "check_policy", lambda *a, **k: calls.append(1) or check(*a, **k))

    def run():
        found = check_model(CONFIG, of, of.params, PROMPTS, **FACTS)
        return found.given_up, found.policy.takes_ragged, found.notices[:1]

    first, second = run(), run()
    assert first == second and len(calls) == 1 and first[0] == ("share_prompts",)
    monkeypatch.setattr(model_check.importlib.metadata, "version", lambda name: "9.9")
    run()
    assert len(calls) == 2
    file = tmp_path / "tuning.json"
    file.write_text(file.read_text().replace('"share_prompts"', '"shares"'))
    assert run()[0] == first[0] and len(calls) == 3


@pytest.mark.parametrize(
    "fault, key", [("checkpointed blocks give", "grad_checkpoint"), ("log-probs differ", "check_model")]
)
def test_a_fault_names_the_key_that_goes_on(fault, key, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ValueError(fault)

    monkeypatch.setattr(model_check, "cache_file", lambda: tmp_path / "tuning.json")
    monkeypatch.setattr(g, "check_policy", refuse)
    of = tiny_policy("afm7")
    with pytest.raises(UserError, match=f"^{fault}; system.{key} = false goes on all the same$"):
        check_model(CONFIG, of, of.params, PROMPTS, **FACTS)


def test_it_can_be_switched_off(monkeypatch):
    """system.check_model = false compares nothing and changes nothing."""
    monkeypatch.setattr(g, "check_policy", lambda *a, **k: pytest.fail("it was compared"))
    of = tiny_policy("afm7")
    config = attrs.evolve(CONFIG, system=SystemConfig(check_model=False))
    found = check_model(config, of, of.params, PROMPTS, **FACTS)
    assert found.policy is of and not found.given_up
