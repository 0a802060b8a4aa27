"""Judges: models that reward completions, behind an API like OpenAI's, as [judge.NAME] says.

May import config, machine and files; not rewards, which call judges.
"""

from runners.judges.judge import Exchange, Judge, build_judge, combined

__all__ = ["Exchange", "Judge", "build_judge", "combined"]
