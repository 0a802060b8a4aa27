"""Published numbers and small cases worked out by hand.

Published: the unit tests of NeMo-RL (github.com/NVIDIA-NeMo/RL, tests/unit/algorithms):
test_loss_functions.py and data/clipped_pg_loss_goldens.json (computed there in float64) for the loss,
test_reward_functions.py for the overlong penalty. Its advantages are per token, ours per sequence, so each
of its tokens becomes a row.
"""

import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g


def loss_and_grad(spec, logp, adv, mask=None, **arrays):
    """(loss, gradient in logp, stats) of rows given as lists; [B,T]."""
    logp = mx.array(np.array(logp, np.float32))
    mask = mx.ones(logp.shape) if mask is None else mx.array(np.array(mask, np.float32))
    limit = arrays.pop("max_completion_length", None)
    given = {f"{name}_bt": mx.array(np.array(rows, np.float32)) for name, rows in arrays.items()}

    def of(logp):
        return g.policy_loss(
            logp, mx.array(np.array(adv, np.float32)), mask, spec, max_completion_length=limit, **given
        )

    (loss, stats), grad = mx.value_and_grad(of)(logp)
    return float(loss), np.array(grad), stats


def column(values):
    """Tokens as rows of one token each."""
    return [[value] for value in values]


def token_spec(**fields):
    """Token level and token mean, as in NeMo-RL's cases."""
    return g.LossSpec(aggregation="token_mean", **fields)


# The three tokens of NeMo-RL's hand calculations: ratios 0.5, 1.0, 1.5 to the old policy.
THREE_LOGP, THREE_OLD, THREE_ADV = [-1.69315, -1.0, -0.59453], [-1.0, -1.0, -1.0], [1.0, -1.0, 2.0]
# The five counted tokens of its JSON file (two sequences, of three and two tokens).
FIVE_ADV = [1.2, -0.7, 0.4, -1.1, 0.6]
FIVE_LOGP, FIVE_OLD = [-1.6, -0.8, -1.1, -0.7, -1.4], [-1.0, -1.1, -0.8, -0.9, -1.0]
FIVE_SAMPLER = [-1.2, -1.5, -0.7, -1.4, -0.7]


@pytest.mark.parametrize(
    ("fields", "old", "loss", "grad"),
    [
        # case ppo_token
        ({}, FIVE_OLD, 0.186270184, [-0.131714792, 0.188980233, -0.0592654575, 0.268708606, -0.0804384054]),
        # case dual_clip: the second token's old log-prob is −3
        (
            dict(surrogate="dual_clip", dual_clip=3.0),
            [-1.0, -3.0, -0.8, -0.9, -1.0],
            0.41728995,
            [-0.131714792, 0.0, -0.0592654575, 0.268708606, -0.0804384054],
        ),
        # case force_on_policy
        ({}, None, -0.08, [-0.24, 0.14, -0.08, 0.22, -0.12]),
        # case tis_token, cap 1.3 (its lower bound 0.7 binds nowhere)
        (
            dict(correction="token_truncate", correction_cap=1.3),
            FIVE_OLD,
            0.32090284,
            [-0.160876811, 0.245674302, -0.0536256036, 0.349321188, -0.0595902363],
        ),
        # case icepop_token, range 0.75 … 1.25
        (
            dict(correction="token_mask", correction_range=(0.75, 1.25)),
            FIVE_OLD,
            -0.214502414,
            [-0.160876811, 0.0, -0.0536256036, 0.0, 0.0],
        ),
    ],
)
def test_token_losses_and_gradients(fields, old, loss, grad):
    """clipped_pg_loss_goldens.json: value and gradient of five token-level cases."""
    arrays = {} if old is None else {"old_logp": column(old)}
    if "correction" in fields:
        arrays["rollout_logp"] = column(FIVE_SAMPLER)
    got, got_grad, _ = loss_and_grad(token_spec(**fields), column(FIVE_LOGP), FIVE_ADV, **arrays)
    assert got == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(got_grad[:, 0], grad, rtol=1e-5, atol=1e-9)


def test_cispo():
    """clipped_pg_loss_goldens.json, cispo_with_token_is: the two tokens whose ratio passes 1.2.

    NeMo-RL also bounds the weight from below, which binds the other three; the paper and we do not.
    """
    spec = token_spec(surrogate="cispo", epsilon_high=0.2, correction="token_truncate", correction_cap=1e6)
    arrays = dict(old_logp=column(FIVE_OLD), rollout_logp=column(FIVE_SAMPLER))
    _, grad, _ = loss_and_grad(spec, column(FIVE_LOGP), FIVE_ADV, **arrays)
    np.testing.assert_allclose(grad[[1, 3], 0], [0.2506265487024803, 0.435262414594309], rtol=1e-5)


