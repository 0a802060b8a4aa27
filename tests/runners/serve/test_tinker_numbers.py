"""Tinker's wire against its definitions: gradients, optimizer steps, log-probs of samples."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import grpo_fn as g

pytest.importorskip("tinker")
from runners.serve.tinker import wire
from tests.support.training_server import training

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
BAND = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
CONFIG = {"ppo": BAND, "cispo": BAND, "gspo": BAND, "dro": {"beta": 0.3}}


@pytest.fixture(scope="module", name="caller")
def _caller(tmp_path_factory):
    with training(tmp_path_factory.mktemp("weights")) as caller:
        yield caller


def draw(random, loss, caller=None):
    """A random batch for a loss: rows of random lengths with random targets; the sampler is close to the
    model."""
    data = []
    for _ in range(random.integers(1, 5)):
        size = int(random.integers(1, 24))
        targets = random.integers(0, 640, size)
        arrays = {"target_tokens": targets}
        if loss == "cross_entropy":
            arrays |= {"weights": random.normal(size=size) * (random.random(size) < 0.7)}
        else:
            arrays |= {"advantages": random.normal(size=size)}
        if loss == "gspo":
            arrays["sequence_ratio_mask"] = (np.arange(size) >= size // 3).astype(np.float32)
            arrays["advantages"] *= arrays["sequence_ratio_mask"]
        data.append((random.integers(0, 640, size), arrays))
    if loss != "cross_entropy":
        bare = [(tokens, {"target_tokens": arrays["target_tokens"]}) for tokens, arrays in data]
        logp, _ = caller.forward(bare, forward_only=True)
        for (_, arrays), row in zip(data, logp, strict=True):
            arrays["logprobs"] = (row + random.normal(scale=0.3, size=len(row))).astype(np.float32)
    return data


def defined(loss, logp, arrays, config):
    """Tinker's definition of a row's loss, from https://tinker-docs.thinkingmachines.ai/tinker/losses."""
    if loss == "cross_entropy":
        return -(logp * arrays["weights"]).sum()
    drawn, advantages = arrays["logprobs"], arrays["advantages"]
    ratio = mx.exp(logp - drawn)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "cispo":
        return -(mx.stop_gradient(mx.clip(ratio, low, high)) * logp * advantages).sum()
    if loss == "dro":
        return -(logp * advantages - 0.5 * config.get("beta", 0.05) * mx.square(logp - drawn)).sum()
    if loss == "gspo":
        mask = arrays["sequence_ratio_mask"]
        held = mx.stop_gradient(logp)
        ratio = mx.exp(((held - drawn) * mask).sum() / mask.sum() + logp - held)
    return -mx.minimum(ratio * advantages, mx.clip(ratio, low, high) * advantages).sum()


def gradient(policy, params, data, loss, config):
    """The sum of the rows' losses, its gradient, and their log-probs, row by row."""
    seen = []

    def total(params):
        seen.clear()
        losses = []
        for tokens, arrays in data:
            logits = policy.logits(params, mx.array(tokens[None], mx.int32))[0].astype(mx.float32)
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            targets = mx.array(arrays["target_tokens"], mx.int32)[:, None]
            logp = mx.take_along_axis(logits, targets, axis=1)[:, 0]
            seen.append(logp)
            held = {name: mx.array(np.float32(values)) for name, values in arrays.items()}
            losses.append(defined(loss, logp, held, config))
        return mx.stack(losses).sum()

    value, grads = mx.value_and_grad(total)(params)
    return value.item(), grads, [np.array(each) for each in total(params) is not None and seen]


def differ(one, other):
    """The largest difference of two trees, relative to the largest number."""
    pairs = list(zip(tree_flatten(one), tree_flatten(other), strict=True))
    most = max(mx.abs(b).max().item() for _, (_, b) in pairs)
    return max(mx.abs(a - b).max().item() for (_, a), (_, b) in pairs) / max(most, 1e-8)


def model_of(caller):
    """The model behind a caller."""
    return caller.server._slots[caller.model].found


def policy_of(model):
    """The policy of its learner."""
    return model.step.__wrapped__.args[0]


