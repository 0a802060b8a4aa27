"""Commands that show whether and how well training works: complete runs in separate processes.

Results are in benchmarks/results/evidence.
"""

NAMES = ("real_model", "staleness")
"""Comparisons over several seeds, `python -m benchmarks.evidence.NAME`; docs/evidence.md shows them."""
CLOSED = ("against_trl", "real_samplers", "samplers", "presets", "masters", "difficulty", "cold_start")
"""Comparisons that were made once. docs/evidence.md shows their last results."""
REACHED = "updates to 80 %"
_EXACT_MATCH = ("exact match before", "exact match after")
_HELD_OUT = ("held-out reward before", "held-out reward after", "reward, last tenth")
_SAMPLER = ("mismatch", "effective sample size")
_COST = ("updates", "step", "from command to end", "peak memory of the GPU")
COLUMNS = {
    "against_trl": (*_EXACT_MATCH, REACHED, "reward, last tenth", *_COST[1:3], "resident memory"),
    "samplers": (*_EXACT_MATCH, REACHED, *_SAMPLER),
    "presets": (*_EXACT_MATCH, REACHED, "reward, last tenth", "tokens sampled"),
    "masters": (*_EXACT_MATCH, "reward, last tenth", "weights moved"),
    "difficulty": (*_EXACT_MATCH, "tokens sampled", "groups that taught"),
    "cold_start": (*_EXACT_MATCH, "tokens sampled", "seconds of training"),
    "real_samplers": (*_HELD_OUT, *_SAMPLER, "step", "time of a sync"),
    "staleness": (*_HELD_OUT, _SAMPLER[1], "tokens of a completion, last tenth", "step"),
    "real_model": (*_HELD_OUT, "seconds of training", *_COST[1:]),
    "taskset": (*_HELD_OUT, "seconds of training", *_COST[1:3]),
    "gsm8k": ("lenient before", "lenient after", "strict before", "strict after", *_COST),
    "programs": (
        *("MBPP before", "MBPP after", "HumanEval before", "HumanEval after"),
        *("step: reward", *_COST),
    ),
    "rates": ("lenient after", "strict after", "cut off after", "reward, last tenth", *_COST[:2]),
}
"""The figures in a result's table."""
