"""The supervised step is the cross-entropy of the completions' tokens, as in mlx-lm and TRL."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

import grpo_fn as g
from grpo_fn.trees import named_leaves
from tests.support.closeness import assert_same_figures, assert_same_gradients
from tests.support.naive_learner import gradient_of, make_state, mean_gradient, policy_of
from tests.support.tiny_models import make_tokenizer
from tests.support.tiny_policies import tiny_policy

PROMPTS = [(5, 9, 2), (7,), (1, 2, 3, 4, 5, 6, 7), (11, 12)]
GOLD = [(8, 3), (4, 4, 9, 20, 31), (17,), (30, 2, 2)]


def learned(policy, *, packed, compile=False):
    """(statistics, gradient) of the step, for the whole batch or its micro-batches."""
    batch = g.make_batch(g.given_rollout(PROMPTS, GOLD), mx.ones((len(GOLD), 1)))
    parts: Any = g.split_batch(batch, max_tokens=16, share_prompts=True) if packed else batch
    assert not packed or len(parts) > 1
    state, stats = g.make_sft_step(policy, compile=compile)(make_state(policy), parts)
    return stats, mean_gradient(state)


def naive_loss(module):
    """−Σ log softmax at the completions' tokens, row by row, over their number."""
    total = mx.array(0.0)
    for prompt, gold in zip(PROMPTS, GOLD, strict=True):
        logits = module(mx.array([[*prompt, *gold]]))[0].astype(mx.float32)
        logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for place, token in enumerate(gold, len(prompt)):
            total = total - logp[place - 1, token]
    return total / sum(map(len, GOLD))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mamba", "lora", "compiled"])
def test_the_step_is_the_naive_cross_entropy(kind, packed):
    """Prompt tokens and padding are masked, however the rows are cut."""
    name = "llama" if kind == "compiled" else kind
    policy = policy_of(name)
    stats, gradient = learned(policy, packed=packed, compile=kind == "compiled")
    loss, wanted = gradient_of(naive_loss, name, policy.params)
    assert_same_figures(stats, {"loss": loss})
    assert_same_gradients(gradient, wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_the_step_is_that_of_mlx_lm_s_lora_trainer(packed):
    """`mlx_lm.tuner.trainer.default_loss` with the prompts masked, as `mask_prompt` does."""
    from mlx_lm.tuner.trainer import default_loss

    policy = policy_of("lora")
    width = max(len(p) + len(c) for p, c in zip(PROMPTS, GOLD, strict=True))
    rows = [[*p, *c] + [0] * (width - len(p) - len(c)) for p, c in zip(PROMPTS, GOLD, strict=True)]
    # The trainer's lengths are (offset, last step) in the targets, which begin at the second token.
    lengths = mx.array([(len(p), len(p) + len(c) - 1) for p, c in zip(PROMPTS, GOLD, strict=True)])
    stats, gradient = learned(policy, packed=packed)
    loss, wanted = gradient_of(
        lambda module: default_loss(module, mx.array(rows), lengths)[0], "lora", policy.params
    )
    assert_same_figures(stats, {"loss": loss})
    assert_same_gradients(gradient, wanted)


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
@pytest.mark.parametrize("packed", [False, True])
def test_the_step_is_that_of_trl(packed, tmp_path):
    """SFTTrainer on a Llama of transformers with the same weights: completions only, padded or packed."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    policy = tiny_policy("llama-untied")
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads rms_norm_eps"
    args = policy.module.args
    more = {"num_key_value_heads": args.num_key_value_heads, "rope_theta": args.rope_theta}
    config = {name: getattr(args, name) for name in names.split()} | more
    model = LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=False)).float()
    model.load_state_dict({name: torch.tensor(np.array(leaf)) for name, leaf in tree_flatten(policy.params)})
    rows = [
        {"input_ids": [*prompt, *gold], "completion_mask": [0] * len(prompt) + [1] * len(gold)}
        for prompt, gold in zip(PROMPTS, GOLD, strict=True)
    ]
    settings = {"completion_only_loss": True, "max_length": 32, "per_device_train_batch_size": 4}
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(str(tmp_path), packing=packed, use_cpu=True, bf16=False, **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), pad_token="<|im_end|>"),
    )
    (inputs,) = trainer.get_train_dataloader()
    assert inputs["input_ids"].shape == ((1, 24) if packed else (4, 8))
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    stats, gradient = learned(policy, packed=packed)
    assert_same_figures(stats, {"loss": mx.array(loss.item())})
    found = {name: mx.array(leaf.grad.numpy()) for name, leaf in model.named_parameters()}
    assert named_leaves(gradient).keys() == found.keys()
    assert_same_gradients(gradient, tree_unflatten(list(found.items())))


@pytest.mark.parametrize("given", [([], []), ([(1,)], []), ([(1,)], [()]), ([()], [(1,)])])
def test_given_completions_are_whole(given):
    """There are as many completions as prompts, and none is empty."""
    with pytest.raises(ValueError, match="as many completions as prompts"):
        g.given_rollout(*given)
