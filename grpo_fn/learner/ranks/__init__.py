"""What several ranks do together: gradients summed, rows dealt out, the optimizer in parts."""
