"""Settings that the config leaves to the machine: decoding, rows decoded together, quantization."""
