"""The specification: every formula of the loss and of sampling in plain NumPy float64, with gradients.

Written from the papers' formulas, one token at a time, without vectorisation tricks and without a look at
the library. Where the two disagree, this file is compared with the formula first.

A `spec` is any object with LossSpec's fields. Arrays are [B,T] float64, `mask` is 0/1.
"""

import math
from types import SimpleNamespace

import numpy as np

LOG_RATIO_LIMIT = 20.0
K3_LINEAR_FROM = math.log(1e4)
STD_FLOOR = 1e-4


def clamp(value, low, high):
    """(value limited to [low, high], its derivative there)."""
    return min(max(value, low), high), 1.0 if low < value < high else 0.0


def sigmoid(z):
    """1/(1 + exp(−z)), without overflow."""
    return 1.0 / (1.0 + math.exp(-z)) if z >= 0 else math.exp(z) / (1.0 + math.exp(z))


def surrogate(spec, r, advantage, logp, held_r, held_logp):
    """(ℓ, ∂ℓ/∂r, ∂ℓ/∂logp with r held) of one token; `held_…` is what stands inside a stop-gradient.

    clip: PPO eq. 7 with DAPO's ε_high and the two-sided bound δ. dual_clip: arXiv 1912.09729 eq. 5.
    cispo: MiniMax-M1 eq. 4. sapo: arXiv 2511.20347. none: the policy gradient, r ≡ exp(logp − sg(logp)).
    """
    a = advantage
    low, high = 1.0 - spec.epsilon_low, 1.0 + epsilon_high(spec)
    if spec.surrogate in ("clip", "dual_clip"):
        bounded = r if spec.delta is None else min(r, spec.delta)
        value = -min(bounded * a, clamp(r, low, high)[0] * a)
        if spec.surrogate == "dual_clip" and a < 0:
            value = min(value, -spec.dual_clip * a)
        # A > 0: −A·min(r, 1+ε_high), the lower clip never binds. A < 0: |A|·max(min(r, δ), 1−ε_low), at most
        # c·|A|; as δ > 1+ε_high, the upper clip never binds.
        ceiling = min(spec.delta or math.inf, spec.dual_clip or math.inf)
        moves = r < high if a > 0 else low < r < ceiling
        return value, -a * moves, 0.0
    if spec.surrogate == "cispo":
        weight = min(held_r, high)
        return -weight * a * logp, 0.0, -weight * a
    if spec.surrogate == "sapo":
        tau = spec.sapo_tau_pos if a > 0 else spec.sapo_tau_neg
        gate, closed = sigmoid(tau * (r - 1.0)), sigmoid(-tau * (r - 1.0))
        return -(4.0 / tau) * gate * a, -4.0 * gate * closed * a, 0.0
    if spec.surrogate == "likelihood":
        return -a * logp, 0.0, -a
    r = math.exp(logp - held_logp)
    return -r * a, 0.0, -r * a


def epsilon_high(spec):
    """ε_high, which is ε_low where it is left out."""
    return spec.epsilon_low if spec.epsilon_high is None else spec.epsilon_high


def kl_estimate(kind, logp, ref):
    """(estimate of KL(π_θ ‖ π_ref) at one token, its derivative in logp), Schulman (2020), y = ref − logp.

    k2 past |y| = 20 and k3 past y = ln 1e4 are their tangents there.
    """
    y = ref - logp
    if kind == "k1":
        return -y, 1.0
    if kind == "k2":
        if abs(y) <= LOG_RATIO_LIMIT:
            return y * y / 2.0, -y
        edge = math.copysign(LOG_RATIO_LIMIT, y)
        return edge * edge / 2.0 + edge * (y - edge), -edge
    if y <= K3_LINEAR_FROM:
        return math.exp(y) - y - 1.0, -(math.exp(y) - 1.0)
    edge = K3_LINEAR_FROM
    slope = math.exp(edge) - 1.0
    return math.exp(edge) - edge - 1.0 + slope * (y - edge), -slope


