"""A user's own files that look like what a killed process leaves, and whether anything has touched them."""

import json
import os

from runners.files.durable import MARKER

VALID = {"format": "grpo_fn.staging", "version": 1, "target": "never-there", "process": 1}
NAME = ".grpo_fn-0123456789a"  # and a digit


def plant(folder, target):
    """Puts decoys of many shapes beside the name `target`; their paths."""
    outside = folder.parent / f"{folder.name}-outside"  # what links lead to
    made = [outside]
    _tree(outside, {MARKER: json.dumps(VALID), "old": {"precious": "x"}, "new": {}})
    files = (
        ".vimrc.new-1",
        ".bashrc.old-20240101",
        f".{target}.part",
        f"{target}~",
        f"#{target}#",
        ".x.new-1",
    )
    for name in (*files, f".{target}.old-2", f".{target}.new-2"):
        _tree(folder, {name: "a file of the user's"})
        made.append(folder / name)
    folders = {
        ".ssh.old-2024": {"id": "secret"},
        f".{target}.old-1": {"precious": "x", "deeper": {"more": "y"}},
        f".{target}.new-1": {"precious": "x"},
        f"{target}.old-1": {"precious": "x"},
        ".empty.new-1": {},
        ".grpo_fn": {MARKER: json.dumps(VALID), "old": {"precious": "x"}},
        ".grpo_fn-mine": {MARKER: json.dumps(VALID), "old": {"precious": "x"}},
        ".grpo_fn-0123456789AB": {MARKER: json.dumps(VALID), "old": {"precious": "x"}},
        f"{NAME}0": {"old": {"precious": "x"}, "new": {"precious": "x"}},  # no marker
        f"{NAME}1": {},
        f"{NAME}2": {MARKER: "", "old": {"precious": "x"}},
        f"{NAME}3": {MARKER: "{", "new": {"precious": "x"}},
        f"{NAME}4": {MARKER: json.dumps({**VALID, "format": "theirs"}), "old": {"precious": "x"}},
        f"{NAME}5": {MARKER: json.dumps({**VALID, "version": 2}), "old": {"precious": "x"}},
        f"{NAME}6": {MARKER: json.dumps({**VALID, "target": "../escaped"}), "old": {}, "new": {}},
        f"{NAME}7": {MARKER: json.dumps({**VALID, "target": ".."}), "old": {}, "new": {}},
        f"{NAME}8": {MARKER: json.dumps({**VALID, "target": 7}), "old": {}, "new": {}},
        f"{NAME}9": {MARKER: json.dumps(VALID), "new": {}, "notes.txt": "a file of the user's"},
    }
    _tree(folder, folders)
    made += [folder / name for name in folders]
    links = {
        ".linked.old-1": outside,
        ".dangling.new-1": folder / "nowhere",
        f".{target}.old-3": outside / "old" / "precious",
        f"{NAME}a": outside,  # a folder with a marker, by a link
    }
    for name, leads_to in links.items():
        (folder / name).symlink_to(leads_to)
        made.append(folder / name)
    for name, marker in ((f"{NAME}b", "link"), (f"{NAME}c", "pipe"), (f"{NAME}d", "folder")):
        _tree(folder, {name: {"old": {"precious": "x"}, "new": {}}})
        if marker == "link":
            (folder / name / MARKER).symlink_to(outside / MARKER)
        elif marker == "pipe":
            os.mkfifo(folder / name / MARKER)
        else:
            (folder / name / MARKER).mkdir()
        made.append(folder / name)
    (folder / f"{NAME}e").write_text("a file with a name of ours")
    return [*made, folder / f"{NAME}e"]


def look(paths):
    """All that can be seen of these paths and below, times of change included."""
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
