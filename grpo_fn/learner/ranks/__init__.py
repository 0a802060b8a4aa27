"""Several ranks together: sums of gradients, distribution of rows."""
