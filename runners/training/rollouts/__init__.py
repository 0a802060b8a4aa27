"""From prompts to an experience: sampling, scoring, and the same on several ranks."""
