"""Every benchmark from end to end in its smallest form: each command runs and writes what it measured."""

import pytest

from benchmarks import evidence
from benchmarks.harness import report
from tests.support.benchmark_runs import check_quick_run

EXPECTED = {
    "turns": {"extend: over the tokens alone", "turns: two over one"},
    "first_update": {"quick: first update after loading, cold", "quick: step"},
    "matrix": {"qwen2: runs that failed", "qwen2: full, no KL: slowest step"},
    "rollout": {"quick: ours over shared prefill", "quick compaction: dropped over decoded on"},
    "learner": {"quick: peak, ours / naive", "quick: largest difference of the gradients"},
    "peers": {"lora: step, mlx-lm-lora / ours", "lora: peak, ours / mlx-lm-lora"},
    "quant": {"tiny: mxfp4 packed: tokens/s at batch 4", "tiny: mxfp4 dequantized: KL"},
    "router_replay": {"8 experts: affine-4: mismatch, own", "8 experts: affine-4: mismatch, replayed"},
    "sync": {"tiny: none: time", "tiny: nvfp4 packed: memory of its own"},
    "logprobs": {"64 rows: peak, ours / naive", "256 rows: time, ours / naive"},
    "gated_delta": {"32 tokens: peak, chunks / loop", "64 tokens, chunks of 16: time"},
    "loss": {"dearest loss / grad step", "dearest preset / cheapest"},
    "step": {"whole step", "rollout rate"},
    "generation": {"embedded, greedy: ours / mlx-lm, a token", "6 × 256, sampled: ours, rate"},
    "loading": {"embedded: added", "tiny: training: added", "grpo run --help"},
    "memory": {"quickstart: measured peak", "LoRA: error"},
    "checkpoint": {"quickstart: held up by saving", "large state: a save holds the run up for"},
    "depth": {
        "2 layers, random: affine-4, product: non-finite updates",
        "3 layers, trained: bf16, ours: KL",
    },
    "ranks": {"tiny, full: 2 ranks: efficiency", "tiny, full: 2 ranks, sharded: of unsharded bytes"},
    "mechanisms": {"16 × 8, LoRA: merged adapters: time", "16 × 8, LoRA: merged adapters: peak"},
    "run_report": {"large: written, CPU time", "quickstart: with an open live page / without"},
    "quickstart": {"seed 0: exact match after", "seed 0: from command to end"},
}

EVIDENCE = {
    "against_trl": {
        "logits: seed 0: largest difference",
        "TRL: seed 0: exact match after",
        "grpo_fn: seed 0: step",
    },
    "samplers": {
        "4 layers, affine-4, token_truncate: seed 0: mismatch",
        "4 layers, affine-4, token_truncate: seed 0: exact match after",
    },
    "presets": {"grpo: seed 0: reward, last tenth", "gspo: seed 0: tokens sampled"},
    "masters": {
        "1e-6, bfloat16, stochastic: seed 0: weights moved",
        "1e-6, bfloat16, nearest: seed 0: weights moved",
    },
}


@pytest.mark.parametrize("name", report.NAMES)
def test_each_benchmark_runs_and_writes_its_result(name, tmp_path):
    """--quick --check; a benchmark without an entry above is an error."""
    if name == "peers":
        pytest.importorskip("mlx_lm_lora", reason="of the extra `peers`")
    check_quick_run(name, EXPECTED[name], tmp_path)


@pytest.mark.parametrize("name", evidence.NAMES)
def test_each_command_of_evidence_runs_and_writes_its_result(name, tmp_path):
    """As the benchmarks do, and a picture beside it."""
    if name == "against_trl":
        pytest.importorskip("trl", reason="of the extra `peers`")
    check_quick_run(f"evidence.{name}", EVIDENCE[name], tmp_path)
    assert (tmp_path / f"evidence_{name}.svg").is_file()
