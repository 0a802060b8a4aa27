"""Functions that make a sound model folder faulty."""

import json


def without(name):
    """Removes a file."""
    return lambda folder: (folder / name).unlink()


def containing(name, content):
    """Replaces a file."""
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def stating(name, **keys):
    """Changes keys of a JSON file."""

    def act(folder):
        file = folder / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | keys))

    return act
