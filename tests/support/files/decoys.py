"""A user's files that look like the leftovers of a killed process, and whether anything touched them."""

import os

NAME = ".grpo_fn-0123456789a"  # and a digit


def plant(folder, target):
    """Creates decoys of many shapes beside the name `target`, and returns their paths."""
    outside = folder.parent / f"{folder.name}-outside"  # what links lead to
    precious = {"precious": "x"}
    inside = {
        f".{target}.part": "a file",
        f".{target}.old-1": {**precious, "deeper": {"more": "y"}},
        ".grpo_fn": {"old": precious},
        f".grpo_fn-0123456789AB-{target}": {"old": precious},
        f"{NAME}0": {"old": precious, "new": precious},  # no target
        f"{NAME}1-": {"old": precious},
        f"{NAME}2-{target}": {},
        f"{NAME}3-never-there": {"new": {}, "notes.txt": "a file of the user's"},
        f"{NAME}4-{target}": "a file with a name of ours",
    }
    _tree(outside, {"old": precious, "new": {}})
    _tree(folder, inside)
    links = {
        ".linked.old-1": outside,
        f"{NAME}a-never-there": outside,  # a folder with the content of ours, by a link
    }
    for name, leads_to in links.items():
        (folder / name).symlink_to(leads_to)
    return [outside, *(folder / name for name in (*inside, *links))]


def look(paths):
    """Everything visible of these paths and below, including modification times."""
    seen = {}
    for top in paths:
        for path in [top, *(sorted(top.rglob("*")) if top.is_dir() and not top.is_symlink() else ())]:
            facts = path.lstat()
            seen[path] = (facts.st_ino, facts.st_mode, facts.st_mtime_ns, facts.st_nlink, _content(path))
    return seen


def _content(path):
    if path.is_symlink():
        return os.readlink(path)
    return path.read_bytes() if path.is_file() else None


def _tree(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    for name, inside in content.items():
        if isinstance(inside, dict):
            _tree(folder / name, inside)
        else:
            (folder / name).write_text(inside)
