"""How many tokens the learner takes at a time: on a GPU by the memory, on a CPU by its caches."""

import pytest
from attrs import evolve

from runners.config.loading import load_config
from runners.machine.startup import Platform
from runners.memory.forecast import NO_LESS, ROOM_TO_LEARN, forecast
from runners.memory.micro_batch import GPU_TOKENS, usual_tokens
from runners.memory.model_sizes import model_sizes
from runners.memory.plan import memory_outlook
from tests.support.tiny_models import make_model_folder

GPU = Platform("metal")


@pytest.fixture(name="config")
def _config(tmp_path):
    train = tmp_path / "train.toml"
    train.write_text(
        f'[model]\npath = "{make_model_folder(tmp_path / "model")}"\n[data]\nsource = "embedded"\n'
    )
    sizes = ["rollout.num_generations=8", "rollout.max_new_tokens=16", "optim.batch_size=64"]
    return load_config(str(train), [*sizes, "optim.max_steps=1"]).check()


def test_a_gpu_with_room_takes_the_usual_number(config):
    """What is left open is filled in; what the config sets stays."""
    found = forecast(config, GPU, 10**12, prompt=32)
    assert (
        found.config.system.micro_batch_tokens
        == GPU_TOKENS
        == usual_tokens(found.sizes.shape, 2, 1, 1, "cuda")
    )


def test_a_gpu_with_little_room_takes_what_fits(config):
    """Halves until the gradient is within nine tenths of the memory, and never less than a row."""
    sizes = model_sizes(config, GPU)
    wide = forecast(config, GPU, 10**12, prompt=32, sizes=sizes)
    total = int(0.7 * wide.gradient)
    found = forecast(config, GPU, total, prompt=32, sizes=sizes)
    assert found.gradient <= ROOM_TO_LEARN * total
    tokens = found.config.system.micro_batch_tokens
    assert tokens in {GPU_TOKENS >> n for n in range(1, 8)}


def test_no_micro_batch_is_smaller_than_helps(config):
    """Where not even a row fits, the one is taken whose gradient needs hardly more than a row's."""
    sizes = model_sizes(config, GPU)

    def gradient(tokens):
        own = evolve(config, system=evolve(config.system, micro_batch_tokens=tokens))
        return forecast(own, GPU, 1, prompt=32, sizes=sizes).gradient

    found = forecast(config, GPU, 1, prompt=32, sizes=sizes)
    tokens = found.config.system.micro_batch_tokens
    row = 32 + config.rollout.max_new_tokens
    assert row <= tokens < GPU_TOKENS and found.gradient <= NO_LESS * gradient(row)
    assert tokens == row or gradient(2 * tokens) > NO_LESS * gradient(row)


def test_a_run_takes_what_the_forecast_chose(config):
    """The number in the outlook is the forecast's, by the memory that is free; a config's own stays."""
    sizes = model_sizes(config, GPU)
    assert memory_outlook(config, GPU, sizes, 32).micro_batch_tokens in {GPU_TOKENS >> n for n in range(8)}
    unknown = memory_outlook(config, GPU, "memory: not predicted", 32)
    assert unknown.micro_batch_tokens == GPU_TOKENS and unknown.notices == ("memory: not predicted",)
    own = evolve(config, system=evolve(config.system, micro_batch_tokens=77))
    assert memory_outlook(own, GPU, sizes, 32).micro_batch_tokens == 77
    assert forecast(own, GPU, 1, prompt=32, sizes=sizes).config.system.micro_batch_tokens == 77
