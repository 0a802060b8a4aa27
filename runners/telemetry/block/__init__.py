"""Parts of the block on the terminal: its lower rows, and the keys that change what it shows."""
