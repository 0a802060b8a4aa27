"""Serves an engine over HTTP with OpenAI's and vLLM's sampling APIs, for agents that run their own
loop.
"""
