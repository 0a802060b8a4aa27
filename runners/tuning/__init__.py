"""What the config leaves to the machine: how to decode, how many rows together, which quantization."""
