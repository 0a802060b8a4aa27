"""The terms of the memory model against what MLX and mlx-lm really hold."""

import json
from pathlib import Path

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models import nanochat

import grpo_fn as g
from grpo_fn.backends import cuda
from grpo_fn.policy.caches import kv_caches as cache_rows
from grpo_fn.rollout import Respond
from grpo_fn.rollout.prefill import prefill
from grpo_fn.trees import arrays_of, map_arrays, nbytes
from runners.memory import passes as memory
from runners.memory.footprint import SampledRows, WeightSizes, floor, phases
from runners.memory.micro_batch import usual_tokens
from runners.memory.passes import MicroBatch, ModelShape, kv_bytes, model_shape, sampling_arrays
from tests.support.tiny_policies import memory_in_use

ROOT = Path(__file__).parents[3]
ON_CPU = mx.default_device() == mx.cpu
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


ONE_BATCH = MicroBatch.of((1, 2), (1, 1))


def module_of(**changes):
    """A llama of random weights."""
    from mlx_lm.utils import _get_classes

    config = {**LLAMA, **changes}
    model_class, args_class = _get_classes(config)
    mx.random.seed(0)
    return model_class(args_class.from_dict(config)), model_shape(config)


def run_of(shape, **changes):
    """The phases of a small run, by name."""
    rollout = SampledRows(prompts=2, rows=8, prompt=20, new=30, arrays=3)
    weights = WeightSizes(trained=1000, master=4, compute=4, embedding=200)
    given = {
        "rollout": rollout,
        "micro_batches": [MicroBatch.of((8, 50), (8, 30))],
        **changes,
    }
    return {phase.name: phase for phase in phases(shape, given.pop("weights", weights), **given)}


@pytest.mark.parametrize("new", [5, 257])
def test_keys_and_values_are_those_of_the_caches(new):
    """After a prompt, its fork and `new` tokens the caches hold exactly the bytes predicted."""
    module, shape = module_of()
    _, caches = prefill(module, [[1] * 11, [2] * 11])
    cache_rows.keep_rows(caches, [0, 0, 0, 1, 1, 1])
    for _ in range(new - 1):
        module(mx.zeros((6, 1), mx.int32), cache=caches)
    mx.eval(list(arrays_of(cache_rows.arrays(caches))))
    held = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
    assert kv_bytes(shape, rows=6, prompt=11, new=new, itemsize=4) == held
    # Where the prompt is kept once for its three completions, the other copies are saved.
    once = kv_bytes(shape, rows=6, prompt=11, new=new, itemsize=4, prompt_copies=2)
    assert held - once == 4 * 11 * 2 * 2 * 32 * 4


@pytest.mark.skipif(not ON_CPU, reason="measured on a CPU, where prompts are kept once")
@pytest.mark.parametrize("schedule", ["together", "arrival"])
def test_conversations_take_no_more_than_the_forecast(schedule):
    """Turns with many given tokens: rows that wait and grow are within the bound, and beyond one turn's."""
    module, shape = module_of()
    policy = g.Policy.from_module(module)
    prompts, rows, new = [[1] * 40, [2] * 40], 64, 200

    def respond(row, turn):
        return [3 + row % 7] * (80 if schedule == "together" else 40 + row)

    def play(new=new):
        return g.generate(
            policy,
            policy.params,
            prompts,
            key=mx.random.key(0),
            num_generations=rows // 2,
            max_new_tokens=new,
            find_stop=lambda tokens, start: 8 if len(tokens) >= 8 else None,
            decoding=g.Decoding(share_prefix=True, turns_together=schedule == "together"),
            replies=Respond(respond),
        )

    play(new=100)  # what is made once is there
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    lengths = play().lengths_b
    assert max(lengths.tolist()) > 160
    peak = mx.get_peak_memory() - before
    weights = WeightSizes(trained=0, master=4, compute=4, embedding=0)
    sampling = SampledRows(
        prompts=2, rows=rows, prompt=40, new=new, arrays=5, prompt_copies=2, step=64, turns=True
    )
    found = {
        phase.name: phase for phase in phases(shape, weights, rollout=sampling, micro_batches=[ONE_BATCH])
    }
    assert peak <= max(found["rollout"].total, found["turns"].total) <= 4 * peak
    one_turn = run_of(shape, weights=weights, rollout=attrs.evolve(sampling, turns=False))
    assert "turns" not in one_turn
    assert one_turn["rollout"].total < peak


