"""From a file, folder or Hub name to the prompts of a run; no rewards, no model weights."""
