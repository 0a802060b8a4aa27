"""Decoding steps on CUDA, with few launches that never wait for the host."""
