"""The form of a model that decodes: its weights for one rollout, and the compiled steps that fit it."""
