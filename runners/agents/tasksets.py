"""Plays tasks from a `verifiers` taskset ([env] taskset) with its harness and rewards.

`rows` and `play` are operations for the user code's process (`runners.user_code`), so verifiers and
the modules that a taskset imports are not loaded into the run's process. verifiers renders the
chats itself and requests tokens over HTTP (through its `TrainClient`).
"""

import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from runners.errors import UserError, error_line
from runners.user_code.process import TOGETHER, Outcome
from runners.user_code.worker import Worker

_HERE = "runners.agents.tasksets"
_SHELL = "bash"  # name of the default harness, which runs commands that the model writes
Store = dict[Any, Any]


class TaskRun:
    """A `Program` that plays a task in the user code's process."""

    def __init__(self, worker: Worker, *arguments: Any) -> None:
        """Starts the task; `arguments` are passed to `play`."""
        self._worker = worker
        self._call = worker.submit(f"{_HERE}:play", *arguments, mode=TOGETHER)

    @property
    def has_ended(self) -> bool:
        """Whether the task has finished, including its rewards."""
        return self._call.outcome.done()

    def end(self) -> Outcome:
        """Cancels the task if it is still running, and returns its outcome."""
        if not self.has_ended:
            self._worker.cancel(self._call)
            return Outcome(fault="the task was cancelled")
        return self._call.outcome.result()


def rows(store: Store, name: str, folders: Sequence[str], most: int) -> list[dict[str, Any]]:
    """Loads a taskset's first `most` rows; 0 means all rows. A row contains the question, the
    answer (if the task has one) and the task number.

    Raises UserError if the taskset cannot be loaded, or if the taskset is infinite and `most` is 0.
    """
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    try:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        taskset = loaders.load_taskset(loaders.taskset_config_type(name)(id=name))
    except Exception as error:
        raise UserError(f"taskset {name} cannot be loaded: {error_line(error)}") from error
    if not (most or taskset.bounded):
        raise UserError(f"taskset {name} is infinite: expected data.max_samples above 0, found 0")
    tasks = list(itertools.islice(taskset, most or None))
    store["taskset", name] = tasks
    found = []
    for number, task in enumerate(tasks):
        answer = getattr(task.data, "answer", None)
        own = {} if answer is None else {"answer": str(answer)}
        found.append({"question": task.data.prompt_text, **own, "task": number})
    return found


async def play(
    store: Store, name: str, number: int, tokenizer: str, url: str, key: str, most: int
) -> dict[str, float]:
    """Plays a task once, and returns its reward. Raises RuntimeError, with the first error's
    message, if the rollout failed.
    """
    vf = importlib.import_module("verifiers.v1")
    own = importlib.import_module("verifiers.v1.utils.loaders").default_harness_id(name)
    settings = {
        "harness": {"id": "null" if own == _SHELL else own},
        "runtime": {"type": "subprocess"},
        "model": name,
        "sampling": {"max_tokens": most},
        "client": {
            "type": "train",
            "base_url": url,
            "headers": {"Authorization": f"Bearer {key}"},
            "renderer_model_name": tokenizer,
        },
    }
    trace = await vf.Agent(vf.AgentConfig.model_validate(settings)).run(
        store["taskset", name][number]
    )
    if not trace.ok:
        faults = [f"{error.type}: {error.message}" for error in trace.errors]
        raise RuntimeError([*faults, "the rollout failed"][0])
    return {"reward": trace.reward}
