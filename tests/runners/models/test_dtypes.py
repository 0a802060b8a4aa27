"""The dtype of a module's weights."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from runners.errors import UserError
from runners.models.dtypes import main_dtype


def test_most_entries_decide():
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(2, 2, bias=False))
    module.layers[0].weight = module.layers[0].weight.astype(mx.float16)
    assert main_dtype(module) == mx.float16


def test_weights_of_integers_are_refused():
    module = nn.Linear(2, 2, bias=False)
    module.weight = mx.ones((2, 2), mx.int32)
    with pytest.raises(UserError, match="found integers alone"):
        main_dtype(module)
