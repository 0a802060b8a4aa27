"""Commands in separate processes download from a Hub on this machine."""

import json

import pytest

from tests.support.services.hub import serving
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import PROBLEMS

NAME = "someone/tiny-llama"
CONFIG = f"""
[model]
path = "{NAME}"
[data]
source = "{PROBLEMS}"
eval_split = "valid"
[rollout]
num_generations = 2
max_new_tokens = 4
[optim]
batch_size = 1
max_steps = 1
[eval]
samples = 1
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with a model."""
    folder = make_model_folder(tmp_path_factory.mktemp("hub") / "model")
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    with serving() as found:
        found.add(NAME, folder)
        yield found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One empty HF_HOME for the module, so that later tests find what the first one downloads."""
    return tmp_path_factory.mktemp("hf")


def test_a_model_is_downloaded_once_and_trained(hub, home, tmp_path):
    """Only the files that mlx-lm needs are downloaded; afterwards, the cache is enough without a Hub."""
    (tmp_path / "train.toml").write_text(CONFIG)
    hub.grpo("run", "train.toml", cwd=tmp_path, home=home)
    fetched = {line.rpartition("/")[2] for line in hub.requests if line.startswith("GET /someone")}
    assert fetched == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert json.loads((tmp_path / "outputs/grpo/final/config.json").read_text())["model_type"] == "llama"
    before = len(hub.requests)
    words = ("generate", NAME, "hi", "--max-tokens", "2")
    hub.grpo(*words, cwd=tmp_path, home=home, HF_HUB_OFFLINE="1")
    assert len(hub.requests) == before


@pytest.mark.parametrize(
    ("command", "key"),
    [(("run", "train.toml"), "model.path"), (("generate", "someone/tiny-lama", "hi"), "MODEL")],
)
def test_a_name_that_is_not_there_is_a_line(hub, home, tmp_path, command, key):
    """The line has the key and the name; the code is 2."""
    (tmp_path / "train.toml").write_text(CONFIG.replace("tiny-llama", "tiny-lama"))
    done = hub.grpo(*command, cwd=tmp_path, home=home, code=2)
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if "BLAS" not in line] == [
        f'{key} = "someone/tiny-lama": found neither a folder nor a Hub model with this name'
    ]


NO_MODEL = "the Hub's cache does not contain this name, and the Hub cannot be reached"
NO_DATA = "which could not be downloaded"


@pytest.mark.parametrize(
    ("command", "line", "why"),
    [
        (("plan", "train.toml"), NO_MODEL, {"HF_HUB_OFFLINE": "1"}),
        (("plan", "train.toml"), NO_MODEL, {"HF_ENDPOINT": "http://127.0.0.1:1"}),  # nobody listens there
        (("check", "train.toml", "--set", "data.source=someone/sums"), NO_DATA, {"HF_HUB_OFFLINE": "1"}),
    ],
)
def test_a_hub_that_may_not_or_cannot_be_asked_is_a_line(hub, tmp_path, command, line, why):
    """Models and data sets fail with one line, without retries."""
    (tmp_path / "train.toml").write_text(CONFIG)
    before = len(hub.requests)
    done = hub.grpo(*command, cwd=tmp_path, code=2, **why)
    assert line in done.stderr.splitlines()[-1] and "Retrying" not in done.stderr
    assert len(hub.requests) == before
