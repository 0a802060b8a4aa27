"""Training on several ranks: distributes rows and sums gradients."""
