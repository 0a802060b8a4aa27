"""The model that the servers of these tests serve."""

import pytest

from tests.support.serving import embedded


@pytest.fixture(scope="module")
def loaded():
    """The model in the package."""
    return embedded()
