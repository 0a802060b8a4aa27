"""`grpo plan`: sizes without loading, its output and exit code, and forecasts against real steps."""

import json

import attrs
import mlx.core as mx
import pytest

from grpo_fn.backends import mechanisms
from grpo_fn.policy import gated_mlps
from grpo_fn.policy.decode_weights import decode_weights
from grpo_fn.trees import named_leaves, nbytes
from runners.config.loading import load_config
from runners.data.stream import RunLength
from runners.errors import UserError
from runners.machine.startup import Platform
from runners.memory import plan
from runners.memory.forecast import GPU_TOKENS, ROOM_TO_LEARN, forecast, largest_batch, usual_tokens
from runners.memory.sizes import checkpoints_mlps, model_shape, model_sizes
from runners.models.loaded_model import load_model
from runners.training.learner import build_learner
from runners.training.sampler import weights_of
from tests.support.commands import grpo
from tests.support.runs.forecasts import check_forecast
from tests.support.tiny_models import make_config, make_model_folder
from tests.support.tiny_runs import PROBLEMS

CPU, GPU, CUDA = Platform("cpu"), Platform("metal"), Platform("cuda")
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
    """Makes a checked config for a tiny model with these keywords and overrides."""

    def make(*overrides, **model):
        folder = make_model_folder(tmp_path / "model", **model)
        (tmp_path / "train.toml").write_text(TRAIN.format(model=folder, data=PROBLEMS))
        return load_config(str(tmp_path / "train.toml"), overrides).check()

    return make


@pytest.fixture
def grpo_plan(tmp_path):
    """Runs `grpo plan` with overrides and options."""

    def run(*overrides, options=(), code=0):
        settings = [word for text in overrides for word in ("--set", text)]
        return grpo("plan", tmp_path / "train.toml", *settings, *options, code=code)

    return run


def predict(config, total=10**12, platform=CPU):
    """The forecast for prompts of 30 tokens."""
    return forecast(config, platform, total, prompt=30, sizes=model_sizes(config, platform))