def test_gradients_are_those_of_the_definitions(caller):
    """50 random batches, with each loss and its parameters, on adapters that are not at their initial
    values."""
    random = np.random.default_rng(0)
    caller.train()
    caller.forward(draw(random, "cross_entropy"))
    caller.step(learning_rate=0.01)
    for number in range(50):
        loss = LOSSES[number % len(LOSSES)]
        config = CONFIG.get(loss, {}) if number % 2 else {}
        data = draw(random, loss, caller)
        model = model_of(caller)
        policy = policy_of(model)
        value, grads, logp = gradient(policy, model.state.params, data, loss, config)
        before = model.state.accum_grads
        seen, metrics = caller.forward(data, loss, config)
        added = g.map_arrays(lambda a: a, model.state.accum_grads)
        added = [(n, a - b) for (n, a), (_, b) in zip(tree_flatten(added), tree_flatten(before), strict=True)]
        assert differ([a for _, a in added], [b for _, b in tree_flatten(grads)]) < 1e-5, (number, loss)
        assert math.isclose(metrics["loss:sum"], value, rel_tol=1e-4, abs_tol=1e-4)
        for one, other in zip(seen, logp, strict=True):
            assert np.abs(one - other).max() < 1e-4
        forward, same = caller.forward(data, loss, config, forward_only=True)
        assert math.isclose(same["loss:sum"], value, rel_tol=1e-4, abs_tol=1e-4)
        assert np.abs(np.concatenate(forward) - np.concatenate(logp)).max() < 1e-4
        caller.step(learning_rate=0.0)


def test_weights_are_those_of_a_loop_of_ours(caller):
    """10 steps with different rates, decay and clipping equal single rows in a loop. ε is large:
    otherwise, Adam turns the rounding of nearly zero gradients into whole steps."""
    random = np.random.default_rng(1)
    caller.train(rank=2)
    model = model_of(caller)
    policy = policy_of(model)
    grad_step = g.make_grad_step(policy, g.LossSpec(surrogate="likelihood", aggregation="sum"))
    start = model.state.params
    optimizer = g.adamw(1.0)
    update = g.make_update_step(optimizer)
    state = g.init_state(start, optimizer, key=mx.random.key(0))
    for number in range(10):
        data = draw(random, "cross_entropy")
        rates = {"learning_rate": 2e-4 * (number + 1), "beta1": 0.8, "eps": 1e-2, "weight_decay": 0.1}
        rates |= {"grad_clip_norm": 0.5 if number % 2 else 0.0}
        caller.forward(data)
        caller.step(**rates)
        for tokens, arrays in data:  # row by row
            tokens, targets = tokens.tolist(), arrays["target_tokens"].tolist()
            batch = g.batch_of([(tokens[:1], [*tokens[1:], targets[-1]])], [arrays["weights"].tolist()])
            object.__setattr__(batch, "targets_bt", mx.array([targets], mx.int32))
            state, _ = grad_step(state, batch)
        clip = rates.pop("grad_clip_norm") or None
        betas = (rates.pop("beta1"), 0.95)
        state, _ = update(state, g.Rates(betas=betas, max_grad_norm=clip, **rates))
    assert differ(model.state.params, state.params) < 1e-5
    assert differ(model.state.params, start) > 1e-3


def test_sampled_log_probs_are_the_learner_s(caller):
    """They agree to 1e-4, also on the prompt; a seed repeats its samples, and num_samples gives different
    ones."""
    random = np.random.default_rng(2)
    caller.train(train_mlp=False)
    caller.forward(draw(random, "cross_entropy"))
    caller.step(learning_rate=0.02)
    order = caller.order()
    way = caller.result("save_weights_for_sampler", **order, sampling_session_seq_id=0)["sampling_session_id"]
    prompt = random.integers(0, 640, 9).tolist()
    asked = {"sampling_session_id": way, "num_samples": 4, "prompt": {"chunks": [{"tokens": prompt}]}}
    asked |= {"sampling_params": {"max_tokens": 12, "seed": 3, "stop": []}, "prompt_logprobs": True}
    answers = [
        wire.messages.SampleResponse.FromString(caller.result("asample", **asked, seq_id=n)) for n in (0, 1)
    ]
    assert answers[0] == answers[1]
    rows = [
        (np.frombuffer(each.tokens, np.int32), np.frombuffer(each.logprobs, np.float32))
        for each in answers[0].sequences
    ]
    assert len({row.tobytes() for row, _ in rows}) == 4 and all(len(row) == 12 for row, _ in rows)
    scores = np.frombuffer(answers[0].prompt_logprobs, np.float32)
    assert np.isnan(scores[0])
    for tokens, logp in rows:
        whole = np.array([*prompt, *tokens])
        (seen,), _ = caller.forward([(whole[:-1], {"target_tokens": whole[1:]})], forward_only=True)
        assert np.abs(seen[len(prompt) - 1 :] - logp).max() < 1e-4
        assert np.abs(seen[: len(prompt) - 1] - scores[1:]).max() < 1e-4
    last = wire.messages.SampleResponse.FromString(
        caller.result("asample", **asked, seq_id=2, prompt_logprobs_last_n=3)
    )
    tail = np.frombuffer(last.prompt_logprobs, np.float32)
    assert np.isnan(tail[:-3]).all() and np.abs(tail[-3:] - scores[-3:]).max() < 1e-4
