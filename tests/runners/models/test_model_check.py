"""The model check of a run: its answer is kept, and it can be switched off."""

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


@pytest.fixture(name="cache")
def _cache(tmp_path, monkeypatch):
    """The user's cache folder, a fresh one."""
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(name="checked")
def _checked(monkeypatch):
    """Checks a policy; `calls` has an entry for each comparison."""
    calls, check = [], g.check_policy
    monkeypatch.setattr(g, "check_policy", lambda *a, **k: calls.append(1) or check(*a, **k))
    of = tiny_policy("afm7")

    def run(**changes):
        found = check_model(CONFIG, of, of.params, PROMPTS, **FACTS | changes)
        return found.given_up, found.policy.takes_ragged, found.notices

    run.calls = calls
    return run


def test_the_answer_is_kept_for_the_same_facts(cache, checked, monkeypatch):
    """A second run compares nothing; another model or another version of mlx does."""
    first = checked()
    assert checked() == first and len(checked.calls) == 1 and first[0] == ("share_prompts",)
    assert checked(model_config={"model_type": "afm8"}) == first and len(checked.calls) == 2
    monkeypatch.setattr(model_check.importlib.metadata, "version", lambda name: "9.9")
    assert checked() == first and len(checked.calls) == 3 == len([*(cache / "model_checks").iterdir()])


def test_a_damaged_answer_is_found_again(cache, checked):
    """Whatever stands in its file."""
    first = checked()
    (file,) = (cache / "model_checks").iterdir()
    damaged = ["{", "[]", '{"given_up": ["shares"], "notices": []}', "[" * 100_000]
    for number, content in enumerate(damaged, 2):
        file.write_text(content)
        assert checked() == checked() == first and len(checked.calls) == number


def test_a_cache_that_cannot_be_written_is_a_notice(cache, checked):
    """And no error."""
    cache.write_text("")
    assert "the next run checks again" in checked()[2][-1]


@pytest.mark.parametrize(
    "fault, key", [("checkpointed blocks give", "grad_checkpoint"), ("log-probs differ", "check_model")]
)
def test_a_fault_names_the_key_that_goes_on(fault, key, cache, monkeypatch):
    def refuse(*_, **__):
        raise ValueError(fault)

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
