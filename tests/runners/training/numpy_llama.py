"""The specification of a llama and its gradient in NumPy float64, a sequence at a time.

For tied embeddings and one head of keys and values, as `make_model_folder` makes them.
"""

from types import SimpleNamespace

import numpy as np


def rms_norm(x_ld, weight_d, eps):
    """x·w/√(mean x² + ε), and what its gradient needs."""
    r_l1 = 1.0 / np.sqrt((x_ld**2).mean(-1, keepdims=True) + eps)
    return x_ld * r_l1 * weight_d, (x_ld, r_l1)


def rms_norm_gradient(dy_ld, weight_d, saved):
    """(dx, dw)."""
    x_ld, r_l1 = saved
    g_ld = dy_ld * weight_d
    return r_l1 * g_ld - x_ld * r_l1**3 * (g_ld * x_ld).mean(-1, keepdims=True), (dy_ld * x_ld * r_l1).sum(0)


def rotated(x_lhd, base, sign=1.0):
    """RoPE on halves; sign −1 undoes it, and so is its gradient."""
    length, _, size = x_lhd.shape
    angle = np.arange(length)[:, None] * base ** (-2.0 * np.arange(size // 2) / size)
    cos, sin = np.cos(angle)[:, None], sign * np.sin(angle)[:, None]
    one, two = x_lhd[..., : size // 2], x_lhd[..., size // 2 :]
    return np.concatenate([one * cos - two * sin, one * sin + two * cos], axis=-1)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def forward(weights, config, tokens):
    """Logits [L,V] of a sequence, and a tape for `gradient`."""
    heads, eps, base = (config[name] for name in ("num_attention_heads", "rms_norm_eps", "rope_theta"))
    x, tape = weights["model.embed_tokens.weight"][tokens], []
    future_qk = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for number in range(config["num_hidden_layers"]):
        w = layer_of(weights, number)
        s = SimpleNamespace(x=x)
        s.h, s.norm1 = rms_norm(x, w["input_layernorm"], eps)
        s.q = rotated((s.h @ w["self_attn.q_proj"].T).reshape(len(tokens), heads, -1), base)
        s.k = rotated((s.h @ w["self_attn.k_proj"].T)[:, None], base)[:, 0]
        s.v = s.h @ w["self_attn.v_proj"].T
        s.p = softmax(np.einsum("qhd,kd->hqk", s.q, s.k) / np.sqrt(s.k.shape[-1]) + future_qk)
        s.o = np.einsum("hqk,kd->qhd", s.p, s.v).reshape(len(tokens), -1)
        x = x + s.o @ w["self_attn.o_proj"].T
        s.h2, s.norm2 = rms_norm(x, w["post_attention_layernorm"], eps)
        s.a, s.b = s.h2 @ w["mlp.gate_proj"].T, s.h2 @ w["mlp.up_proj"].T
        s.gate = 1.0 / (1.0 + np.exp(-s.a))
        s.m = s.a * s.gate * s.b
        x = x + s.m @ w["mlp.down_proj"].T
        tape.append(s)
    last, saved = rms_norm(x, weights["model.norm.weight"], eps)
    return last @ weights["model.embed_tokens.weight"].T, (tokens, tape, last, saved)


def gradient(weights, config, tape, dlogits_lv):
    """The gradient of every weight, from that of the logits."""
    tokens, layers, last, saved = tape
    base, embedding = config["rope_theta"], weights["model.embed_tokens.weight"]
    found = {"model.embed_tokens.weight": dlogits_lv.T @ last}
    dx, found["model.norm.weight"] = rms_norm_gradient(
        dlogits_lv @ embedding, weights["model.norm.weight"], saved
    )
    for number in reversed(range(len(layers))):
        w, s, d = layer_of(weights, number), layers[number], {}
        dm, d["mlp.down_proj"] = dx @ w["mlp.down_proj"], dx.T @ s.m
        da = dm * s.b * (s.gate + s.a * s.gate * (1.0 - s.gate))
        db = dm * s.a * s.gate
        d["mlp.gate_proj"], d["mlp.up_proj"] = da.T @ s.h2, db.T @ s.h2
        dh = da @ w["mlp.gate_proj"] + db @ w["mlp.up_proj"]
        back, d["post_attention_layernorm"] = rms_norm_gradient(dh, w["post_attention_layernorm"], s.norm2)
        dx = dx + back
        do, d["self_attn.o_proj"] = dx @ w["self_attn.o_proj"], dx.T @ s.o
        do = do.reshape(s.q.shape)
        dp = np.einsum("qhd,kd->hqk", do, s.v)
        ds = s.p * (dp - (dp * s.p).sum(-1, keepdims=True)) / np.sqrt(s.k.shape[-1])
        dq = rotated(np.einsum("hqk,kd->qhd", ds, s.k), base, -1.0).reshape(len(tokens), -1)
        dk = rotated(np.einsum("hqk,qhd->kd", ds, s.q)[:, None], base, -1.0)[:, 0]
        dv = np.einsum("hqk,qhd->kd", s.p, do)
        dh = np.zeros_like(s.h)
        for name, part in (("q", dq), ("k", dk), ("v", dv)):
            dh += part @ w[f"self_attn.{name}_proj"]
            d[f"self_attn.{name}_proj"] = part.T @ s.h
        back, d["input_layernorm"] = rms_norm_gradient(dh, w["input_layernorm"], s.norm1)
        dx = dx + back
        found |= {f"model.layers.{number}.{name}.weight": value for name, value in d.items()}
    np.add.at(found["model.embed_tokens.weight"], tokens, dx)
    return found


def layer_of(weights, number):
    """A layer's weights by their names in it."""
    prefix = f"model.layers.{number}."
    return {
        name.removeprefix(prefix).removesuffix(".weight"): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }
