"""Engines that sample: the protocol, and the engine of this process."""
