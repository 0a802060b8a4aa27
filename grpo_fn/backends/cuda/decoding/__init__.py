"""Decoding steps on CUDA: few launches, none of which waits for the host."""
