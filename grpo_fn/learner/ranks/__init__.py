"""Several ranks together: sums of gradients and distribution of rows."""
