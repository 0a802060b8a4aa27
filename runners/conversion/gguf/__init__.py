"""GGUF, the format of llama.cpp: its header, its names for models and tokenizers, in both
directions.
"""
