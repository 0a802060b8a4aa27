"""Plays the tasks of a `verifiers` taskset ([env] taskset) with its harness and its rewards.

`rows` and `play` are operations of the process of user code (`runners.user_code`): verifiers and
the modules that a taskset imports are not loaded into the run's process. verifiers renders the
chats itself and requests tokens over HTTP (its `TrainClient`).
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
_SHELL = "bash"  # the default harness, which runs commands that the model writes
Store = dict[Any, Any]


class TaskRun:
    """A `Program`: a task that is played in the process of user code."""

    def __init__(self, worker: Worker, *arguments: Any) -> None:
        """Starts the task; `arguments` are the arguments of `play`."""
        self._worker = worker
        self._call = worker.submit(f"{_HERE}:play", *arguments, mode=TOGETHER)

    @property
    def has_ended(self) -> bool:
        """Whether the task's rewards are known."""
        return self._call.outcome.done()

    def end(self) -> Outcome:
        """Ends the task if it still runs."""
        if not self.has_ended:
            self._worker.cancel(self._call)
            return Outcome(fault="the task was cancelled")
        return self._call.outcome.result()


def rows(store: Store, name: str, folders: Sequence[str], most: int) -> list[dict[str, Any]]:
    """The rows of a taskset, at most `most` unless it is 0: question, answer (if the tasks have
    one) and task number. Raises UserError if the taskset cannot be loaded, or if it is infinite and
    `most` is 0.
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
    """Plays a task once, and returns its reward. Raises RuntimeError with the error if the rollout
    failed.
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
