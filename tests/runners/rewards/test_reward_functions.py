"""From a reward's name to its function: built-in, module and file, and every way that can fail."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.errors import UserError
from runners.rewards.builtin import REWARDS
from runners.rewards.functions import Reward, check_columns, resolve_reward, resolve_rewards


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python's path and the modules of a test's rewards go when the test goes."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    """Write a file, with the folders it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refused(name: str, *dirs: Path) -> str:
    """The one line with which a reward's name is refused."""
    with pytest.raises(UserError) as caught:
        resolve_reward(name, dirs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_built_in_names() -> None:
    """Every built-in name gives its function and the weight asked for."""
    for name in REWARDS:
        reward = resolve_reward(name, weight=0.25)
        assert (reward.name, reward.function.__name__, reward.weight) == (name, name, 0.25)


def test_unknown_name_gives_the_nearest() -> None:
    """A misspelt built-in name is answered with the right one and with the forms of one's own."""
    message = refused("corectness_reward_func")
    assert "did you mean correctness_reward_func?" in message
    assert "package.module:function" in message


def test_file_beside_the_config(tmp_path: Path) -> None:
    """A relative file is found in the first base folder that has it; it imports its neighbours, even late."""
    write(tmp_path / "b" / "mine_helper_a.py", "VALUE = 3.0\n")
    write(tmp_path / "b" / "mine_helper_b.py", "VALUE = 4.0\n")
    text = "import mine_helper_a\ndef f(completions):\n    import mine_helper_b\n"
    write(tmp_path / "b" / "mine.py", text + "    return [mine_helper_a.VALUE + mine_helper_b.VALUE]\n")
    reward = resolve_reward("mine.py:f", [tmp_path / "a", tmp_path / "b"])
    assert reward.name == "f"
    assert reward.function(completions=[0]) == [7.0]
    assert resolve_reward(f"{tmp_path / 'b' / 'mine.py'}:f").function is reward.function


def test_module_beside_the_config(tmp_path: Path) -> None:
    """A package in a base folder is importable by its dotted name; an installed one wins over it."""
    write(tmp_path / "mine_pack" / "__init__.py", "")
    write(tmp_path / "mine_pack" / "inner.py", "def f(completions, **_):\n    return [1.0]\n")
    write(tmp_path / "statistics.py", "def mean(completions):\n    return []\n")
    assert resolve_reward("mine_pack.inner:f", [tmp_path]).function(completions=[0]) == [1.0]
    assert "the signature is mean(data)" in refused("statistics:mean", tmp_path)


def test_instances_can_be_rewards(tmp_path: Path) -> None:
    """An object with __call__ is a reward; its class is not."""
    text = "class Length:\n    def __call__(self, completions):\n        return [1.0]\nlength = Length()\n"
    write(tmp_path / "mine.py", text)
    assert resolve_reward("mine.py:length", [tmp_path]).function(completions=[0]) == [1.0]
    assert "found the class Length" in refused("mine.py:Length", tmp_path)


def test_missing_file_and_module(tmp_path: Path) -> None:
    """A missing file is named with the whole path, a missing module with the folders looked in."""
    assert f"no file at {tmp_path / 'none.py'}" in refused("none.py:f", tmp_path)
    message = refused("mine_missing.inner:f", tmp_path)
    assert "no module named mine_missing" in message
    assert str(tmp_path) in message
    write(tmp_path / "notes.txt", "")
    assert "must end in .py" in refused("./notes.txt:f", tmp_path)
    assert "expected package.module:function" in refused("mine.py:", tmp_path)
    assert "expected package.module:function" in refused(":f", tmp_path)


def test_failing_imports_name_the_line(tmp_path: Path) -> None:
    """An exception, a syntax error and an exit while importing each become one line, every time anew."""
    write(tmp_path / "raises.py", "x = 1\ny = 1 / 0\n")
    assert "line 2: ZeroDivisionError" in refused("raises.py:f", tmp_path)
    assert "line 2: ZeroDivisionError" in refused("raises.py:f", tmp_path)
    write(tmp_path / "broken.py", "def f(:\n")
    assert "SyntaxError" in refused("broken.py:f", tmp_path)
    write(tmp_path / "leaves.py", "raise SystemExit(3)\n")
    assert "SystemExit: 3" in refused("leaves:f", tmp_path)
    write(tmp_path / "lacks.py", "import mine_missing\n")
    assert "No module named 'mine_missing'" in refused("lacks:f", tmp_path)


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("lenght", "has no lenght; did you mean length?"),
        ("LIMIT", "expected a function, found int"),
        ("texts_only", "the signature is texts_only(texts, answer)"),
        ("by_position", "the signature is by_position(completions, /)"),
        ("half", "the signature is half(first, /, completions)"),
        ("nothing", "the signature is nothing()"),
    ],
)
def test_wrong_functions(tmp_path: Path, attribute: str, expected: str) -> None:
    """A missing function, a thing that is none, and a signature that cannot be used are told apart."""
    text = (
        "LIMIT = 3\ndef length(completions): return []\ndef texts_only(texts, answer): return []\n"
        "def by_position(completions, /): return []\ndef nothing(): return []\n"
        "def half(first, /, completions): return []\n"
    )
    write(tmp_path / "mine.py", text)
    assert expected in refused(f"mine.py:{attribute}", tmp_path)


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    """The same file gives the same function until it is edited."""
    path = write(tmp_path / "mine.py", "def f(completions): return [1.0]\n")
    first = resolve_reward("mine.py:f", [tmp_path])
    assert resolve_reward("mine.py:f", [tmp_path]).function is first.function
    write(path, "def f(completions): return [2.0, 2.0]\n")
    assert resolve_reward("mine.py:f", [tmp_path]).function(completions=[]) == [2.0, 2.0]


def test_resolve_rewards(tmp_path: Path) -> None:
    """Weights go with their functions in order; functions of one name are logged under their full texts."""
    write(tmp_path / "a.py", "def f(completions): return []\n")
    write(tmp_path / "b.py", "def f(completions): return []\n")
    rewards = resolve_rewards(["int_reward_func", "a.py:f", "b.py:f"], [1.0, 0.5, -2.0], [tmp_path])
    assert [(reward.name, reward.weight) for reward in rewards] == [
        ("int_reward_func", 1.0),
        ("a.py:f", 0.5),
        ("b.py:f", -2.0),
    ]
    assert [reward.weight for reward in resolve_rewards(list(REWARDS))] == [1.0] * 5


@pytest.mark.parametrize(
    ("names", "weights", "expected"),
    [
        ([], [], "reward.functions is empty"),
        (["int_reward_func"], [1.0, 2.0], "one entry for each of 1 functions, found 2"),
        (["int_reward_func"], [float("nan")], "holds nan"),
        (["int_reward_func", "int_reward_func"], [], "twice"),
    ],
)
def test_resolve_rewards_refuses(names: list[str], weights: list[float], expected: str) -> None:
    """No reward, a wrong number of weights, a weight that is no number, and a repeated name are refused."""
    with pytest.raises(UserError, match=expected):
        resolve_rewards(names, weights)


def test_check_columns() -> None:
    """A column that a reward cannot do without is missed by name; what every reward gets never is."""

    def needy(completions, prompts, completion_ids, difficulty, hint=None, **columns):
        return []

    rewards = [Reward("needy", needy)]
    check_columns(rewards, ["difficulty"])
    with pytest.raises(
        UserError, match="needs the column difficulty; the data has answer, dificulty; did you mean dificulty"
    ):
        check_columns(rewards, ["dificulty", "answer"])