def grad_peak(layers, *, shared=False, checkpointed=False):
    """Bytes that one gradient takes beyond the state, and the micro-batch's shapes.

    MLX runs ahead of what it computes up to a limit, less far where other programs take the core: of several
    gradients the largest peak is the one that was not disturbed.
    """
    module, shape = module_of(num_hidden_layers=layers)
    if checkpointed:
        from grpo_fn.policy.layers.gradient_checkpointing import checkpoint_layers

        checkpoint_layers(module)
    policy = g.Policy.from_module(module)
    state = g.init_state(policy.params, g.adamw(1e-4), key=mx.random.key(0))
    g.materialize(state)
    rows, prompt, new = 12, 40, 60
    batch = g.Batch(
        tokens_bl=mx.zeros((3, prompt) if shared else (rows, prompt + new), mx.int32),
        prompt_lengths_b=mx.full((3 if shared else rows,), prompt, mx.int32),
        targets_bt=mx.zeros((rows, new), mx.int32),
        mask_bt=mx.ones((rows, new), mx.bool_),
        advantages_b=mx.ones((rows,)),
        rollout_logp_bt=mx.zeros((rows, new)),
        num_sequences=mx.array(float(rows)),
        num_tokens=mx.array(float(rows * new)),
        prompt_index_b=mx.arange(rows, dtype=mx.int32) // 4 if shared else None,
    )
    g.materialize(batch)
    step = g.make_grad_step(policy, g.preset("dapo"))
    peaks = []
    for _ in range(5):
        before = memory_in_use()
        mx.reset_peak_memory()
        new_state, stats = step(state, batch)
        g.materialize(new_state.accum_grads, stats)
        del new_state
        peaks.append(mx.get_peak_memory() - before)
    micro = MicroBatch.of(batch.tokens_bl.shape, batch.targets_bt.shape, shares_prompts=shared)
    return max(peaks[1:]), micro, shape  # the first one is traced


@pytest.mark.parametrize("shared", [False, True])
def test_what_the_backward_pass_waits_for_grows_with_the_blocks_as_predicted(shared):
    """Four more blocks add their activations to the peak, to 12 %: what is in flight varies a little."""
    few, micro, shape = grad_peak(3, shared=shared)
    many, _, _ = grad_peak(7, shared=shared)
    predicted = micro.saved_activations(attrs.evolve(shape, layers=4), 4, checkpointed=False)
    assert many - few == pytest.approx(predicted, rel=0.12)


def test_checkpointing_keeps_a_blocks_input_alone():
    """Four more checkpointed blocks add less than a quarter of what they would, predicted and measured."""
    few, micro, shape = grad_peak(4, checkpointed=True)
    many, _, _ = grad_peak(8, checkpointed=True)
    plain = micro.saved_activations(attrs.evolve(shape, layers=4), 4, checkpointed=False)
    assert many - few < 0.25 * plain
    assert micro.saved_activations(attrs.evolve(shape, layers=4), 4, checkpointed=True) < 0.2 * plain


def bytes_in_flight(compute, tries=8):
    """The most bytes that a computation holds beyond its inputs, of several tries.

    MLX allocates the results of all steps in one thread and computes them in another, which frees what it has
    read. How much is held at a time depends on which of the two a busy machine lets run: so it varies.
    """
    peaks = []
    for _ in range(tries):
        before = memory_in_use()  # empties the cache
        mx.reset_peak_memory()
        mx.eval(compute())
        peaks.append(mx.get_peak_memory() - before)
    return max(peaks)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 5},
        {"top_k": 5, "top_p": 0.9},
        {"min_p": 0.1},
        {"with_entropy": True},
    ],
    ids=str,
)
def test_a_draw_holds_as_many_arrays_of_logits_as_predicted(settings):
    """Peak of one draw over large logits, in arrays of their size."""
    logits_bv = mx.random.normal((32, 8192), key=mx.random.key(0))
    keys_b2 = mx.zeros((32, 2), mx.uint32)
    mx.eval(logits_bv, keys_b2)
    sampler = g.compiled(g.Sampler(**settings))
    mx.eval(sampler(logits_bv, keys_b2))  # the first draw is traced
    arrays = 1 + bytes_in_flight(lambda: sampler(logits_bv, keys_b2)) / logits_bv.nbytes
    assert 0.75 <= arrays / sampling_arrays(**settings) <= (1.1 if ON_CPU else 1.15)


def test_logits_stop_growing_with_the_number_of_chunks():
    """Few targets: all of their logits; many: what is in flight, however many there are."""
    shape = attrs.evolve(model_shape(LLAMA), vocabulary=2**15)

    def logits(rows):
        return MicroBatch.of((rows, 8), (rows, 4)).logits(shape, 4, gradient=True)

    assert logits(2)[0] == 12 * 8 * 2**15 * 4 and logits(2)[1] < 0.05
    assert logits(1000) == logits(4000) == (24 * 96 * 2**15 * 4, 1.0)


