"""Model folders and modules: found, checked, read, adapted, written. No data, no rewards, no loop."""