@pytest.mark.parametrize(("floor", "weights"), [({}, (0.1, 1, 2)), ({"correction_floor": 0.5}, (0.5, 1, 2))])
def test_bounds_of_truncation(floor, weights):
    """Ratios 0.1, 1, 3, cap 2: test_clipped_pg_loss_tis_min_bound_defaults_to_zero, and with TRL's
    `vllm_importance_sampling_clip_min` = ½."""
    spec = token_spec(correction="token_truncate", correction_cap=2.0, **floor)
    loss, _, _ = loss_and_grad(
        spec, column(np.log([0.1, 1.0, 3.0])), [1.0] * 3, rollout_logp=column([0.0] * 3)
    )
    assert loss == pytest.approx(-sum(weights) / 3, rel=1e-5)


# Two sequences with d = log π_old − log μ of (ln 2, ln 2, 0) and (ln 2, −ln 4): products 4 and ½, geometric
# means 4^⅓ = 1.5874 and √½ = 0.7071. On-policy and with A = 1 a token of weight w adds −w to a sum of five.
TWO_OLD = [[-1.0, -1.0, -1.0], [-1.0, -1.0, 0.0]]
TWO_SAMPLER = [[-1.0 - np.log(2), -1.0 - np.log(2), -1.0], [-1.0 - np.log(2), -1.0 + np.log(4), 0.0]]


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        (dict(correction="sequence_mask_weighted", sequence_range=(0.0, 3.0)), (4 ** (1 / 3), 0.5**0.5)),
        # TRL's default: `sequence_mask`, C_max 3
        (
            dict(correction="sequence_mask_weighted", sequence_range=(0.0, 3.0), sequence_ratio="product"),
            (0.0, 0.5),
        ),
        (dict(correction="sequence_mask", sequence_range=(0.0, 3.0), sequence_ratio="product"), (0.0, 1.0)),
        (dict(correction="sequence_truncate", correction_cap=1.5), (1.5, 0.5**0.5)),
        # TRL's `sequence_truncate`, C_min 0.8, C_max 3
        (
            dict(
                correction="sequence_truncate",
                correction_cap=3.0,
                correction_floor=0.8,
                sequence_ratio="product",
            ),
            (3.0, 0.8),
        ),
        (
            dict(correction="token_truncate", sequence_range=(0.0, 3.0), sequence_ratio="product"),
            (0.0, (2.0 + 0.25) / 2),
        ),
    ],
)
def test_sequence_corrections(fields, weights):
    """Each sequence form by hand, with the geometric mean and with TRL's product over the tokens."""
    loss, grad, _ = loss_and_grad(
        token_spec(**fields), TWO_OLD, [1.0, 1.0], mask=[[1, 1, 1], [1, 1, 0]], rollout_logp=TWO_SAMPLER
    )
    assert loss == pytest.approx(-(3 * weights[0] + 2 * weights[1]) / 5, rel=1e-5)
    np.testing.assert_allclose(-grad.sum(axis=1) * 5, [3 * weights[0], 2 * weights[1]], rtol=1e-5, atol=1e-7)


def test_sequence_mask():
    """clipped_pg_loss_goldens.json, seq_mask_tis, range 0.95 … 1.15: the first sequence is dropped whole.

    Geometric means exp(0.5/3) = 1.181 and exp(0.2/2) = 1.105. One row per counted token: its whole sequence,
    with the token's advantage, and only the token itself kept; so losses and gradients of the rows add up.
    """
    spec = token_spec(correction="token_truncate", correction_cap=1e6, sequence_range=(0.95, 1.15))
    spans = [slice(0, 3)] * 3 + [slice(3, 5)] * 2

    def rows(values):
        return [[*values[span], 0.0][:3] for span in spans]

    keep = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    loss, grad, stats = loss_and_grad(
        spec,
        rows(FIVE_LOGP),
        FIVE_ADV,
        mask=[[1, 1, 1]] * 3 + [[1, 1, 0]] * 2,
        old_logp=rows(FIVE_OLD),
        rollout_logp=rows(FIVE_SAMPLER),
        keep=keep,
    )
    times = 13 / 5  # our rows count 3·3 + 2·2 tokens, NeMo-RL's five
    assert loss * times == pytest.approx(0.383435358421665, rel=1e-5)
    own = grad[np.array(keep, bool)] * times
    np.testing.assert_allclose(
        own, [0, 0, 0, 0.4430255947574536, -0.059590236335788666], rtol=1e-5, atol=1e-9
    )
    assert float(stats.masked_fraction) == pytest.approx(9 / 13)


