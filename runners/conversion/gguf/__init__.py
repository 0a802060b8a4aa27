"""Handles GGUF, llama.cpp's format: reads its header, and converts models and tokenizers in both
directions.
"""
