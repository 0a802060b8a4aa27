"""Engines that sample completions: the protocol, and the engine that runs in this process."""
