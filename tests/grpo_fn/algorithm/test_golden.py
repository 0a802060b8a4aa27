"""Published numbers and small cases worked out by hand.

Published: the unit tests of NeMo-RL (github.com/NVIDIA-NeMo/RL, tests/unit/algorithms):
test_loss_functions.py and data/clipped_pg_loss_goldens.json (computed there in float64) for the loss,
test_reward_functions.py for the overlong penalty. Its advantages are per token, ours per sequence, so each
of its tokens becomes a row.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g


def loss_and_grad(spec, logp, adv, mask=None, **arrays):
    """(loss, gradient in logp, stats) of rows given as lists; [B,T]."""
    logp, adv = (mx.array(np.array(x, np.float32)) for x in (logp, adv))
    mask = mx.ones(logp.shape) if mask is None else mx.array(np.array(mask, np.float32))
    given: Any = {f"{name}_bt": mx.array(np.array(rows, np.float32)) for name, rows in arrays.items()}
    (loss, stats), grad = mx.value_and_grad(lambda x: g.policy_loss(x, adv, mask, spec, **given))(logp)
    return float(loss), np.array(grad), stats


def spec_of(**fields):
    """Token level and token mean, as in NeMo-RL's cases."""
    return g.LossSpec(aggregation="token_mean", **fields)


# The five counted tokens of NeMo-RL's JSON file (two sequences, of three and two tokens).
FIVE = dict(
    adv=[1.2, -0.7, 0.4, -1.1, 0.6],
    logp=[-1.6, -0.8, -1.1, -0.7, -1.4],
    old_logp=[-1.0, -1.1, -0.8, -0.9, -1.0],
)
DRAWN = FIVE | dict(rollout_logp=[-1.2, -1.5, -0.7, -1.4, -0.7])
ON_POLICY = {name: FIVE[name] for name in ("adv", "logp")}
FAR = FIVE | dict(old_logp=[-1.0, -3.0, -0.8, -0.9, -1.0])
TRUNCATED = dict(correction="token_truncate", correction_cap=1.3)  # NeMo-RL's lower bound 0.7 binds nowhere
MASKED = dict(correction="token_mask", correction_range=(0.75, 1.25))
CISPO = dict(surrogate="cispo", epsilon_high=0.2, correction="token_truncate", correction_cap=1e6)
PPO_GRADIENT = [-0.131714792, 0.188980233, -0.0592654575, 0.268708606, -0.0804384054]
TIS_GRADIENT = [-0.160876811, 0.245674302, -0.0536256036, 0.349321188, -0.0595902363]


