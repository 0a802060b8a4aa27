"""`grpo plan`: sizes without loading, what is said and how it ends, and the forecast against real steps."""

import json
from pathlib import Path

import attrs
import mlx.core as mx
import pytest
from click.testing import CliRunner

import grpo_fn as g
from grpo_fn.learner import Sharding
from grpo_fn.policy.decoding.decode_weights import decode_weights
from grpo_fn.trees import named_leaves, nbytes
from runners import cli
from runners.config.loading import load_config
from runners.data.stream import RunLength
from runners.errors import UserError
from runners.machine import startup
from runners.memory import forecast, plan, remedies
from runners.memory.model_sizes import _from_config, model_sizes
from runners.models.loaded_model import load_model
from runners.training.learner import build_learner
from tests.support.runs.forecasts import check_forecast
from tests.support.tiny_models import make_config, make_model_folder
from tests.support.tiny_runs import PROBLEMS

ROOT = Path(__file__).resolve().parents[3]
CPU = startup.Platform("cpu")
TRAIN = """
[model]
path = "{model}"
[data]
source = "{data}"
eval_split = "valid"
system_prompt = ""
[rollout]
num_generations = 4
max_new_tokens = 16
[optim]
batch_size = 4
max_steps = 1
"""


@pytest.fixture
def config(tmp_path):
    """A checked config for a tiny model, made with the given keywords and overrides."""

    def make(*overrides, **model):
        folder = make_model_folder(tmp_path / "model", **model)
        (tmp_path / "train.toml").write_text(TRAIN.format(model=folder, data=PROBLEMS))
        return load_config(str(tmp_path / "train.toml"), overrides).check()

    return make


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        ([], {"arch": "qwen2"}),
        (["loss.beta=0.1", "model.dtype=bfloat16"], {"tie": False}),
        (['model.tune="lora"', "model.lora.rank=4"], {}),
        (['model.tune="dora"'], {"quantize": {"group_size": 32, "bits": 4}}),
        (["rollout.quantization=mxfp4", "rollout.storage=packed"], {"arch": "qwen2"}),
        (["rollout.quantization=mxfp4"], {"dtype": "bfloat16"}),
        (
            [
                "loss.beta=0.1",
                "loss.ref_quantization=affine-4",
                "loss.ref_storage=packed",
                "rollout.quantization=affine-8",
                "rollout.storage=packed",
                "rollout.group_size=32",
                "rollout.quantize_head=true",
            ],
            {},
        ),
        (['model.tune="lora"', "rollout.quantization=mxfp4", "rollout.storage=packed"], {}),
        (["model.master=bfloat16", "model.dtype=bfloat16", "loss.beta=0.1"], {}),
        (['model.tune="lora"', "model.master=bfloat16", "optim.moments=bfloat16"], {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_sizes_are_those_of_the_loaded_model_and_loading_is_not_needed(config, overrides, model):
    """Bytes of every role equal those of a real learner's arrays, and nothing was computed to find them."""
    checked = config(*overrides, **model)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = model_sizes(checked, CPU)
    assert mx.get_peak_memory() - before < 50_000
    loaded = load_model(checked.model, CPU)
    frozen = nbytes(loaded.frozen)
    learner = build_learner(checked, checked.loss_spec(), loaded, RunLength.of(checked, 4), CPU)
    state = learner.state
    assert state is not None
    assert (found.weights.masters, found.weights.frozen) == (nbytes(state.params), frozen)
    assert found.weights.moments == nbytes(state.opt_state) - 4  # the counter of updates
    own = 0 if learner.role.transform is None else nbytes(state.old_params, learner.role.policy.frozen)
    assert found.weights.rollout == own
    assert found.weights.reference == (0 if state.ref_params is None else nbytes(state.ref_params))
    assert found.weights.compute == (2 if "model.dtype=bfloat16" in overrides else 4)
    assert found.shares_prompts
    params = state.old_params if learner.role.transform else state.params
    assert found.weights.sampling == made_to_sample(learner.role.policy, params)


class Peer:
    """One of several ranks that never meet: enough to cut a state."""

    def __init__(self, rank, size):
        """Rank `rank` of `size`."""
        self.rank, self.size = lambda: rank, lambda: size


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("overrides", "model"),
    [([], {}), (["model.dtype=bfloat16"], {"tie": False}), (['model.tune="lora"', "model.lora.rank=3"], {})],
    ids=["float32", "bfloat16", "lora"],
)
def test_the_plan_for_ranks_is_what_a_sharded_state_holds(config, tmp_path, ranks, overrides, model):
    """`grpo plan --ranks N`: weights and moments of each rank's real state; padding may add some numbers."""
    checked = config("optim.shard=true", *overrides, **model)
    settings = [word for text in ("optim.shard=true", *overrides) for word in ("--set", text)]
    result = CliRunner().invoke(
        cli.main, ["plan", str(tmp_path / "train.toml"), "--json", "--ranks", str(ranks), *settings]
    )
    facts = json.loads(result.stdout)
    assert facts["ranks"] == ranks
    parts = facts["phases"]["update"]["parts"]
    loaded = load_model(checked.model, CPU)
    policy = g.Policy.from_module(loaded.module, compute_dtype=loaded.compute_dtype)
    whole = g.init_state(policy.params, g.adamw(1e-3), key=mx.random.key(0))
    for rank in range(ranks):
        state = Sharding(Peer(rank, ranks), loaded.compute_dtype).shard(whole)
        masters = nbytes(state.params, state.opt_state["masters"])
        assert parts["weights"] == pytest.approx(masters, abs=4 * ranks)
        assert parts["moments"] == pytest.approx(nbytes(state.opt_state["moments"]), abs=8 * ranks + 4)


def test_a_model_on_the_hub_is_built_from_its_config_alone(tmp_path):
    """Names, shapes and dtypes of the weights, packed ones too, are those in the files that were not read."""
    packing = {"group_size": 32, "bits": 4}
    folder = make_model_folder(tmp_path, "qwen2", quantize=packing, dtype="float16")
    built = named_leaves(
        _from_config(
            json.loads((folder / "config.json").read_text()) | {"torch_dtype": "float16"}
        ).parameters()
    )
    stored = mx.load(str(folder / "model.safetensors"))
    assert {n: (a.shape, a.dtype) for n, a in built.items()} == {
        n: (a.shape, a.dtype) for n, a in stored.items()
    }
    plain = named_leaves(_from_config(make_config("llama", vocab_size=320, layers=2, tie=True)).parameters())
    assert {leaf.dtype for leaf in plain.values()} == {mx.bfloat16}


def test_the_plan_is_a_table_or_json(config, tmp_path):
    """Both tell the same peak; the longest prompt is the data's own; a run that fits ends with 0."""
    config()
    path = str(tmp_path / "train.toml")
    result = CliRunner().invoke(cli.main, ["plan", path, "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["prompt_tokens_from"] == "the longest prompt of the data" and facts["fits"]
    for phase in facts["phases"].values():
        assert phase["total"] == sum(phase["parts"].values())
    assert facts["peak"]["bytes"] == max(phase["total"] for phase in facts["phases"].values())
    shown = CliRunner().invoke(cli.main, ["plan", path])
    assert shown.exit_code == 0 and f"optim.batch_size = {facts['largest_batch_size']}" in shown.stdout
    assert shown.stdout.count("← peak") == 1 and "keys and values" in shown.stdout
    longer = CliRunner().invoke(cli.main, ["plan", path, "--json", "--set", "data.nudge=" + "9" * 100])
    assert json.loads(longer.stdout)["prompt_tokens"] >= facts["prompt_tokens"] + 90


def test_without_data_at_hand_the_longest_allowed_prompt_counts(config):
    """A data set on the Hub is not fetched for a plan: data.max_prompt_length stands for its prompts."""
    checked = config("data.source=somebody/something", "data.max_prompt_length=77")
    assert forecast.longest_prompt(checked) is None
    found = forecast.forecast(checked, CPU, 10**9)
    assert (found.prompt, found.prompt_source) == (77, "data.max_prompt_length")


def test_a_run_with_tools_counts_rows_that_wait(config, tmp_path):
    """Conversations have phases of their own, in training and evaluation, and take more than one turn."""
    alone = forecast.forecast(config(), CPU, 10**9, prompt=30)
    (tmp_path / "shop.py").write_text("class Shop: ...\n")
    found = forecast.forecast(config(f'env.factory="{tmp_path}/shop.py:Shop"'), CPU, 10**9, prompt=30)
    before, after = ({phase.name: phase.total for phase in each.phases} for each in (alone, found))
    assert after.keys() - before.keys() == {"turns", "evaluation turns"}
    assert after["turns"] > after["rollout"] > before["rollout"]


@pytest.mark.parametrize("checkpointed", ["true", "false"])
def test_the_largest_batch_fits_and_one_more_does_not(config, checkpointed):
    """The search ends at the very edge, whichever phase decides."""
    checked = config(f"system.grad_checkpoint={checkpointed}", "eval.samples=4")
    found = forecast.forecast(checked, CPU, 40_000_000, prompt=30)
    best = remedies.largest_batch(found, CPU)
    assert best > 1
    sizes = [
        forecast.forecast(
            attrs.evolve(checked, optim=attrs.evolve(checked.optim, batch_size=size)), CPU, 10**12, prompt=30
        ).peak.total
        for size in (best, best + 1)
    ]
    assert sizes[0] <= 40_000_000 < sizes[1]


def test_each_remedy_that_is_named_would_do(config):
    """A run above the memory is told keys and values, and with any one of them it fits."""
    checked = config("optim.batch_size=64", "eval.samples=4")
    free = forecast.forecast(checked, CPU, 10**12, prompt=30)
    totals = {phase.name: phase.total for phase in free.phases}
    found = forecast.forecast(checked, CPU, totals["gradient"] - 1, prompt=30)
    ways = remedies.remedies(found, CPU)
    assert any(way.startswith("system.micro_batch_tokens = ") for way in ways)
    assert any(way.startswith("optim.batch_size = ") for way in ways)
    for way in ways:
        (section, key), value = way.split(" = ")[0].split("."), json.loads(way.split(" = ")[1])
        part = attrs.evolve(getattr(checked, section), **{key: value})
        other = forecast.forecast(attrs.evolve(checked, **{section: part}), CPU, found.total, prompt=30)
        assert other.fits, way
    line = plan.over_memory_line(found, CPU)
    assert line is not None and ways[0] in line and "gradient" in line and "\n" not in line


def test_a_run_that_cannot_fit_is_refused_before_the_model_is_loaded(config, tmp_path, monkeypatch):
    """Weights, moments and gradients above system.memory_limit_gb: one line, code 2, nothing loaded."""
    from runners.training import setup

    monkeypatch.setattr(setup, "load_model", lambda *a, **k: pytest.fail("loaded"))
    checked = config("system.memory_limit_gb=0.0001")
    with pytest.raises(UserError, match=r"needs .* for weights, moments and gradients") as caught:
        setup.build_run(checked, CPU)
    assert "(system.memory_limit_gb)" in str(caught.value) and "\n" not in str(caught.value)
    arguments = ["plan", str(tmp_path / "train.toml"), "--set", "system.memory_limit_gb=0.0001"]
    result = CliRunner().invoke(cli.main, arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and "gradients alone" in result.stderr


def test_lora_is_named_where_it_would_fit(config):
    """Full training above the memory, adapters within it."""
    found = forecast.forecast(config("model.lora.rank=1"), CPU, 300_000, prompt=10)
    assert found.floor > 300_000
    line = plan.too_large_line(found)
    assert line is not None and 'model.tune = "lora" needs' in line
    assert plan.too_large_line(attrs.evolve(found, total=found.floor)) is None


def test_a_run_above_its_memory_is_warned_and_one_within_it_is_not(config):
    """Between floor and peak the run goes on, with a notice that names a key; a model unknown to it too."""
    sizes = model_sizes(config(), CPU)
    tight = config("system.memory_limit_gb=0.005")
    told = plan.memory_outlook(tight, CPU, sizes, 30)
    assert len(told.notices) == 1 and told.notices[0].startswith("memory: the run is expected to take")
    assert plan.memory_outlook(config(), CPU, sizes, 30).notices == ()
    broken = attrs.evolve(tight, model=attrs.evolve(tight.model, path="/nowhere/at/all"))
    reason = plan.sizes_if_it_can_fit(broken, CPU)
    assert isinstance(reason, str) and plan.memory_outlook(broken, CPU, reason, 30).notices == (reason,)


def test_the_forecast_is_within_its_bound_of_a_real_step():
    """Of a quickstart; tests/campaigns/test_forecasts.py takes more configs."""
    check_forecast("quickstart")


def made_to_sample(policy, params):
    """Bytes of the leaves that a policy's module gets while it samples."""
    with policy.bound(params) as module:
        before = {id(leaf) for leaf in named_leaves(module.parameters()).values()}
        with decode_weights(module):
            after = named_leaves(module.parameters()).values()
            return nbytes([leaf for leaf in after if id(leaf) not in before])
