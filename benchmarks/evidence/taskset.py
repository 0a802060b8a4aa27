"""How well does the quickstart's model learn from a taskset of verifiers?

The tasks are the quickstart's problems. verifiers renders each chat, samples from the run's server, and
computes the reward. The model's chat template starts replies with `<reasoning>`, as the quickstart's
`data.nudge` does. It needs verifiers in the same environment: docs/agents.md names its versions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import attrs

from benchmarks.evidence.command import Plan, Trial, evidence, run_trial
from benchmarks.evidence.real_model import over_time
from runners.errors import UserError
from runners.quickstart import DATA_DIR, MODEL_DIR

CASE = "embedded"
CONFIG = Path(__file__).with_name("clients") / "taskset.toml"
QUICK = ("optim.max_steps=2", "optim.batch_size=2", "eval.samples=4", "rollout.num_generations=4")
HEADER, REPLY = "'<|assistant|>' }}{% endif %}", "'<|assistant|><reasoning>' }}{% endif %}"


@evidence("taskset", cases=[CASE], quick_cases=[CASE], seeds="0", packages=("verifiers",))
def main(plan: Plan) -> Sequence[Trial]:
    """Train the quickstart's model from a verifiers taskset: held-out reward before and after."""
    if find_spec("verifiers") is None:
        raise UserError("verifiers is not installed: docs/agents.md names its versions")
    model = plan.work / "model"
    shutil.copytree(MODEL_DIR, model)
    file = model / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    template = tokenizer["chat_template"]
    assert template.endswith(HEADER)
    tokenizer["chat_template"] = template.removesuffix(HEADER) + REPLY
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = [f"model.path={model}", *(QUICK if plan.quick else ())]
    trials = [run_trial(plan, CASE, seed, CONFIG, settings, over_time) for seed in plan.seeds]
    problems = {"PROBLEMS": str(DATA_DIR / "train.jsonl")}
    return [attrs.evolve(trial, environment=problems) for trial in trials]


if __name__ == "__main__":
    main()
