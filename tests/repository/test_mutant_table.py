"""The table of `python -m tests.campaigns.mutants` keeps up with the code it breaks."""

import pytest

from tests.campaigns.mutants import MUTANTS, mutated, source_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_still_applies(mutant):
    """Its text occurs exactly once, and what it makes of the file is different and valid Python."""
    source = source_of(mutant).read_text(encoding="utf-8")
    broken = mutated(mutant, source)
    assert broken != source and compile(broken, mutant.file, "exec")


def test_names_are_unique():
    """Each mutant can be run by its name."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_text_that_is_gone_is_an_error():
    """A mutant that no longer applies is named, not passed over."""
    with pytest.raises(ValueError, match=r"k1-sign.*occurs 0 times in algorithm/kl\.py"):
        mutated(MUTANTS[0], "")
