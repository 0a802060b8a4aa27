"""The function of a reward's name: built-in, from a module or a file, and all errors."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runners.errors import UserError
from runners.rewards.builtin import REWARDS
from runners.rewards.scoring import resolve_rewards


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores Python's path and modules after each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


MINE = """
LIMIT = 3
def f(completions): return [1.0]
def length(completions): return []
class Counter:
    def __call__(self, completions): return [1.0]
length_of = Counter()
"""
FILES = {
    "mine.py": MINE,
    "raises.py": "x = 1\ny = 1 / 0\n",
    "leaves.py": "raise SystemExit(3)\n",
    "pack/__init__.py": "",
    "pack/inner.py": "def f(completions, **_):\n    return [1.0]\n",
    "b/helper_a.py": "VALUE = 3.0\n",
    "b/helper_b.py": "VALUE = 4.0\n",
    "b/near.py": "import helper_a\ndef f(completions):\n    import helper_b\n"
    "    return [helper_a.VALUE + helper_b.VALUE]\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with these files."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "value"),
    [("mine.py:f", 1.0), ("near.py:f", 7.0), ("pack.inner:f", 1.0), ("mine.py:length_of", 1.0)],
    ids=["a file", "beside files that it imports late", "a package", "an object"],
)
def test_files_and_modules_beside_the_config_are_found(folder: Path, name: str, value: float) -> None:
    """The first base folder with the file is used; its full path names the same function."""
    reward: Any
    (reward,) = resolve_rewards([name], base_dirs=[folder, folder / "b"])
    assert reward.name == name.partition(":")[2] and reward.function(completions=[0]) == [value]
    if name == "near.py:f":
        assert resolve_rewards([f"{folder / 'b' / 'near.py'}:f"])[0].function is reward.function


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("corectness_reward_func", "did you mean correctness_reward_func?"),
        *(("mine.py:Counter", "found the class Counter"), ("none.py:f", "no file at {folder}/none.py")),
        ("mine_missing.inner:f", "no module named mine_missing on Python's path or in {folder}"),
        *(("mine.py:", "expected package.module:function"), ("raises.py:f", "line 2: ZeroDivisionError")),
        *(("leaves:f", "SystemExit: 3"), ("mine.py:lenght", "has no lenght; did you mean length?")),
        ("mine.py:LIMIT", "expected a function, found int"),
    ],
)
def test_an_invalid_reward_is_refused_in_one_line(folder: Path, name: str, expected: str) -> None:
    """Each call reports the invalid name, file, import or object in one line."""
    for _ in range(2):
        with pytest.raises(UserError, match=re.escape(expected.format(folder=folder))) as caught:
            resolve_rewards([name], base_dirs=[folder])
        assert "\n" not in str(caught.value)


def test_resolve_rewards(folder: Path) -> None:
    """Weights and functions keep their order; functions of the same name are logged in full."""
    names = [*REWARDS, "mine.py:f", "pack.inner:f"]
    weights = [0.5 * n for n in range(len(names))]
    rewards: Any = resolve_rewards(names, weights, [folder])
    assert [(each.name, each.weight) for each in rewards] == [*zip(names, weights, strict=True)]
    assert [each.function.__name__ for each in rewards] == [*REWARDS, "f", "f"]
    assert [reward.weight for reward in resolve_rewards(list(REWARDS))] == [1.0] * 5
