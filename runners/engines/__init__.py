"""Anything that samples: the protocol, and the engine of this process."""
