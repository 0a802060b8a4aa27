"""A taskset of verifiers: the embedded problems, answered in one reply.

Its harness is verifiers' null harness within this process: that one starts a process for each episode. With
NULL_HARNESS in the environment the taskset has no harness of its own, and verifiers' is used.
"""

import json
import os
from pathlib import Path

import httpx  # pyright: ignore[reportMissingImports]
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

__all__ = ["Problems"]
PROBLEMS = os.environ.get("PROBLEMS") or Path(__file__).parents[1] / "problems/train.jsonl"


class Data(vf.TaskData):
    """A problem with its answer."""

    answer: str = ""


def answer_of(text: str) -> str:
    """What stands in the last answer tags."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


class Problem(vf.Task[Data]):
    """The reply has the answer in its tags."""

    @vf.reward
    async def right(self, trace) -> float:
        """1 for the right answer."""
        return float(answer_of(str(trace.messages[-1].content)) == self.data.answer)


class Problems(vf.Taskset[Problem]):
    """The embedded problems."""

    def load(self):
        """In the order of the file."""
        for line in Path(PROBLEMS).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            answer = row["answer"].rpartition("#### ")[2]
            yield Problem(Data(prompt=row["question"], answer=answer), self.config.task)


if not os.environ.get("NULL_HARNESS"):
    __all__ += ["Reply"]

    class Reply(vf.Harness[vf.HarnessConfig]):
        """One chat call."""

        APPENDS_SYSTEM_PROMPT = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
        ):
            """Asks the prompt."""
            messages = [{"role": "user", "content": data.prompt}]
            headers = {"Authorization": f"Bearer {secret}"}
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                url = f"{endpoint}/chat/completions"
                answer = await client.post(
                    url, json={"model": ctx.model, "messages": messages}, headers=headers
                )
            failed = answer.status_code != 200
            return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=answer.text if failed else "")
