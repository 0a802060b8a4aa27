"""Judges: models that reward completions, behind an API like OpenAI's or in a folder, as [judge.NAME] says.

May import models, tokenization, config, machine and files; not rewards, which call judges.
"""

from runners.judges.base import Judge, combined
from runners.judges.judge import EndpointJudge, Exchange, build_judge

__all__ = ["EndpointJudge", "Exchange", "Judge", "build_judge", "combined"]
