"""The quickstart here and in TRL's GRPOTrainer: does training come to the same, and what does it take?

Both sides get the shipped model, the same prompts as text, the same rewards and the quickstart's settings, on
the CPU in float32. Each draws its own batches and completions. TRL generates by transformers' own `generate`
and takes a whole batch at once.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.command import ALL_SEEDS, Plan, Trial, evidence, run_command, run_folder
from benchmarks.evidence.readings import AFTER, REWARD, SECONDS, learning, read_log
from benchmarks.harness.record import Figure
from runners.config.loading import Config, load_config
from runners.quickstart import MODEL_DIR

OURS, THEIRS, LOGITS = "grpo_fn", "TRL", "logits"
CASES = (LOGITS, OURS, THEIRS)
QUICK = ("optim.max_steps=2", "optim.batch_size=2", "eval.samples=8", "eval.every=1")
LARGEST_DIFFERENCE = "largest difference"
SAME_LOGITS = 1e-4


def side_settings(config: Config) -> dict[str, Any]:
    """What TRL's process needs to know: its prompts as text and tokens, the answers, and the settings."""
    from transformers import AutoTokenizer

    from runners.data.datasets import load_rows
    from runners.data.prompts import build_examples
    from runners.evaluation.evaluation import held_out

    model = MODEL_DIR if config.model.path == "embedded" else config.model.path
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    train, test = (build_examples(rows, config.data, tokenizer)[0] for rows in load_rows(config.data))
    optim, loss = config.optim, config.loss_spec()

    def plain(examples) -> list[dict[str, object]]:
        return [
            {"prompt": example.text, "tokens": list(example.tokens), "answer": example.answer}
            for example in examples
        ]

    return {
        "model": str(model),
        "train": plain(train),
        "test": plain(held_out(test, config.eval.samples)),
        "nudge": config.data.nudge,
        "rewards": list(config.reward.functions),
        "form": config.answer.form,
        "eval_every": config.eval.every,
        "batch_size": optim.batch_size,
        "trl": {
            "num_generations": config.rollout.num_generations,
            "max_completion_length": config.rollout.max_new_tokens,
            "temperature": config.rollout.temperature,
            "loss_type": "dapo",  # the mean over the tokens of a batch
            "epsilon": loss.epsilon_low,
            "epsilon_high": loss.epsilon_high,
            "beta": loss.beta,
            "scale_rewards": "group",
            "learning_rate": optim.learning_rate,
            "lr_scheduler_type": optim.schedule,
            "warmup_steps": round(optim.warmup_ratio * optim.max_steps),
            "adam_beta1": optim.betas[0],
            "adam_beta2": optim.betas[1],
            "adam_epsilon": optim.eps,
            "weight_decay": optim.weight_decay,
            "max_grad_norm": optim.max_grad_norm,
            "max_steps": optim.max_steps,
        },
    }


def summary(figures: Sequence[Figure]) -> list[Figure]:
    """How far the sides' means are apart, and whether that is within the spread of the seeds."""

    def values(case: str, name: str) -> list[float]:
        found = [figure for figure in figures if figure.name.startswith(f"{case}: seed")]
        return [figure.value for figure in found if figure.name.endswith(f": {name}")]

    result = []
    for name, unit in ((AFTER, "%"), (REWARD, "")):
        ours, theirs = values(OURS, name), values(THEIRS, name)
        if len(ours) > 1 and len(theirs) > 1:
            both = max(*ours, *theirs) - min(*ours, *theirs)
            apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
            note = f"means of {len(ours)} and {len(theirs)} seeds; the target is the range of all"
            title = f"{ALL_SEEDS}: {name}: means apart"
            result.append(Figure(name=title, value=apart, unit=unit, note=note, at_most=both))
    ours, theirs = values(OURS, SECONDS), values(THEIRS, SECONDS)
    if ours and theirs:
        ratio = statistics.fmean(theirs) / statistics.fmean(ours)
        result.append(Figure(name=f"{ALL_SEEDS}: {SECONDS}: {THEIRS} / {OURS}", value=ratio, unit="x"))
    return result


@evidence(
    "against_trl",
    cases=CASES,
    quick_cases=CASES,
    seeds="0,1,2,3,4",
    summary=summary,
    packages=("trl", "transformers", "torch"),
)
def main(plan: Plan) -> Sequence[Trial]:
    """The quickstart here and in TRL's GRPOTrainer: reward, exact match, time and memory over seeds."""
    overrides = QUICK if plan.quick else ()
    given = plan.work / "trl.json"
    given.write_text(json.dumps(side_settings(load_config("quickstart", overrides))), encoding="utf-8")
    trials = []
    for seed in plan.seeds:
        for case in plan.cases:
            if case == LOGITS and seed == plan.seeds[0]:
                trials.append(_logits(plan.work, given))
            elif case == OURS:
                trials.append(_ours(plan.work, seed, overrides))
            elif case == THEIRS:
                trials.append(_theirs(plan.work, given, seed))
    # What takes longest first, so that none is left alone at the end.
    return sorted(trials, key=lambda trial: [THEIRS, OURS, LOGITS].index(trial.case))


def _ours(work: Path, seed: int, overrides: Sequence[str]) -> Trial:
    name = f"ours-{seed}"
    command = run_command("quickstart", work, name, (f"run.seed={seed}", *overrides))
    read = run_folder(work, name)
    return Trial(case=OURS, seed=seed, command=command, read=lambda: learning(read_log(read)))


def side(*words: str) -> list[str]:
    """The command of TRL's process."""
    return [sys.executable, "-m", "benchmarks.evidence.trl_side", *words]


def _theirs(work: Path, given: Path, seed: int) -> Trial:
    folder = work / "runs" / f"trl-{seed}"
    return Trial(
        case=THEIRS,
        seed=seed,
        command=side("train", str(given), str(folder), str(seed)),
        read=lambda: learning(read_log(folder)),
        environment={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")},
    )


def _logits(work: Path, given: Path) -> Trial:
    out = work / "logits.json"

    def read() -> list[Figure]:
        found = json.loads(out.read_text(encoding="utf-8"))
        note = f"{found['tokens']:,} tokens of prompts, logits from {found['low']:.1f} to {found['high']:.1f}"
        return [Figure(name=LARGEST_DIFFERENCE, value=found["difference"], note=note, at_most=SAME_LOGITS)]

    return Trial(case=LOGITS, seed=0, command=side("logits", str(given), str(out)), read=read)


if __name__ == "__main__":
    main()
