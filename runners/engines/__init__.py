"""Anything that samples: the protocol, the engine of this process, and what wraps it."""