def sequence_ratio(spec, d_t):
    """q of one sequence: exp of the mean of its tokens' d, or of their sum."""
    total = sum(d_t) if spec.sequence_ratio == "product" else sum(d_t) / max(len(d_t), 1)
    return math.exp(clamp(total, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[0])


def correction(spec, d_t):
    """Weights of one sequence's counted tokens, d = log π_old − log μ: TIS, IcePop, the sequence forms."""
    if spec.correction == "none":
        return [1.0] * len(d_t)
    ratios, q = [math.exp(d) for d in d_t], sequence_ratio(spec, d_t)
    if spec.correction == "token_truncate":
        weights = [max(min(r, spec.correction_cap), spec.correction_floor) for r in ratios]
    elif spec.correction == "token_mask":
        lo, hi = spec.correction_range
        weights = [r if lo <= r <= hi else 0.0 for r in ratios]
    elif spec.correction == "sequence_truncate":
        weights = [max(min(q, spec.correction_cap), spec.correction_floor)] * len(d_t)
    elif spec.correction == "sequence_mask_weighted":
        weights = [q] * len(d_t)
    else:
        weights = [1.0] * len(d_t)
    if spec.sequence_range is not None and d_t:
        lo, hi = spec.sequence_range
        if not lo <= q <= hi:
            weights = [0.0] * len(d_t)
    return weights


def denominators(spec, mask, max_completion_length):
    """Per row, what a token's l is divided by before everything is added up."""
    rows, tokens = mask.shape[0], mask.sum()
    lengths = np.maximum(mask.sum(axis=1), 1.0)
    return {
        "sequence_mean": rows * lengths,  # DeepSeekMath eq. 3
        "token_mean": np.full(rows, max(tokens, 1.0)),  # DAPO eq. 8
        "constant": np.full(rows, rows * float(max_completion_length or 1)),  # Dr. GRPO
        "sequence_sum_norm": np.full(rows, float(rows)),  # LUSPO: mean_i( mean_t(l) · |o_i| )
        "sum": np.ones(rows),  # Tinker's losses: Σ l
    }[spec.aggregation]


def token_terms(spec, r, a, logp, *, held_r, held_logp, weight, ref, entropy):
    """l = w·ℓ + β·KL − c·H of one counted token and its gradients.

    Returns `value`, `by_r`, `by_logp` (r held), the KL estimate `k`, and `size`, `r_size`, `logp_size`: the
    same sums over absolute values, to which rounding is relative.
    """
    value, by_r, by_logp = (weight * part for part in surrogate(spec, r, a, logp, held_r, held_logp))
    term = SimpleNamespace(value=value, by_r=by_r, by_logp=by_logp, k=0.0)
    term.size, term.r_size, term.logp_size = abs(value), abs(by_r), abs(by_logp)
    if spec.surrogate == "sapo":  # where the gate is open, 1 − σ keeps absolute precision only
        term.r_size = abs(weight * 4.0 * a) * sigmoid(spec.sapo_tau_pos * (r - 1.0))
    if ref is not None:
        term.k, slope = kl_estimate(spec.kl, logp, ref)
        # k3 cancels near y = 0, and its slope is 1 − exp(y): rounding is relative to exp(y) + |y| + 1.
        y = ref - logp
        size = abs(term.k) + abs(slope) + (2.0 * abs(y) + 2.0 if spec.kl == "k3" else 0.0)
        times = spec.beta * (r if spec.kl_bias_corrected else 1.0)
        term.value, term.size = term.value + times * term.k, term.size + times * size
        term.by_logp, term.logp_size = term.by_logp + times * slope, term.logp_size + times * size
        if spec.kl_bias_corrected:
            term.by_r, term.r_size = term.by_r + spec.beta * term.k, term.r_size + spec.beta * size
    if spec.entropy_coef:
        term.value -= spec.entropy_coef * entropy
        term.size += spec.entropy_coef * abs(entropy)
    return term


def policy_loss(spec, logp, adv, mask, *, old=None, rollout=None, ref=None, max_completion_length=None,
                entropy=None, keep=None, held_logp=None):  # fmt: skip
    """Loss, gradients in logp and entropy, statistics, and how near each decision was to turning over.

    `held_logp` is what stop-gradients see: logp itself, unless a finite difference moves logp alone.
    `loss_scale` and `grad_scale` are the loss and the gradient over absolute values. `margin` is the smallest
    relative distance of any quantity to a kink or threshold.
    """
    mask = np.asarray(mask, dtype=np.float64)
    held_logp = logp if held_logp is None else held_logp
    old = held_logp if old is None else old
    out = SimpleNamespace(loss=0.0, loss_scale=0.0)
    out.grad, out.grad_scale, out.entropy_grad = (np.zeros(mask.shape) for _ in range(3))
    seen, edges = [], [math.inf]
    share = denominators(spec, mask, max_completion_length)
    for i in range(mask.shape[0]):
        places = [t for t in range(mask.shape[1]) if mask[i, t]]
        n = max(len(places), 1)
        x, held_x = (ratio_logs(spec, source[i] - old[i], places) for source in (logp, held_logp))
        drift = {t: 0.0 if rollout is None else old[i, t] - rollout[i, t] for t in places}
        d = {t: clamp(drift[t], -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[0] for t in places}
        weights = dict(zip(places, correction(spec, list(d.values())), strict=True))
        edges += correction_edges(spec, list(d.values()))
        for t in places:
            log_r, inside = clamp(x[t], -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            r = math.exp(log_r)
            h = 0.0 if entropy is None else entropy[i, t]
            held = {
                "held_r": math.exp(clamp(held_x[t], -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[0]),
                "held_logp": held_logp[i, t],
                "weight": weights[t] * (1.0 if keep is None else keep[i, t]),
                "ref": None if ref is None else ref[i, t],
            }
            term = token_terms(spec, r, adv[i], logp[i, t], entropy=h, **held)
            out.loss += term.value / share[i]
            out.loss_scale += term.size / share[i]
            out.grad[i, t] += term.by_logp / share[i]
            out.grad_scale[i, t] += term.logp_size / share[i]
            out.entropy_grad[i, t] = -spec.entropy_coef / share[i]
            # ∂ log r_t/∂ logp_t = 1 for a token's ratio; ∂ log s/∂ logp_u = 1/|o| at every u of a sequence.
            through = {t: 1.0} if spec.level == "token" else dict.fromkeys(places, 1.0 / n)
            for u, slope in through.items():
                out.grad[i, u] += term.by_r * r * inside * slope / share[i]
                out.grad_scale[i, u] += term.r_size * r * inside * slope / share[i]
            edges += ratio_edges(spec, x[t], r)
            seen.append(dict(row=i, r=r, a=adv[i], k=term.k, d=d[t], drift=drift[t], w=weights[t], h=h))
    out.margin = min(edges)
    out.stats = statistics(spec, seen, mask, out.loss)
    rows = float(mask.shape[0])
    by_name = {"token_mean": mask.sum(), "constant": rows * float(max_completion_length or 1), "sum": 0.0}
    out.stats["denominator"] = by_name.get(spec.aggregation, rows)
    return out


def ratio_logs(spec, x_t, places):
    """log r at each counted token before the clamp: its own x, or the mean over the sequence (GSPO eq. 7)."""
    if spec.level == "token":
        return {t: x_t[t] for t in places}
    return dict.fromkeys(places, sum(x_t[t] for t in places) / max(len(places), 1))


def ratio_edges(spec, log_ratio, r):
    """Relative distances of a ratio from every kink of the loss or of a clip statistic."""
    bounds = [1.0 - spec.epsilon_low, 1.0 + epsilon_high(spec), spec.delta, spec.dual_clip]
    return [abs(abs(log_ratio) / LOG_RATIO_LIMIT - 1.0)] + [abs(r / b - 1.0) for b in bounds if b]


def correction_edges(spec, d_t):
    """The same for the decisions of the rollout correction."""
    edges = []
    if spec.correction == "token_mask":
        edges += [abs(math.exp(d) / b - 1.0) for d in d_t for b in spec.correction_range if b]
    if spec.sequence_range is not None and d_t:
        edges += [abs(sequence_ratio(spec, d_t) / b - 1.0) for b in spec.sequence_range if b]
    return edges


def statistics(spec, seen, mask, loss):
    """Every field of LossStats from the list of counted tokens; 0 where there is none."""
    n = max(len(seen), 1)

    def mean(value):
        return sum(value(s) for s in seen) / n

    def largest(value):
        return max((value(s) for s in seen), default=0.0)

    # The clip shares: of tokens, or, where a sequence has one ratio, of sequences (as in TRL). clip and
    # dual_clip clip both sides, cispo caps the weight, the others clip nothing.
    clipping = list({s["row"]: s for s in seen}.values()) if spec.level == "sequence" else seen
    ratios = max(len(clipping), 1)
    low = sum(s["r"] < 1.0 - spec.epsilon_low and s["a"] < 0 for s in clipping) / ratios
    high = sum(s["r"] > 1.0 + epsilon_high(spec) and s["a"] > 0 for s in clipping) / ratios
    low *= spec.surrogate in ("clip", "dual_clip")
    high *= spec.surrogate in ("clip", "dual_clip", "cispo")
    return {
        "loss": loss,
        "num_tokens": float(len(seen)),
        "num_sequences": float((mask.sum(axis=1) > 0).sum()),
        "kl": mean(lambda s: s["k"]),
        "entropy": mean(lambda s: s["h"]),
        "teacher_kl": 0.0,
        "num_ratios": float(len(clipping)),
        "clip_low": low,
        "clip_high": high,
        "clip_region": low + high,
        "ratio_mean": mean(lambda s: s["r"]),
        "ratio_min": -largest(lambda s: -s["r"]),
        "ratio_max": largest(lambda s: s["r"]),
        "logp_diff_mean": mean(lambda s: abs(s["drift"])),
        "logp_diff_max": largest(lambda s: abs(s["drift"])),
        "is_ratio_mean": mean(lambda s: math.exp(s["d"])),
        "is_ratio_min": -largest(lambda s: -math.exp(s["d"])),
        "is_ratio_max": largest(lambda s: math.exp(s["d"])),
        "is_ratio_sq_mean": mean(lambda s: math.exp(2.0 * s["d"])),
        "sampling_kl_k1": mean(lambda s: -s["d"]),
        "sampling_kl_k3": mean(lambda s: math.exp(s["d"]) - s["d"] - 1.0),
        "masked_fraction": mean(lambda s: s["w"] == 0.0),
    }


def kept_tokens(z, top_p, top_k, min_p):
    """The tokens that top-k, then top-p, then min-p keep, and how close any was to the other side."""
    kept, margin = np.ones(len(z), bool), np.inf

    def left():
        p = np.exp(np.where(kept, z - z.max(), -np.inf))
        return p / p.sum()

    if top_k:
        kept &= np.isin(np.arange(len(z)), np.argsort(-z)[:top_k])
    if top_p < 1:
        p = left()
        order = np.argsort(-p)
        ahead = np.cumsum(p[order]) - p[order]
        margin = np.abs(ahead - top_p)[1 : kept.sum()].min(initial=np.inf)
        kept[order[ahead >= top_p]] = False
    if min_p:
        p = left()
        margin = min(margin, np.abs(p / p.max() - min_p)[kept].min())
        kept &= p >= min_p * p.max()
    return kept, margin
