"""A real run with conversations in which every turn calls a tool, whatever the model wrote."""

from pathlib import Path
from typing import Any

from runners.config.loading import load_config
from runners.environments import episodes
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.tiny_runs import small

TALKS = '''
class Talks:
    """Answers whatever is asked."""

    def reset(self, **row):
        """Begin."""

    def check(self, text: str) -> str:
        """
        Look at a text.

        Args:
            text: What to look at.
        """
        return f"seen: {text}"


def turns(completions, **_):
    return [float(len({*completion[0]["content"]})) for completion in completions]
'''


def talking_run(
    folder: Path, monkeypatch: Any, *settings: str, rollout: dict[str, Any] | None = None, **log: Any
) -> Path:
    """The folder of a run of two batch steps; its turns end at every eighth token or so.

    `rollout`, `log`: keys of these sections.
    """

    def hear(self: Any, episode: Any, tokens: Any) -> tuple:
        arguments = {"text": "<b>again</b>"}
        call = {"type": "function", "function": {"name": "check", "arguments": arguments}}
        content = self._home.chat.decoder.decode(tokens)
        episode.messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
        episode.counts["turns"] += 1
        return (episodes.ToolCall("check", arguments),)

    monkeypatch.setattr(episodes.Session, "_read", hear)
    (folder / "talks.py").write_text(TALKS, encoding="utf-8")
    (folder / "train.toml").write_text(
        small(
            run={"output_dir": str(folder)},
            data={"nudge": "<reasoning>"},
            rollout={"max_new_tokens": 64, "launch": "eval", "stop": ["1", "2", "e", "="], **(rollout or {})},
            reward={"functions": ["talks.py:turns"]},
            env={"factory": "talks.py:Talks", "max_turns": 3},
            eval={"samples": 0, "at_start": False},
            log={"report": False, **log},
        ),
        encoding="utf-8",
    )
    return run_training(load_config(str(folder / "train.toml"), settings), report=Quiet()).folder
