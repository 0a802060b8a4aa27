"""Engines that sample completions: the protocol, and the engine of this process."""
