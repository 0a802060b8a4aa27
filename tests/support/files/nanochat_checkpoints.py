"""Small random PyTorch checkpoints of nanochat as files; PyTorch is imported when one is made."""

import json

from tests.support.tiktoken_files import write_pickle

SIZES = {"sequence_len": 64, "vocab_size": 329, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 64}


def make_tensors(*, padding=7, seed=0, sizes=SIZES):
    """Random tensors with nanochat's names: float32 matrices, a bfloat16 embedding."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    width, rows = sizes["n_embd"], sizes["vocab_size"] + padding
    narrow = width // sizes["n_head"] * sizes["n_kv_head"]

    def matrix(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"transformer.wte.weight": torch.randn((rows, width), generator=generator).bfloat16()}
    for layer in range(sizes["n_layer"]):
        for name, shape in (
            ("attn.c_q", (width, width)),
            ("attn.c_k", (narrow, width)),
            ("attn.c_v", (narrow, width)),
            ("attn.c_proj", (width, width)),
            ("mlp.c_fc", (4 * width, width)),
            ("mlp.c_proj", (width, 4 * width)),
        ):
            tensors[f"transformer.h.{layer}.{name}.weight"] = matrix(*shape)
    tensors["lm_head.weight"] = 3 * matrix(rows, width)
    return tensors


def write_checkpoint(folder, tensors=None, *, step=650, sizes=SIZES, prefix="", **meta):
    """model_*.pt, meta_*.json and tokenizer.pkl as nanochat writes them."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    tensors = make_tensors() if tensors is None else tensors
    torch.save({prefix + name: tensor for name, tensor in tensors.items()}, folder / f"model_{step:06d}.pt")
    content = {"step": step, "model_config": {**sizes, **meta}}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(content))
    write_pickle(folder)
    return folder