def test_gspo_gradient():
    """clipped_pg_loss_goldens.json, gspo_sequence_is: value and gradient of two sequences.

    Nothing is clipped there, so the loss is linear in A: each sequence's advantage is the mean of its
    tokens'. Its weights are the products over the sequences, exp(0.5) and exp(0.2), without a bound.
    """
    spec = g.LossSpec(
        level="sequence", correction="sequence_truncate", correction_cap=1e6, sequence_ratio="product"
    )
    loss, grad, _ = loss_and_grad(
        spec,
        [[-1.6, -0.8, -1.1], [-0.7, -1.4, 0.0]],
        [0.3, -0.25],
        mask=[[1, 1, 1], [1, 1, 0]],
        old_logp=[[-1.0, -1.1, -0.8], [-0.9, -1.0, 0.0]],
        rollout_logp=[[-1.2, -1.5, -0.7], [-1.4, -0.7, 0.0]],
    )
    assert loss == pytest.approx(-0.06433245613699731, rel=1e-5)
    wanted = [[-0.06749293963637779] * 3, [0.06907318137816686, 0.06907318137816686, 0.0]]
    np.testing.assert_allclose(grad, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "wanted"), [("k1", [-1.0, 14.0, 29.0]), ("k2", [0.5, 98.0, 380.0]), ("k3", [0.7183, 13.0, 28.0])]
)
def test_kl_estimators(kind, wanted):
    """test_calculate_kl: log-probs −1 against 0 and −15. The third is −30, y = −29, where NeMo-RL clamps.

    k1 = 29, k3 = exp(−29) + 29 − 1 = 28; k2 is its tangent at y = −20 there: 20·29 − 200 = 380.
    """
    spec = token_spec(beta=1.0, kl=kind)
    for ref, value in zip([0.0, -15.0, -30.0], wanted, strict=True):
        loss, _, _ = loss_and_grad(spec, [[-1.0]], [0.0], ref_logp=[[ref]])
        assert loss == pytest.approx(value, rel=1e-4)


def test_bias_corrected_kl_gradient():
    """test_clipped_pg_loss_kl_gradient_includes_sampling_term: β·r·(k3 + 1 − exp x)/2 = −β·r·x/2.

    With x = ref − logp = 0.3, −0.4 and r = exp(logp − old) = exp(0.3), exp(−0.3), β = 0.3.
    """
    spec = token_spec(beta=0.3, kl_bias_corrected=True)
    _, grad, _ = loss_and_grad(
        spec, column([-1.2, -0.7]), [0.0, 0.0], old_logp=column([-1.5, -0.4]), ref_logp=column([-0.9, -1.1])
    )
    wanted = [-0.3 * np.exp(0.3) * 0.3 / 2, 0.3 * np.exp(-0.3) * 0.4 / 2]
    np.testing.assert_allclose(grad[:, 0], wanted, rtol=1e-5)


def test_overlong_penalty():
    """test_reward_shaping_with_penalties: limit 25, buffer 5, penalty 0.5 on lengths 10, 22, 25.

    Its fourth length, 30, is past the limit, which a sampler cannot reach: there NeMo-RL runs on along the
    line, to reward −0.6; eq. 13 stops at −1 · 0.5, reward −0.1.
    """
    lengths, rewards = mx.array([10, 22, 25, 30]), np.array([1.0, 0.8, 0.6, 0.4])
    bounded = np.array(g.overlong_penalty(lengths, 25, 5, 0.5))
    np.testing.assert_allclose(rewards + bounded, [1.0, 0.6, 0.1, -0.1], atol=1e-6)


# By hand from here on: what the papers' formulas give for numbers that fit in the head.


@pytest.mark.parametrize(
    ("spec", "logp", "old", "adv", "loss", "grad"),
    [
        # dapo, ε 0.2/0.28: r = 1.5 gains 1.28 on A = 1; r = 0.5 costs 0.8 on A = −1; nothing moves further
        (g.preset("dapo"), np.log([1.5, 0.5]), [0.0, 0.0], [1.0, -1.0], (-1.28 + 0.8) / 2, [0.0, 0.0]),
        # A = −1, δ = 4: ratio 2 costs 2 with slope 2, ratio 10 costs 4 with slope 0; A = +1 never sees δ
        (
            token_spec(delta=4.0),
            np.log([2.0, 10.0, 10.0]),
            [0.0] * 3,
            [-1.0, -1.0, 1.0],
            (2.0 + 4.0 - 1.2) / 3,
            [2.0 / 3, 0.0, 0.0],
        ),
        # r = 8, cap 5, A = 2, log π = −0.5: ℓ = −5·2·(−0.5) = 5, slope −10: the weight is a constant
        (token_spec(surrogate="cispo", epsilon_high=4.0), [-0.5], [-0.5 - np.log(8.0)], [2.0], 5.0, [-10.0]),
        # the plain policy gradient: value −A and slope −A however far π_old is
        (token_spec(surrogate="none"), [-0.5], [-7.0], [3.0], -3.0, [-3.0]),
        # r = 2: A = 1 gives −4σ(1), slope −4σ'(1)·2; A = −1 gives (4/1.05)·σ(1.05), slope 4σ'(1.05)·2
        (token_spec(surrogate="sapo"), [np.log(2.0)], [0.0], [1.0], -2.9242343, [-1.5728955]),
        (token_spec(surrogate="sapo"), [np.log(2.0)], [0.0], [-1.0], 4 / 1.05 * 0.7407749, [1.5362196]),
    ],
)
def test_surrogates(spec, logp, old, adv, loss, grad):
    """Value and slope of each surrogate, tokens as rows."""
    got, got_grad, _ = loss_and_grad(spec, column(logp), adv, old_logp=column(old))
    assert got == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(got_grad[:, 0], grad, rtol=1e-5)