PACKED = ["rollout.quantization=mxfp4", "rollout.storage=packed"]
QUANTIZED_ROLES = """loss.beta=0.1 loss.ref_quantization=affine-4 loss.ref_storage=packed
    rollout.quantization=affine-8 rollout.storage=packed rollout.group_size=32 rollout.quantize_head=true
    rollout.calibration=none"""


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        ([], {"arch": "qwen2"}),
        (["loss.beta=0.1", "model.dtype=bfloat16"], {"tie": False}),
        (['model.tune="lora"', "model.lora.rank=4", *PACKED], {}),
        (['model.tune="dora"'], {"quantize": {"group_size": 32, "bits": 4}}),
        (PACKED, {"arch": "qwen2"}),
        (QUANTIZED_ROLES.split(), {}),
        (['model.tune="lora"', "model.master=bfloat16", "optim.moments=bfloat16"], {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_sizes_equal_those_of_the_loaded_model(config, overrides, model):
    """The bytes of each role equal those of a learner's arrays, and nothing is computed to predict them."""
    checked = config(*overrides, **model)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = model_sizes(checked, CPU)
    assert mx.get_peak_memory() - before < 50_000
    loaded = load_model(checked.model, CPU)
    learner = build_learner(checked, loaded, RunLength.of(checked, 4), CPU)
    state = learner.state
    assert state is not None
    roles = (state.params, {} if state.ref_params is None else state.ref_params)
    assert found.weights == pytest.approx(sum(map(nbytes, roles)) + nbytes(loaded.frozen), rel=0.02)
    assert found.moments == nbytes(state.opt_state) - 4  # without the counter of updates
    weights = weights_of(learner.sampling, state.old_params, learner.sampler)
    policy, params = weights.policy, weights.params
    own = 0 if learner.sampler.quantization == "none" else nbytes(params, policy.frozen)
    assert found.rollout == pytest.approx(own, rel=0.02)
    assert found.compute == (2 if "model.dtype=bfloat16" in overrides else 4)
    assert found.shares_prompts
    with policy.bound(params) as module:  # the leaves that are added while the module samples
        before = {id(leaf) for leaf in named_leaves(module.parameters()).values()}
        with decode_weights(module):
            after = named_leaves(module.parameters()).values()
            assert found.decoding == nbytes([leaf for leaf in after if id(leaf) not in before])


def test_a_model_on_the_hub_is_measured_by_its_config_alone(config):
    """The sizes, also of packed weights, equal those from the model's files."""
    checked = config(
        "model.dtype=float16", arch="qwen2", dtype="float16", quantize={"group_size": 32, "bits": 4}
    )
    stated = json.loads((plan.resolve_model(checked.model.path) / "config.json").read_text())
    assert model_sizes(checked, CPU, stated=stated | {"torch_dtype": "float16"}) == model_sizes(checked, CPU)


def test_the_plan_is_a_table_or_json(config, grpo_plan):
    """Both contain the same peak and the data's longest prompt; the exit code is 0 if the run fits."""
    config()
    facts = json.loads(grpo_plan(options=["--json"]).stdout)
    assert facts["prompt_tokens_from"] == "the longest prompt of the data" and facts["fits"]
    for phase in facts["phases"].values():
        assert phase["total"] == sum(phase["parts"].values())
    assert facts["peak"]["bytes"] == max(phase["total"] for phase in facts["phases"].values())
    shown = grpo_plan().stdout
    assert f"optim.batch_size = {facts['largest_batch_size']}" in shown and shown.count("← peak") == 1
    longer = grpo_plan("data.nudge=" + "9" * 100, options=["--json"])
    assert json.loads(longer.stdout)["prompt_tokens"] >= facts["prompt_tokens"] + 90


def test_a_budget_of_bits_counts_in_full(config, grpo_plan):
    """The sampler's bytes follow from the budget; formats are chosen after a rollout."""
    overrides = ["rollout.quantization=affine-4", "rollout.storage=packed", "rollout.group_size=32"]
    budget = "rollout.bits_budget=8"
    assert model_sizes(config(*overrides), CPU).rollout < model_sizes(config(*overrides, budget), CPU).rollout
    assert "formats" in grpo_plan(*overrides, budget).output


def test_each_setting_changes_the_bytes_of_its_phases(config, tmp_path):
    """Compared with a plain run: a reference, older samplers, sums, checkpoints, half precision, tools."""
    base, count = predict(config()), model_sizes(config(), CPU).trained

    def more(part, *overrides, than=base):
        found = predict(config(*overrides))
        return [getattr(found.phases[name], part) - getattr(than.phases[name], part) for name in than.phases]

    assert more("weights", "loss.beta=0.1") == [4 * count] * 4
    assert more("weights", "loss.sync_every=2") == [4 * count] * 4
    assert more("optimizer", "optim.gradient_accumulation_steps=2")[2] == 4 * count
    plain = predict(config("system.share_prompts=never"))
    checkpointed = predict(config("system.grad_checkpoint=true", "system.share_prompts=never"))
    half = predict(config("model.dtype=bfloat16"))
    for found, most in ((checkpointed, plain), (half, base)):
        assert found.phases["gradient"].activations < most.phases["gradient"].activations
    (tmp_path / "shop.py").write_text("class Shop: ...\n")
    assert more("cache", f'env.factory="{tmp_path}/shop.py:Shop"')[0] > 0


def test_decoding_few_rows_needs_a_second_copy_of_the_matrices(config, monkeypatch):
    """The copy exists in float32 for up to 8 rows, and only in phases that decode that few."""

    def weights(*overrides, blocks: object = True):
        checked = config("optim.batch_size=2", *overrides)
        with mechanisms.substituted(decode_blocks=blocks):
            phases = predict(checked).phases
        return phases["rollout"].weights, phases["gradient"].weights

    matrices = [leaf for leaf in named_leaves(_model(config()).parameters()).values() if leaf.ndim == 2]
    for rows, copies in ((4, 1), (5, 0)):
        found = weights(f"rollout.num_generations={rows}")
        without = weights(f"rollout.num_generations={rows}", blocks=None)
        assert found == (without[0] + copies * nbytes(matrices), without[1])
    assert weights("model.dtype=bfloat16") == weights("model.dtype=bfloat16", blocks=None)
    monkeypatch.setitem(mechanisms.NUMBERS, "block_bytes", nbytes(matrices) - 1)
    assert weights() == weights(blocks=None)


def _model(checked):
    return load_model(checked.model, CPU).module


def test_recomputed_mlps_need_fewer_activations(config, monkeypatch):
    """Only the gradient phase needs less, unless it is disabled or whole blocks are checkpointed.

    The learner's model recomputes as the forecast assumes."""
    checked = config("system.share_prompts=never")
    plain = predict(checked).phases
    monkeypatch.setitem(mechanisms.NUMBERS, "checkpoints_mlps", 1)
    less = predict(checked).phases
    assert less["gradient"].activations < plain["gradient"].activations
    assert [less[name] == plain[name] for name in ("rollout", "evaluation", "update")] == [True] * 3
    assert checkpoints_mlps(checked) and not checkpoints_mlps(config("system.grad_checkpoint=true"))
    loaded = load_model(checked.model, CPU)
    build_learner(checked, loaded, RunLength.of(checked, 4), CPU)
    assert all(hasattr(type(part), "recomputes") for part in gated_mlps(loaded.module))
    with mechanisms.disabled("checkpointed_mlps"):
        assert predict(checked).phases == plain


@pytest.mark.parametrize("checkpointed", ["true", "false"])
def test_the_largest_batch_fits_and_one_more_does_not(config, checkpointed):
    """This holds for every phase that may have the peak."""
    checked = config(f"system.grad_checkpoint={checkpointed}", "eval.samples=4")
    best = largest_batch(predict(checked, 40_000_000))
    assert best > 1
    sizes = [predict(checked.having("optim", batch_size=size)).peak[1] for size in (best, best + 1)]
    assert sizes[0] <= 40_000_000 < sizes[1]


def test_a_gpu_with_little_memory_uses_smaller_micro_batches(config):
    """They are halved until the gradient phase fits, down to about one row; a value in the config is kept."""
    checked = config("rollout.num_generations=8", "optim.batch_size=64")

    def found(total, platform, config=checked):
        forecast = predict(config, total, platform)
        return forecast.config.system.micro_batch_tokens, sum(forecast.phases["gradient"])

    tokens, wide = found(10**12, GPU)
    assert tokens == GPU_TOKENS
    tokens, gradient = found(int(0.7 * wide), GPU)
    assert gradient <= ROOM_TO_LEARN * 0.7 * wide and tokens in {GPU_TOKENS >> n for n in range(1, 9)}
    row = 30 + checked.rollout.max_new_tokens
    assert found(1, GPU)[0] in range(row // 2, row + 1)
    tokens, wide = found(10**12, CUDA)  # large enough to keep the device busy
    assert tokens == 8 * GPU_TOKENS > found(int(1.9 * wide), CUDA)[0] >= GPU_TOKENS
    assert found(1, GPU, checked.having("system", micro_batch_tokens=77))[0] == 77


@pytest.mark.parametrize(
    ("hidden", "intermediate", "keys", "tokens"),
    [(576, 1536, 192, 16384), (896, 4864, 128, 16384), (2048, 11008, 256, 16384), (64, 256, 64, 65536)],
)
def test_the_size_of_micro_batches_depends_on_the_parameters(hidden, intermediate, keys, tokens):
    """SmolLM2-135M, Qwen2.5-0.5B and -3B, and a small model, whose micro-batches have more tokens."""
    stated = {"num_hidden_layers": 24, "num_attention_heads": 1, "head_dim": hidden, "vocab_size": 9}
    stated |= {"hidden_size": hidden, "intermediate_size": intermediate, "num_key_value_heads": 1}
    shape = attrs.evolve(model_shape(stated), keys=keys)
    assert usual_tokens(shape, 2, 200, 300, "cuda") == tokens
    assert usual_tokens(shape, 2, 200, 300, "metal") == GPU_TOKENS


def test_rows_that_do_not_fit_are_decoded_in_parts(config, monkeypatch):
    """max_batch is set, with a notice, to at least one group; a value in the config is kept."""
    checked = config("optim.batch_size=64", "rollout.max_new_tokens=1000")
    sizes = model_sizes(checked, CPU)
    outlook, notices, phases = plan.memory_outlook(checked, CPU, sizes, 30)
    assert outlook.rollout.max_batch == 0 and notices == ()
    for free, least, most in ((20_000_000, 8, 252), (-(10**12), 4, 4)):
        monkeypatch.setattr(plan, "free_memory", lambda limit, free=free: free)
        outlook, notices, fewer = plan.memory_outlook(checked, CPU, sizes, 30)
        assert sum(fewer["rollout"]) < sum(phases["rollout"])
        rows = outlook.rollout.max_batch
        assert rows % 4 == 0 and least <= rows <= most
        assert notices == (f"decoding: memory suffices for {rows} of 256 rows at a time",)
    own = checked.having("rollout", max_batch=100)
    assert plan.memory_outlook(own, CPU, sizes, 30)[0].rollout.max_batch == 100


def test_a_shape_is_read_from_all_known_names():
    """Usual names, GPT-2's, a nested text_config and experts are read; a missing one is named."""
    llama = make_config("llama", vocab_size=320, layers=2, tie=True)
    shape = model_shape(llama)
    assert (shape.layers, shape.vocabulary, shape.tied, shape.gated) == (2, 320, True, True)
    old = model_shape({"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 9})
    assert (old.layers, old.intermediate, old.keys, old.queries) == (3, 128, 32, 32)
    assert model_shape({"model_type": "x", "text_config": llama}) == shape
    routed = {"num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 1}
    assert model_shape({**llama, **routed}).intermediate == 5 * 32
    with pytest.raises(ValueError, match="vocab_size"):
        model_shape({name: value for name, value in llama.items() if name != "vocab_size"})


def test_a_run_that_cannot_fit_is_refused_before_the_model_is_loaded(config, grpo_plan, monkeypatch):
    """If weights, moments and gradients exceed system.memory_limit_gb, the exit code is 2, with one line."""
    from runners.training import setup

    monkeypatch.setattr(setup, "load_model", lambda *a, **k: pytest.fail("loaded"))
    checked = config("system.memory_limit_gb=0.0001")
    with pytest.raises(UserError, match=r"needs .* for weights, moments and gradients") as caught:
        setup.SetUp(checked, CPU).build()
    assert "(system.memory_limit_gb)" in str(caught.value) and "\n" not in str(caught.value)
    said = grpo_plan("system.memory_limit_gb=0.0001", code=2).stderr
    assert said.count("\n") == 1 and "gradients alone" in said


def test_a_run_above_its_memory_is_warned(config):
    """It continues with a notice that names a key, also if the model's sizes are unknown."""
    tight = config("system.memory_limit_gb=0.005")
    _, notices, _ = plan.memory_outlook(tight, CPU, model_sizes(tight, CPU), 30)
    assert notices[0].startswith("memory: the run is expected to need")
    assert notices[0].endswith("lower rollout.max_batch")
    broken = tight.having("model", path="/nowhere/at/all")
    reason = plan.sizes_if_it_can_fit(broken, CPU)
    assert isinstance(reason, str) and plan.memory_outlook(broken, CPU, reason, 30)[1:] == ((reason,), {})


def test_the_forecast_is_within_its_bound_of_a_real_step():
    """The config is the quickstart."""
    check_forecast("quickstart")
