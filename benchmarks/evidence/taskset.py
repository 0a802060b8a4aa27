"""How well does the quickstart's model learn from a taskset of verifiers?

The tasks are the quickstart's problems. verifiers renders each chat, samples from the run's server, and
computes the reward. The model's chat template starts replies with `<reasoning>`, as the quickstart's
`data.nudge` does. It needs verifiers in the same environment: docs/agents.md names its versions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.evidence.command import Trial, evidence
from benchmarks.evidence.readings import over_time
from benchmarks.harness.runs import placed, run_command
from runners.errors import UserError
from runners.files.json_files import read_json, write_json
from runners.quickstart import DATA_DIR, MODEL_DIR

CASE = "embedded"
CONFIG = Path(__file__).with_name("clients") / "taskset.toml"
QUICK = ("optim.max_steps=2", "optim.batch_size=2", "eval.samples=4", "rollout.num_generations=4")
HEADER, REPLY = "'<|assistant|>' }}{% endif %}", "'<|assistant|><reasoning>' }}{% endif %}"


@evidence("taskset", cases=[CASE], quick_cases=[CASE], seeds="0", read=over_time, packages=("verifiers",))
def main(trial: Trial) -> Sequence[str]:
    """Train the quickstart's model from a verifiers taskset: held-out reward before and after."""
    if find_spec("verifiers") is None:
        raise UserError("verifiers is not installed: docs/agents.md names its versions")
    os.environ["PROBLEMS"] = str(DATA_DIR / "train.jsonl")  # for the taskset in the run's process
    model = trial.folder.with_name(f"{trial.folder.name}-model")
    shutil.copytree(MODEL_DIR, model)
    file = model / "tokenizer_config.json"
    tokenizer = read_json(file)
    template = tokenizer["chat_template"]
    assert template.endswith(HEADER)
    write_json(file, {**tokenizer, "chat_template": template.removesuffix(HEADER) + REPLY})
    settings = [f"model.path={model}", *(QUICK if trial.quick else ())]
    return run_command(CONFIG, [*settings, *placed(trial.folder, trial.seed)])


if __name__ == "__main__":
    main()
