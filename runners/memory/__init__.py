"""The memory that a run will take, predicted phase by phase, and watched while it goes."""
