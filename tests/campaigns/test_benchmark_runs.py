"""Every benchmark from end to end in its smallest form: each command runs and writes what it measured."""

import pytest

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
    "ranks": {"tiny, full, 2: efficiency", "tiny, full, 2, sharded: of unsharded bytes"},
    "mechanisms": {"16 × 8, LoRA: merged adapters: time", "16 × 8, LoRA: merged adapters: peak"},
    "run_report": {"large: written, CPU time", "quickstart: with an open live page / without"},
    "quickstart": {"seed 0: exact match after", "seed 0: from command to end"},
}


@pytest.mark.parametrize("name", report.NAMES)
def test_each_benchmark_runs_and_writes_its_result(name, tmp_path):
    """--quick --check; a benchmark without an entry above is an error."""
    if name == "peers":
        pytest.importorskip("mlx_lm_lora", reason="of the extra `peers`")
    check_quick_run(name, EXPECTED[name], tmp_path)
