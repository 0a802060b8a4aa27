"""The check before a run that a model decodes what it learns; its answers are kept."""
