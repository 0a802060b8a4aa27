"""States in the middle of a run over tiny models, and their comparison."""

import attrs
import mlx.core as mx

from grpo_fn.learner.optimizer import adamw
from grpo_fn.learner.state import init_state
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import map_arrays, structure_of
from runners.config.sections import ModelConfig
from runners.machine.startup import Platform
from runners.models.loaded_model import load_model

TOKENS = mx.array([[5, 9, 70, 31, 12]])


def load(path, **changes):
    """Loads for a CPU run with the config's defaults but for `changes`."""
    return load_model(attrs.evolve(ModelConfig(path=str(path)), **changes), Platform(backend="cpu"))


def moved(tree, seed):
    """The tree with noise on every array, so that no two roles are equal by chance."""
    keys = iter(mx.random.split(mx.random.key(seed), 1000))
    return map_arrays(lambda a: a + 0.02 * mx.random.normal(a.shape, key=next(keys)).astype(a.dtype), tree)


def make_state(loaded, *, seed=1, reference=True):
    """A state in the middle of a run: moments, accumulated gradients, three different policies."""
    params = Policy.from_module(loaded.module).params
    state = init_state(params, adamw(1e-3), key=mx.random.key(seed), ref_params=params if reference else None)
    return attrs.evolve(
        state,
        params=moved(params, seed),
        opt_state=moved(state.opt_state, seed + 1),
        accum_grads=moved(params, seed + 2),
        accum_weight=mx.array(1234.5),
        step=mx.array(40, mx.int32),
        update_step=mx.array(20, mx.int32),
    )


def same_bits(first, second):
    """Equal structure, dtypes and bits, NaN and -0.0 included."""
    leaves = [], []
    fields = [attrs.asdict(each, recurse=False) for each in (first, second)]
    one, other = (structure_of(*pair) for pair in zip(fields, leaves, strict=True))
    return one == other and all(
        a.dtype == b.dtype and a.shape == b.shape and bytes(memoryview(a)) == bytes(memoryview(b))
        for a, b in zip(*leaves, strict=True)
    )


def logits(loaded, state):
    """The model's output with the state's parameters; the module is unchanged."""
    before = loaded.module.parameters()
    loaded.module.update(state.params)
    result = loaded.module(TOKENS)
    loaded.module.update(before)
    return result
