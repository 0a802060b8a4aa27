"""A program for `runners.machine.bounded_process` that computes nothing and never ends."""

import time


def main() -> None:
    """Sleeps."""
    print("asleep", flush=True)
    time.sleep(600)