@pytest.mark.parametrize(
    ("fields", "tokens", "loss", "grad"),
    [
        # clipped_pg_loss_goldens.json: ppo_token, dual_clip, force_on_policy, tis_token, icepop_token
        ({}, FIVE, 0.186270184, PPO_GRADIENT),
        (
            dict(surrogate="dual_clip", dual_clip=3.0),
            FAR,
            0.41728995,
            [*PPO_GRADIENT[:1], 0.0, *PPO_GRADIENT[2:]],
        ),
        ({}, ON_POLICY, -0.08, [-0.24, 0.14, -0.08, 0.22, -0.12]),
        (TRUNCATED, DRAWN, 0.32090284, TIS_GRADIENT),
        (MASKED, DRAWN, -0.214502414, [TIS_GRADIENT[0], 0.0, TIS_GRADIENT[2], 0.0, 0.0]),
        # cispo_with_token_is: NeMo-RL also bounds the weight from below, which binds the other three tokens;
        # the paper and we do not
        (CISPO, DRAWN, None, [None, 0.2506265487024803, None, 0.435262414594309, None]),
        # test_clipped_pg_loss_kl_gradient_includes_sampling_term: β·r·(k3 + 1 − exp x)/2 = −β·r·x/2 with
        # x = ref − logp = 0.3, −0.4 and r = exp(logp − old) = exp(0.3), exp(−0.3), β = 0.3
        (
            dict(beta=0.3, kl_bias_corrected=True),
            dict(adv=[0, 0], logp=[-1.2, -0.7], old_logp=[-1.5, -0.4], ref_logp=[-0.9, -1.1]),
            None,
            [-0.3 * np.exp(0.3) * 0.3 / 2, 0.3 * np.exp(-0.3) * 0.4 / 2],
        ),
        # By hand from here on. DAPO, ε 0.2/0.28: r = 1.5 gains 1.28 on A = 1, r = 0.5 costs 0.8 on A = −1
        (
            g.preset("dapo"),
            dict(adv=[1, -1], logp=np.log([1.5, 0.5]), old_logp=[0, 0]),
            (-1.28 + 0.8) / 2,
            [0, 0],
        ),
        # A = −1, δ = 4: ratio 2 costs 2 with slope 2, ratio 10 costs 4 with slope 0; A = +1 never sees δ
        (
            dict(delta=4.0),
            dict(adv=[-1, -1, 1], logp=np.log([2.0, 10.0, 10.0]), old_logp=[0, 0, 0]),
            (2.0 + 4.0 - 1.2) / 3,
            [2.0 / 3, 0.0, 0.0],
        ),
        # r = 8, cap 5, A = 2, log π = −0.5: ℓ = −5·2·(−0.5) = 5, slope −10: the weight is a constant
        (
            dict(surrogate="cispo", epsilon_high=4.0),
            dict(adv=[2], logp=[-0.5], old_logp=[-0.5 - np.log(8.0)]),
            5.0,
            [-10.0],
        ),
        # the plain policy gradient: value −A and slope −A however far π_old is
        (dict(surrogate="none"), dict(adv=[3], logp=[-0.5], old_logp=[-7]), -3.0, [-3.0]),
        # r = 2: A = 1 gives −4σ(1), slope −4σ'(1)·2; A = −1 gives (4/1.05)·σ(1.05), slope 4σ'(1.05)·2
        (dict(surrogate="sapo"), dict(adv=[1], logp=[np.log(2)], old_logp=[0]), -2.9242343, [-1.5728955]),
        (dict(surrogate="sapo"), dict(adv=[-1], logp=[np.log(2)], old_logp=[0]), 2.8219996, [1.5362196]),
    ],
)
def test_losses_and_gradients_of_tokens(fields, tokens, loss, grad):
    """Each token is a row; None where nothing is published."""
    rows = {name: np.array(values)[:, None] for name, values in tokens.items() if name != "adv"}
    spec = fields if isinstance(fields, g.LossSpec) else spec_of(**fields)
    got, got_grad, _ = loss_and_grad(spec, adv=tokens["adv"], **rows)
    assert loss is None or got == pytest.approx(loss, rel=1e-5)
    wanted = np.array(grad, float)
    known = ~np.isnan(wanted)
    np.testing.assert_allclose(got_grad[known, 0], wanted[known], rtol=1e-5, atol=1e-9)


# Two sequences with d = log π_old − log μ of (ln 2, ln 2, 0) and (ln 2, −ln 4): products 4 and ½, geometric
# means 4^⅓ = 1.5874 and √½ = 0.7071. On-policy and with A = 1 a token of weight w adds −w to a sum of five.
TWO_OLD = [[-1.0, -1.0, -1.0], [-1.0, -1.0, 0.0]]
TWO_SAMPLER = [[-1.0 - np.log(2), -1.0 - np.log(2), -1.0], [-1.0 - np.log(2), -1.0 + np.log(4), 0.0]]
TWO_MASK = [[1, 1, 1], [1, 1, 0]]
PRODUCT: Any = dict(sequence_ratio="product")
TO_3 = dict(sequence_range=(0.0, 3.0))


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        (dict(correction="sequence_mask_weighted", **TO_3), (4 ** (1 / 3), 0.5**0.5)),
        (dict(correction="sequence_mask_weighted", **TO_3, **PRODUCT), (0.0, 0.5)),  # TRL's default
        (dict(correction="sequence_mask", **TO_3, **PRODUCT), (0.0, 1.0)),
        (dict(correction="sequence_truncate", correction_cap=1.5), (1.5, 0.5**0.5)),
        # TRL's `sequence_truncate`, C_min 0.8, C_max 3
        (
            dict(correction="sequence_truncate", correction_cap=3.0, correction_floor=0.8, **PRODUCT),
            (3.0, 0.8),
        ),
        (dict(correction="token_truncate", **TO_3, **PRODUCT), (0.0, (2.0 + 0.25) / 2)),
        # TRL's `vllm_importance_sampling_clip_min` = ½
        (dict(correction="token_truncate", correction_floor=0.5), (5 / 3, (2.0 + 0.5) / 2)),
    ],
)
def test_sequence_corrections(fields, weights):
    """Each sequence form by hand, with the geometric mean and with TRL's product over the tokens."""
    loss, grad, _ = loss_and_grad(
        spec_of(**fields), TWO_OLD, [1.0, 1.0], mask=TWO_MASK, rollout_logp=TWO_SAMPLER
    )
    assert loss == pytest.approx(-(3 * weights[0] + 2 * weights[1]) / 5, rel=1e-5)
    np.testing.assert_allclose(-grad.sum(axis=1) * 5, [3 * weights[0], 2 * weights[1]], rtol=1e-5, atol=1e-7)


