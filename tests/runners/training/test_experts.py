"""Runs of models with experts: metrics of the load, the auxiliary loss, replay, and refused settings."""

import pytest

from runners.errors import UserError
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, ran, small

NAMES = {"experts/max_load", "experts/unused", "experts/balance"}


def run(folder, arch, *overrides):
    """The log of a run of two updates of a random model."""
    model = make_model_folder(folder / arch, arch=arch)
    text = small(model={"path": str(model)}, reward=BY_LETTERS, system={"compile": False})
    return ran(folder, *overrides, text=text).updates


@pytest.mark.parametrize("coef", [0.0, 0.01])
def test_the_load_is_logged(tmp_path, coef):
    """This holds with and without the auxiliary loss; an even load is 1."""
    lines = run(tmp_path, "mixtral", f"loss.router_aux_coef={coef}")
    assert len(lines) == 2
    for line in lines:
        assert set(line) >= NAMES
        assert line["experts/max_load"] >= 1 and 0 <= line["experts/unused"] < 1
        assert 0.5 < line["experts/balance"] < 4


def test_the_load_is_not_logged_if_all_tokens_are_masked(tmp_path):
    """A load of 0 would look like a collapsed router."""
    lines = run(tmp_path, "mixtral", "loss.mask_truncated_completions=true", "rollout.stop=[]")
    assert lines and not any(NAMES & set(line) for line in lines)


@pytest.mark.parametrize("more", [(), ("optim.num_iterations=2",), ("loss.router_aux_coef=0.01",)])
def test_a_run_replays_the_samplers_experts(tmp_path, more):
    """A four-bit sampler is closer to a learner that uses its experts."""

    def difference(folder, replay):
        settings = (
            "rollout.quantization=affine-4",
            "rollout.group_size=32",
            "rollout.mismatch_limit=0",
            "rollout.calibration=none",
            *more,
        )
        lines = run(folder, "mixtral", f"loss.router_replay={replay}", *settings)
        return [line["sampling/sampling_logp_difference/mean"] for line in lines]

    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    replayed, plain = difference(tmp_path / "with", "true"), difference(tmp_path / "without", "false")
    assert len(replayed) == len(plain) and 0 < replayed[0] < plain[0]


@pytest.mark.parametrize(
    ("arch", "more", "message"),
    [
        ("llama", "", "llama has no experts .*; expected {off}"),
        ("mixtral", "system.grad_checkpoint=true", "blocks do not return .*; expected {off}"),
        ("mixtral", "system.share_prompts=always", 'system.share_prompts: .*found "always": .*{key}'),
    ],
)
@pytest.mark.parametrize(("key", "value", "off"), [("aux_coef", "0.01", "0"), ("replay", "true", "false")])
def test_unsupported_router_settings_are_refused(tmp_path, arch, more, message, key, value, off):
    """The error comes before the first rollout and names the key."""
    with pytest.raises(UserError, match=message.format(off=off, key=f"loss.router_{key}")):
        run(tmp_path, arch, f"loss.router_{key}={value}", *filter(None, [more]))
