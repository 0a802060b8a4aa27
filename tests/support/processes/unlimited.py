"""`runners.tokenization.tokenizer_probe` on a system that does not limit the memory of a process."""

from runners.machine import bounded_process
from runners.tokenization import tokenizer_probe


def main(*arguments: str) -> None:
    """As the probe's own."""
    bounded_process._CAN_LIMIT = False
    tokenizer_probe.main(*arguments)
