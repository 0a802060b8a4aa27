"""The presets that `grpo-run NAME` finds by name: each TOML file beside this one."""
