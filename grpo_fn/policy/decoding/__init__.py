"""The form of a model for decoding: its weights for one rollout, and its compiled steps."""
