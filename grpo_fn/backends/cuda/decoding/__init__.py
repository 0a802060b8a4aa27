"""Decoding steps on CUDA: few launches, which never wait for the host."""
