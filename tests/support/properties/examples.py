"""How many examples a property gets: few in the suite, many in a campaign."""

import os


def examples(usual: int) -> int:
    """`usual`, or twenty times as many where HYPOTHESIS_PROFILE is `campaign`."""
    return usual * (20 if os.environ.get("HYPOTHESIS_PROFILE") == "campaign" else 1)
