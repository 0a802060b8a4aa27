"""Serves an engine over HTTP with the sampling APIs of OpenAI and vLLM, for agents that run their
own loop.
"""
