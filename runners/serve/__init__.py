"""HTTP over an engine: OpenAI's and vLLM's sampling wire, for agents that own their loop."""
