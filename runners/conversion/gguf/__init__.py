"""GGUF, the format of llama.cpp: its header, and its names for models and tokenizers, in both
directions.
"""
