"""Breaks the code in one place at a time, and checks that the tests notice: `-m tests.campaigns.mutants`.

Each mutant replaces one piece of text, which must occur exactly once, in a temporary copy of the package,
and runs the tests of the algebra, or those that it names, on that copy. Names given on the command line
choose mutants. Exit status 1: a mutant survived, or the tests are red without any.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("grpo_fn", "runners", "tests", "pyproject.toml")
# The quickest first: most mutants fall to the golden cases.
TESTS = ("golden", "kl", "loss_spec", "advantages", "policy_loss", "loss_properties")


class Mutant(NamedTuple):
    """One wrong line."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...] = TESTS  # of tests/grpo_fn, that have to notice it


MUTANTS = [
    Mutant("k1-sign", "algorithm/kl", "return -y", "return y"),
    Mutant("k2-half", "algorithm/kl", "near * (y - near / 2)", "near * (2 * y - near)"),
    Mutant("k2-flat-beyond", "algorithm/kl", "near * (y - near / 2)", "near * near / 2"),
    Mutant("k3-sign", "algorithm/kl", "(1 + (y - near)) - y - 1", "(1 + (y - near)) + y - 1"),
    Mutant("k3-unbounded", "algorithm/kl", "near = mx.minimum(y, K3_LINEAR_FROM)", "near = y"),
    Mutant("k3-flat-beyond", "algorithm/kl", "(1 + (y - near)) - y - 1", "- near - 1"),
    Mutant("kl-direction", "algorithm/kl", "mx.clip(ref_logp - logp,", "mx.clip(logp - ref_logp,"),
    Mutant(
        "kl-of-the-impossible", "algorithm/kl", "mx.clip(ref_logp - logp, -LIMIT, LIMIT)", "ref_logp - logp"
    ),
    Mutant("clamp-at-40", "checks", "LOG_RATIO_LIMIT = 20.0", "LOG_RATIO_LIMIT = 40.0"),
    Mutant("ratio-unclamped", "algorithm/ratios", "mx.exp(clamp_log(log_ratio))", "mx.exp(log_ratio)"),
    Mutant("ratio-inverted", "algorithm/ratios", "logp_bt - old_logp_bt", "old_logp_bt - logp_bt"),
    Mutant(
        "sequence-product",
        "algorithm/ratios",
        "sequence_sum(values_bt, mask_bt) / length",
        "sequence_sum(values_bt, mask_bt)",
    ),
    Mutant(
        "sequence-mean-over-padding",
        "algorithm/ratios",
        "mx.maximum(mask_bt.sum(axis=1, keepdims=True), 1)",
        "mask_bt.shape[1]",
    ),
    Mutant(
        "tis-no-floor",
        "algorithm/corrections",
        "mx.clip(ratio_bt, correction_floor,",
        "mx.clip(ratio_bt, 0.0,",
    ),
    Mutant(
        "tis-no-cap",
        "algorithm/corrections",
        "mx.clip(ratio_bt, correction_floor, correction_cap)",
        "mx.maximum(ratio_bt, correction_floor)",
    ),
    Mutant("product-always", "algorithm/corrections", 'sequence_ratio == "product"', "True"),
    Mutant("product-never", "algorithm/corrections", 'sequence_ratio == "product"', "False"),
    Mutant(
        "sequence-untruncated",
        "algorithm/corrections",
        "mx.clip(q_b1, correction_floor, correction_cap)",
        "q_b1",
    ),
    Mutant(
        "sequence-weight-forgotten",
        "algorithm/corrections",
        "return mx.broadcast_to(q_b1, ratio_bt.shape)",
        "return mx.ones_like(ratio_bt)  # not q",
    ),
    Mutant("icepop-one-sided", "algorithm/corrections", "(ratio_bt >= low) & (ratio_bt", "(ratio_bt"),
    Mutant(
        "icepop-unweighted",
        "algorithm/corrections",
        "(ratio_bt <= high), ratio_bt",
        "(ratio_bt <= high), 1.0",
    ),
    Mutant("sequence-mask-either", "algorithm/corrections", "(q_b1 >= low) & (q_b1", "(q_b1 >= low) | (q_b1"),
    Mutant(
        "correction-inverted",
        "algorithm/corrections",
        "old_logp_bt - rollout_logp_bt",
        "rollout_logp_bt - old_logp_bt",
    ),
    Mutant(
        "clip-sides-swapped",
        "algorithm/surrogates",
        "mx.clip(ratio, 1 - epsilon_low, 1 + epsilon_high)",
        "mx.clip(ratio, 1 - epsilon_high, 1 + epsilon_low)",
    ),
    Mutant("clip-optimist", "algorithm/surrogates", "-mx.minimum(bounded", "-mx.maximum(bounded"),
    Mutant("clip-sign", "algorithm/surrogates", "-mx.minimum(bounded", "mx.minimum(bounded"),
    Mutant("clip-only", "algorithm/surrogates", "-mx.minimum(bounded", "-mx.minimum(clipped"),
    Mutant(
        "delta-from-below",
        "algorithm/surrogates",
        "mx.minimum(ratio, delta)",
        "mx.maximum(ratio, delta)",
    ),
    Mutant("dual-clip-side", "algorithm/surrogates", "mx.where(advantage < 0", "mx.where(advantage > 0"),
    Mutant("dual-clip-floor", "algorithm/surrogates", "mx.minimum(loss,", "mx.maximum(loss,"),
    Mutant("dual-clip-sign", "algorithm/surrogates", "-dual_clip * adv", "dual_clip * adv"),
    Mutant(
        "cispo-gradient-through-weight",
        "algorithm/surrogates",
        "mx.stop_gradient(mx.minimum(ratio, 1 + epsilon_high))",
        "mx.minimum(ratio, 1 + epsilon_high)",
    ),
    Mutant(
        "cispo-cap-as-trl",
        "algorithm/surrogates",
        "mx.minimum(ratio, 1 + epsilon_high",
        "mx.minimum(ratio, epsilon_high",
    ),
    Mutant("cispo-sign", "algorithm/surrogates", "-weight * advantage", "weight * advantage"),
    Mutant(
        "sapo-one-tau",
        "algorithm/surrogates",
        "advantage > 0, sapo_tau_pos, sapo_tau_neg",
        "advantage > 0, sapo_tau_pos, 1.0",
    ),
    Mutant("sapo-unscaled", "algorithm/surrogates", "-(4 / tau)", "-4"),
    Mutant("sapo-off-centre", "algorithm/surrogates", "tau * (ratio - 1)", "tau * ratio"),
    Mutant("none-with-ratio", "algorithm/surrogates", "-mx.exp(logp - mx.stop_gradient(logp))", "-ratio"),
    Mutant(
        "old-not-held",
        "algorithm/loss",
        "mx.stop_gradient(default if array is None",
        "(default if array is None",
    ),
    Mutant(
        "old-differentiated",
        "algorithm/loss",
        "mx.stop_gradient(default if array is None else clean(array))",
        "mx.stop_gradient(default) if array is None else clean(array)",
    ),
    Mutant("ref-differentiated", "algorithm/loss", "held(ref_bt, logp_bt)", "clean(ref_bt)"),
    Mutant(
        "advantage-differentiated",
        "algorithm/loss",
        "adv_b=mx.stop_gradient(mx.where(length_b",
        "adv_b=(mx.where(length_b",
    ),
    Mutant(
        "masked-after-exp",
        "algorithm/loss",
        "mx.where(counted_bt, array.astype(mx.float32), 0.0)",
        "array.astype(mx.float32)",
    ),
    Mutant("half-precision", "algorithm/loss", "counted_bt, array.astype(mx.float32)", "counted_bt, array"),
    Mutant(
        "advantage-of-empty-row",
        "algorithm/loss",
        "mx.where(length_b > 0, arrays.adv_b",
        "mx.where(length_b >= 0, arrays.adv_b",
    ),
    Mutant("mask-ignored-in-sum", "algorithm/loss", "(mask_bt * term_bt).sum", "(term_bt).sum"),
    Mutant("length-bias-lost", "algorithm/aggregation", "sum_b / mx.maximum(length_b, 1)", "sum_b"),
    Mutant(
        "token-mean-over-rows",
        "algorithm/aggregation",
        "sequences, tokens, longest: tokens)",
        "sequences, tokens, longest: sequences)",
    ),
    Mutant(
        "constant-over-tokens",
        "algorithm/aggregation",
        "sequences * longest",
        "tokens * longest",
    ),
    Mutant(
        "empty-rows-uncounted",
        "algorithm/loss",
        "mx.array(rows) if",
        "(length_b > 0).sum() if",
    ),
    Mutant("correction-forgotten", "algorithm/loss", "weight_bt * surrogate.function", "surrogate.function"),
    Mutant("keep-forgotten", "algorithm/loss", "mx.where(x.keep_bt, term_bt, 0.0)", "term_bt"),
    Mutant(
        "bias-correction-always",
        "algorithm/loss",
        "if spec.kl_bias_corrected else kl_bt",
        "if True else kl_bt",
    ),
    Mutant(
        "bias-correction-never",
        "algorithm/loss",
        "if spec.kl_bias_corrected else kl_bt",
        "if False else kl_bt",
    ),
    Mutant("kl-sign", "algorithm/loss", "term_bt + spec.beta", "term_bt - spec.beta"),
    Mutant("entropy-sign", "algorithm/loss", "term_bt - spec.entropy_coef", "term_bt + spec.entropy_coef"),
    Mutant(
        "clip-low-of-gains",
        "algorithm/diagnostics",
        "(ratio_bt < low) & (terms.adv_b1 < 0)",
        "(ratio_bt < low) & (terms.adv_b1 > 0)",
    ),
    Mutant(
        "clip-high-by-low",
        "algorithm/diagnostics",
        "ratio_bt > high",
        "ratio_bt > 2 - low",
    ),
    Mutant("clip-reported-by-all", "algorithm/diagnostics", ' & ("low" in clipped_sides)', ""),
    Mutant("clip-share-of-tokens", "algorithm/diagnostics", "rows if by_sequence else seen", "seen"),
    Mutant("clip-of-places", "algorithm/diagnostics", "clipped_bt.any(axis=1) if by_sequence else", ""),
    Mutant("mismatch-k1-sign", "algorithm/diagnostics", "mean(-d_bt)", "mean(d_bt)"),
    Mutant("mismatch-clamped", "algorithm/diagnostics", "mean(mx.abs(difference_bt))", "mean(mx.abs(d_bt))"),
    Mutant("ess-unsquared", "algorithm/diagnostics", "mean(mx.square(is_ratio_bt))", "mean(is_ratio_bt)"),
    Mutant(
        "merge-by-rows", "algorithm/diagnostics", "(column * tokens).sum()", "(column * denominator).sum()"
    ),
    Mutant(
        "merge-clip-by-tokens", "algorithm/diagnostics", 'ratios = columns["num_ratios"]', "ratios = tokens"
    ),
    Mutant("std-biased", "algorithm/baselines", "keepdims=True) - 1, 1)", "keepdims=True), 1)"),
    Mutant("std-floor", "algorithm/baselines", "STD_EPSILON = 1e-4", "STD_EPSILON = 1e-6"),
    Mutant(
        "leave-one-out-of-all",
        "algorithm/baselines",
        "mx.maximum(count_p1 - 1, 1)",
        "mx.maximum(count_p1, 1)",
    ),
    Mutant(
        "baseline-forgotten", "algorithm/advantages", "(rewards_pg - base_pg) / SCALES", "rewards_pg / SCALES"
    ),
    Mutant("zero-variance-noise", "algorithm/advantages", "given_pg & _varies(*compared)", "given_pg"),
    Mutant("gdpo-noise", "algorithm/advantages", "given_pg & _varies(values_pg, given_pg)", "given_pg"),
    Mutant(
        "gdpo-mean-noise",
        "algorithm/baselines",
        "mx.where(mx.abs(mean_11) > rounding_11, mean_11, 0.0)",
        "mean_11",
    ),
    Mutant(
        "batch-baseline-by-group",
        "algorithm/advantages",
        "as_one_group(rewards_pg, given_pg) if of_batch else (rewards_pg, given_pg)",
        "(rewards_pg, given_pg)",
    ),
    Mutant(
        "invalid-completions-count",
        "algorithm/advantages",
        "given_pg = given_pg & valid",
        "given_pg = given_pg | valid",
    ),
    Mutant(
        "scale-batch-by-group",
        "algorithm/baselines",
        "group_scale(*as_one_group(rewards_pg, given_pg))",
        "group_scale(rewards_pg, given_pg)",
    ),
    Mutant(
        "overlong-endless",
        "algorithm/advantages",
        "mx.maximum(penalty_b, -1.0)",
        "mx.maximum(penalty_b, -2.0)",
    ),
    Mutant(
        "overlong-reward",
        "algorithm/advantages",
        "(free - lengths_b.astype(mx.float32))",
        "(lengths_b.astype(mx.float32) - free)",
    ),
    Mutant(
        "overlong-from-the-limit", "algorithm/advantages", "free = max_length - buffer", "free = max_length"
    ),
    Mutant(
        "reward-weights-forgotten",
        "algorithm/advantages",
        "(values_kb * weights_k",
        "(values_kb + 0 * weights_k",
    ),
    Mutant(
        "dapo-clips-like-grpo", "algorithm/presets", "LossSpec(epsilon_high=0.28", "LossSpec(epsilon_high=0.2"
    ),
    Mutant("delta-anywhere", "algorithm/spec", "self.delta > 1 + self.upper_epsilon", "self.delta > 0"),
    Mutant(
        "floor-anywhere",
        "algorithm/spec",
        "0 <= self.correction_floor < self.correction_cap",
        "0 <= self.correction_floor",
    ),
    Mutant("covers-any-length", "learner/packing", "self.length >= other.length", "True", ("packing",)),
    Mutant("covers-any-width", "learner/packing", "and self.width >= other.width", "", ("packing",)),
    Mutant("covers-any-rows", "learner/packing", "and self.rows >= other.rows", "", ("packing",)),
    Mutant(
        "covers-any-positions", "learner/packing", "and self.positions >= other.positions", "", ("packing",)
    ),
    Mutant("covers-any-prompts", "learner/packing", "and self.prompts >= other.prompts", "", ("packing",)),
    Mutant(
        "entropy-of-masked-tokens",
        "learner/batch",
        "mx.where(mask_bt, entropy_bt, -mx.inf)",
        "entropy_bt",
        ("batches",),
    ),
    Mutant(
        "entropy-share-of-all-tokens",
        "learner/batch",
        "counted = sum(map(sum, on_host(mask_bt)))",
        "counted = (entropy_bt > 0).sum().item()",
        ("batches",),
    ),
    Mutant(
        "shared-rounded-twice",
        "backends/cpu/elementwise",
        "weights.astype(mx.float32) @ values.astype(mx.float32)",
        "weights @ values",
        ("decode_step",),
    ),
    Mutant(
        "keys-from-nowhere",
        "policy/caches/prefix_cache",
        "all(cache.attended for cache in forked)",
        "True",
        ("unusual_models",),
    ),
    Mutant(
        "ragged-always",
        "policy/caches/kv_caches",
        "not shares_keys(model) or _ragged_is_right(model)",
        "True",
        ("unusual_models",),
    ),
    Mutant(
        "without-caches",
        "policy/head",
        "over_caches=needs_caches(module)",
        "over_caches=False",
        ("unusual_models",),
    ),
    Mutant(
        "shared-keys-shared",
        "learner/logprobs/shared_prompts",
        "plain and not shares_keys(module)",
        "plain",
        ("unusual_models",),
    ),
    Mutant(
        "unpacked-kept",
        "policy/layers/quantized_layers",
        "_unpacked(recomputed(packed, cotangent),",
        "_unpacked(packed,",
        ("unpacked_layers",),
    ),
    Mutant(
        "unpacked-first-part",
        "policy/layers/quantized_layers",
        "gradient, start = gradient + cotangent",
        "gradient, start = cotangent",
        ("unpacked_layers",),
    ),
    Mutant(
        "unpacked-held",
        "policy/decoding/decode_weights",
        "if id(layer) not in present:",
        "if False:",
        ("unpacked_layers",),
    ),
    Mutant(
        "shared-usual-scale",
        "policy/caches/prefix_cache",
        "(queries * scale)",
        "(queries * queries.shape[-1] ** -0.5)",
        ("decode_step",),
    ),
]


