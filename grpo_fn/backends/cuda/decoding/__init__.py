"""A decoding step on CUDA: few launches, and none that waits for the host."""
