"""GGUF, the format of llama.cpp: reads its header, and converts models and tokenizers in both
directions.
"""