def test_sequence_mask():
    """clipped_pg_loss_goldens.json, seq_mask_tis, range 0.95 … 1.15: the first sequence is dropped whole.

    Geometric means exp(0.5/3) = 1.181 and exp(0.2/2) = 1.105. One row per counted token: its whole sequence,
    with the token's advantage, and only the token itself kept; so losses and gradients of the rows add up.
    """
    spec = spec_of(correction="token_truncate", correction_cap=1e6, sequence_range=(0.95, 1.15))
    spans = [slice(0, 3)] * 3 + [slice(3, 5)] * 2
    rows = {
        name: [[*values[span], 0.0][:3] for span in spans] for name, values in DRAWN.items() if name != "adv"
    }
    keep = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    mask = [[1, 1, 1]] * 3 + [[1, 1, 0]] * 2
    loss, grad, stats = loss_and_grad(spec, adv=DRAWN["adv"], mask=mask, keep=keep, **rows)
    times = 13 / 5  # our rows count 3·3 + 2·2 tokens, NeMo-RL's five
    assert loss * times == pytest.approx(0.383435358421665, rel=1e-5)
    wanted = [0, 0, 0, 0.4430255947574536, -0.059590236335788666]
    np.testing.assert_allclose(grad[np.array(keep, bool)] * times, wanted, rtol=1e-5, atol=1e-9)
    assert float(stats.masked_fraction) == pytest.approx(9 / 13)


def test_gspo_gradient():
    """clipped_pg_loss_goldens.json, gspo_sequence_is: value and gradient of two sequences.

    Nothing is clipped there, so the loss is linear in A: each sequence's advantage is the mean of its
    tokens'. Its weights are the products over the sequences, exp(0.5) and exp(0.2), without a bound.
    """
    spec = g.LossSpec(level="sequence", correction="sequence_truncate", correction_cap=1e6, **PRODUCT)
    rows = {name: [values[:3], [*values[3:], 0.0]] for name, values in DRAWN.items() if name != "adv"}
    loss, grad, _ = loss_and_grad(spec, adv=[0.3, -0.25], mask=TWO_MASK, **rows)
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
    for ref, value in zip([0.0, -15.0, -30.0], wanted, strict=True):
        loss, _, _ = loss_and_grad(spec_of(beta=1.0, kl=kind), [[-1.0]], [0.0], ref_logp=[[ref]])
        assert loss == pytest.approx(value, rel=1e-4)


def test_overlong_penalty():
    """test_reward_shaping_with_penalties: limit 25, buffer 5, penalty 0.5 on lengths 10, 22, 25.

    Its fourth length, 30, is past the limit, which a sampler cannot reach: there NeMo-RL runs on along the
    line, to reward −0.6; eq. 13 stops at −1 · 0.5, reward −0.1.
    """
    lengths, rewards = mx.array([10, 22, 25, 30]), np.array([1.0, 0.8, 0.6, 0.4])
    bounded = np.array(g.overlong_penalty(lengths, 25, 5, 0.5))
    np.testing.assert_allclose(rewards + bounded, [1.0, 0.6, 0.1, -0.1], atol=1e-6)
