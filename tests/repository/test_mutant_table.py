"""The table of `python -m tests.campaigns.mutants` keeps up with the code it breaks."""

import pytest

from tests.campaigns.mutants import MUTANTS, ROOT, modules, mutated, place_of, read_table

MODULES = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_still_applies(mutant):
    """Its code is there exactly once, and what it makes of the file is different and valid Python."""
    file, broken = mutated(mutant)
    assert broken != modules()[file][0] and compile(broken, str(file), "exec")
    assert mutant.tests and MODULES.issuperset(mutant.tests)


def test_names_are_unique():
    """Each mutant can be run by its name."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_code_is_found_by_meaning():
    """A call's argument, by keyword or place; whatever the white space and wherever the line ends."""
    for code in ("adamw(weight_decay=)", "@build_learner  adamw(weight_decay=)"):
        (mutant,) = read_table(f"a  {code}  =>  0.0")
        if mutant.scope:
            with pytest.raises(ValueError, match="occurs 0 times in build_learner"):
                place_of(mutant)
            continue
        file, start, end = place_of(mutant)
        assert modules()[file][0][start:end] == "optim.weight_decay"
    (mutant,) = read_table("a  @length_penalty  overlong_penalty( lengths_b ,config.rollout  =>")
    assert place_of(mutant).file.name == "experience.py"


def test_a_text_that_is_gone_is_an_error():
    """A mutant that no longer applies is named, not passed over."""
    (mutant,) = read_table("gone  nothing like this  =>  x")
    with pytest.raises(ValueError, match="mutant gone: 'nothing like this' occurs 0 times in the packages"):
        mutated(mutant)