def run_tests(folder: Path, tests: Iterable[str] = TESTS) -> subprocess.CompletedProcess[str]:
    """Run these tests of `tests/grpo_fn` in `folder` up to the first failure."""
    found = {path.stem.removeprefix("test_"): path for path in (ROOT / "tests").rglob("test_*.py")}
    files = [str(found[name].relative_to(ROOT)) for name in tests]
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"HYPOTHESIS_PROFILE": "ci", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def mutated(mutant: Mutant, source: str) -> str:
    """The source with the mutant in it; ValueError unless its text is there exactly once."""
    found = source.count(mutant.right)
    if found != 1:
        raise ValueError(f"mutant {mutant.name}: {mutant.right!r} occurs {found} times in {mutant.file}.py")
    return source.replace(mutant.right, mutant.wrong)


def source_of(mutant: Mutant, root: Path = ROOT) -> Path:
    """The file that a mutant changes."""
    return root / "grpo_fn" / f"{mutant.file}.py"


def main() -> int:
    """Run the chosen mutants, say which fell and which survived, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="mutants to run (all)")
    names = parser.parse_args().names
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    sources = {mutant: source_of(mutant).read_text(encoding="utf-8") for mutant in chosen}
    broken = {mutant: mutated(mutant, source) for mutant, source in sources.items()}
    survived = []
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "embedded")
                )
            else:
                shutil.copy(ROOT / name, copy / name)
        healthy = run_tests(copy, dict.fromkeys(name for mutant in chosen for name in mutant.tests))
        if healthy.returncode != 0:
            print(f"the tests are red without any mutant:\n{healthy.stdout}{healthy.stderr}")
            return 1
        for mutant in chosen:
            begin, target = time.perf_counter(), source_of(mutant, copy)
            target.write_text(broken[mutant], encoding="utf-8")
            result = run_tests(copy, mutant.tests)
            target.write_text(sources[mutant], encoding="utf-8")
            # Status 1 is a failed test; anything else (a mutant that cannot be imported) proves nothing.
            if result.returncode == 1:
                verdict = next((x for x in result.stdout.splitlines() if x.startswith("FAILED")), "FAILED")
            elif result.returncode == 0:
                verdict = "SURVIVED"
            else:
                verdict = f"NOT RUN (pytest status {result.returncode})"
            if result.returncode != 1:
                survived.append(mutant.name)
            print(f"{mutant.name:32} {time.perf_counter() - begin:5.1f} s  {verdict[:110]}", flush=True)
    fell = len(chosen) - len(survived)
    print(f"{fell} of {len(chosen)} mutants fell; survived: {', '.join(survived) or 'none'}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