def test_on_cuda_the_gradient_takes_what_was_measured_there(monkeypatch):
    """The forecast for nanochat-d20 against `benchmarks.learner` on that GPU, weights in float32 included."""
    monkeypatch.setattr(memory, "number", cuda.NUMBERS.__getitem__)
    monkeypatch.setattr(memory, "chunk_rows", lambda vocabulary: cuda.NUMBERS["logits"] // vocabulary)
    record = json.loads((ROOT / "benchmarks/results/learner.json").read_text())["cuda"]
    figures = {figure["name"]: figure["value"] for figure in record["figures"]}
    shape = model_shape(vars(nanochat.ModelArgs()))  # by default d20
    words = 65536 * 1280
    weights = WeightSizes(trained=2 * words + 20 * 12 * 1280**2, master=4, compute=2, embedding=words)
    batch = MicroBatch.of((32, 256), (32, 255))
    gradient = run_of(shape, weights=weights, micro_batches=[batch])["gradient"]
    measured = 1e6 * figures["32 × 256, d20: peak with the float32 weights, ours"]
    assert gradient.total - weights.moments == pytest.approx(measured, rel=0.15)


def test_a_shape_is_read_under_every_name():
    """Plain names, GPT-2's, a nested text_config, experts; and what is missing is named."""
    assert model_shape(LLAMA) == ModelShape(
        layers=2,
        hidden=64,
        intermediate=192,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=64,
        tied=True,
        gated=True,
    )
    old = model_shape({"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 9})
    assert (old.layers, old.intermediate, old.kv_heads, old.head_dim) == (3, 128, 2, 16)
    assert model_shape({"model_type": "x", "text_config": LLAMA}) == model_shape(LLAMA)
    experts = {**LLAMA, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 1}
    assert model_shape(experts).intermediate == 5 * 32
    assert not model_shape({**LLAMA, "hidden_act": "silu"}).keeps_product
    assert model_shape(experts).keeps_product and model_shape({**LLAMA, "hidden_act": "gelu"}).keeps_product
    with pytest.raises(KeyError, match="vocab_size"):
        model_shape({name: value for name, value in LLAMA.items() if name != "vocab_size"})


def test_a_product_that_is_kept_is_one_more_array_of_a_blocks_width():
    plain = model_shape(LLAMA)
    larger = attrs.evolve(plain, keeps_product=True)
    micro = MicroBatch.of((8, 50), (8, 30))
    more, less = (micro.saved_activations(shape, 4, checkpointed=False) for shape in (larger, plain))
    assert more - less == 4 * 2 * 8 * 50 * 192
    assert usual_tokens(larger, 4, 100, 100, "cpu") < usual_tokens(plain, 4, 100, 100, "cpu")


def test_roles_take_bytes_where_they_have_weights_of_their_own():
    """A reference, a sampler and a compute copy each add their bytes to the phases that hold them."""
    shape, plain = model_shape(LLAMA), WeightSizes(trained=1000, master=4, compute=4, embedding=200)
    base = run_of(shape)
    assert base["gradient"].parts["weights"] == 4000 and base["gradient"].parts["moments"] == 8000
    assert floor(plain) == 16000
    kl = run_of(shape, weights=attrs.evolve(plain, reference=4000))
    assert {kl[name].total - base[name].total for name in base} == {4000}
    packed = run_of(shape, weights=attrs.evolve(plain, rollout=700))
    assert packed["rollout"].total - base["rollout"].total == 700
    assert packed["update"].total == base["update"].total and "sync" in packed
    late = run_of(shape, weights=attrs.evolve(plain, rollout=700), lags=True)
    assert late["update"].total - base["update"].total == 700
    small = run_of(shape, weights=attrs.evolve(plain, master=2, moment=2, compute=2))
    assert (
        base["rollout"].total - small["rollout"].total >= 6000
        and floor(plain) - floor(attrs.evolve(plain, master=2, moment=2)) == 6000
    )
    formed = run_of(shape, weights=attrs.evolve(plain, sampling=500))
    assert {name: formed[name].total - base[name].total for name in base} == {
        name: 500 if name in ("prompts", "rollout") else 0 for name in base
    }
    half = run_of(shape, weights=attrs.evolve(plain, compute=2))
    assert half["gradient"].parts["compute copy"] == 2000
    assert half["gradient"].parts["activations"] < 0.65 * base["gradient"].parts["activations"]


def test_more_rows_take_more_and_checkpointing_less():
    """The gradient's phase grows with rows and with accumulation, and shrinks with checkpointing."""
    shape = attrs.evolve(model_shape(LLAMA), layers=12)
    base = run_of(shape)["gradient"].total
    assert run_of(shape, micro_batches=[MicroBatch.of((16, 50), (16, 30))])["gradient"].total > 1.8 * base
    assert run_of(shape, accumulates=True)["gradient"].total == base + 4000
    assert run_of(shape, grad_checkpoint=True)["gradient"].total < 0.6 * base


@pytest.mark.parametrize("master", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("moment", [mx.float32, mx.bfloat16])
def test_the_state_of_a_run_is_its_weights_and_moments(master, moment):
    """The bytes called held are those of a TrainState."""
    module, _ = module_of()
    params = map_arrays(lambda a: a.astype(master), g.Policy.from_module(module).params)
    state = g.init_state(params, g.adamw(1e-4, moment_dtype=moment), key=mx.random.key(0))
    g.materialize(state)
    trained = sum(leaf.size for leaf in arrays_of(params))
    weights = WeightSizes(trained=trained, master=master.size, compute=4, moment=moment.size)
    assert floor(weights) - weights.gradients == nbytes(state.params, state.opt_state) - 4  # the step counter
