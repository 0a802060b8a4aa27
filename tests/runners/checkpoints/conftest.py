"""A loaded model that the tests of checkpoints share."""

import pytest

from tests.support.tiny_models import make_model_folder
from tests.support.tiny_states import load


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A loaded llama whose file is bfloat16."""
    return load(make_model_folder(tmp_path_factory.mktemp("models") / "llama", dtype="bfloat16"))
