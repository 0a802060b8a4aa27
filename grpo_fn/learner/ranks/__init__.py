"""Several ranks: sums gradients and distributes rows."""
