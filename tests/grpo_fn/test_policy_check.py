"""A model that decodes something other than it learns takes a slower path or is refused."""

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest

import grpo_fn as g
from benchmarks.architectures.small_models import small_model
from grpo_fn.learner import can_share
from grpo_fn.policy import checkpoint_layers, head, policy
from grpo_fn.policy_check import _fault_of, few_prompts
from tests.support.tiny_policies import tiny_policy

PROMPTS = [list(range(3, 33)), [7, 8, 9], [9, 8, 2, 5, 1]]


def checked(of, *, share_prompts=None):
    """Checked as a run does."""
    share = can_share(of.module) if share_prompts is None else share_prompts
    return g.check_policy(of, of.params, PROMPTS, share_prompts=share)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "deepseek", "mamba"])
def test_what_is_right_stays_as_it_is(name):
    """Nothing is given up, and there is no notice."""
    of = tiny_policy(name)
    found = checked(of)
    assert (found.given_up, found.notices) == ((), ())
    assert attrs.asdict(found.policy, recurse=False) == attrs.asdict(of, recurse=False)


def test_a_learner_without_the_shared_keys_computes_over_caches(monkeypatch):
    """gemma3n's last layers attend to keys that other layers have cached."""
    monkeypatch.setattr(head, "needs_caches", lambda module: False)
    of = tiny_policy("gemma3n")
    assert not of.split.over_caches
    found = checked(of)
    assert found.given_up == ("plain_forward",) and found.policy.split.over_caches
    assert "uses caches" in found.notices[0] and "nats per token" in found.notices[0]


def test_positions_by_the_number_of_keys_are_decoded_in_equal_lengths(monkeypatch):
    """afm7 takes positions from the number of keys, not from the row's length."""
    monkeypatch.setattr(policy, "takes_ragged", lambda module: True)
    of = tiny_policy("afm7")
    assert of.takes_ragged
    found = checked(of)
    assert found.given_up == ("takes_ragged",) and found.policy.shares_prefix == of.shares_prefix
    assert "prompts of the same length" in found.notices[0]


def test_a_learner_that_cannot_share_prompts_computes_each_row_s():
    """afm7 reads keys that a shared prompt's layer does not have."""
    of = tiny_policy("afm7")
    found = checked(of, share_prompts=True)
    assert found.given_up == ("share_prompts",)
    assert "separately" in found.notices[0]


class Broken(nn.Module):
    """A model that computes something else with any cache, so that no slower path is right."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.args, self.model_type = inner.args, "broken"

    @property
    def layers(self):
        return self.inner.layers

    def __call__(self, tokens, cache=None):
        logits = self.inner(tokens, cache=cache)
        return logits if tokens.shape[1] > 1 else 2 * logits


def test_a_model_whose_decoding_is_never_right_is_refused():
    """mlx-lm's plamo3 is one: its window is a token shorter in decoding (upstream.md)."""
    of = g.Policy.from_module(Broken(tiny_policy("llama").module))
    with pytest.raises(ValueError, match=r"even on the slowest path: log-probs of a row are off by .* nats"):
        checked(of)
    of = g.Policy.from_module(small_model("plamo3"))
    with pytest.raises(ValueError, match=r"slowest path: log-probs of a row are off by 0\.\d+ nats"):
        checked(of)


def test_gradients_that_are_not_finite_are_refused_before_the_first_update():
    """The square root at zero: finite log-probs, a NaN gradient."""

    class Rooted(Broken):
        def __call__(self, tokens, cache=None):
            zero = mx.sqrt(0 * mx.square(self.inner.model.embed_tokens.weight).sum())
            return self.inner(tokens, cache=cache) + zero

    of = g.Policy.from_module(Rooted(tiny_policy("llama").module))
    with pytest.raises(ValueError, match=r"cannot be trained here: the gradient of \S+ is not finite"):
        checked(of)


def test_blocks_that_cannot_be_checkpointed_are_refused():
    """Values passed between blocks on the side are constants there and lose gradient."""

    class Keeping(nn.Module):
        def __init__(self, inner, kept, is_last):
            super().__init__()
            self.inner = inner
            self._kept, self._is_last = kept, is_last

        def __call__(self, x, mask=None, cache=None):
            if self._is_last:
                return self.inner(x, mask, cache) + self._kept[0]
            self._kept[:] = [mx.square(5 * x)]
            return self.inner(x, mask, cache)

    of = tiny_policy("qwen2")
    checkpoint_layers(of.module)
    assert checked(of).notices == ()
    module, kept = tiny_policy("qwen2").module, []
    module.model.layers = [Keeping(layer, kept, n == 1) for n, layer in enumerate(module.model.layers)]
    checkpoint_layers(module)
    of = g.Policy.from_module(module)
    with pytest.raises(
        ValueError, match="cannot be trained here: checkpointed blocks compute a different gradient"
    ):
        checked(of, share_prompts=False)


def test_a_certain_model_whose_gradient_is_0_can_be_trained():
    """Zero gradients do not differ."""
    module = tiny_policy("llama").module
    checkpoint_layers(module)
    scaled = module.lm_head.weight if "lm_head" in module else module.model.embed_tokens.weight
    scaled[:] = 20_000 * scaled
    assert checked(g.Policy.from_module(module), share_prompts=False).notices == ()


@pytest.mark.parametrize(
    "text",
    ["[METAL] Command buffer failed: Insufficient Memory (0)", "cudaGraphLaunch failed: out of memory"],
)
def test_a_lack_of_memory_says_nothing_about_a_model(text):
    def compare():
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="emory"):
        _fault_of(compare)


def test_steps_that_cannot_be_traced_are_not_compiled():
    """A model that looks at its own values (dbrx's experts) trains uncompiled."""

    class Looking(Broken):
        def __call__(self, tokens, cache=None):
            logits = self.inner(tokens, cache=cache)
            return logits if mx.isfinite(logits).all().item() else 0 * logits

    of = g.Policy.from_module(Looking(tiny_policy("llama").module))
    found = checked(of)
    assert found.given_up == ("compile",) and "not compiled" in found.notices[0]


def test_few_tokens_of_the_run_s_own_prompts():
    """The longest and the shortest prompt, cut, with different lengths."""
    long, short = few_prompts(PROMPTS)
    assert long == PROMPTS[0][:24] and short == PROMPTS[1]
    assert [len(row) for row in few_prompts([[5, 6, 7], [8, 9, 4]])] == [3, 2]
    assert few_prompts([[5]]) == [[5], [5]]
    assert [len(row) for row in few_prompts(PROMPTS, positions=13)] == [9, 3]
