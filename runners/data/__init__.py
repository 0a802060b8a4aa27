"""From a file, folder or Hub name to the prompts of a run, without rewards or models' weights."""
