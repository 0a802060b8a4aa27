"""Tables [judge.NAME]: read, named by rewards, overridden, written down again; and what is refused."""

import json

import pytest

from runners.config.loading import ConfigError, load_config
from runners.judges import combined

URL = "http://127.0.0.1:8080/v1"
BASE = f"""
model.path = "embedded"
data.source = "embedded"
[reward]
functions = ["correctness_reward_func", "judge.kind-one"]
[judge.kind-one]
url = "{URL}"
"""


def with_keys(**keys):
    """The config with these keys of the judge in place of its own, or beside them."""
    found = {"url": URL, **keys}
    lines = [f"{key} = {json.dumps(value)}" for key, value in found.items() if value is not None]
    return BASE.rpartition("url")[0] + "\n".join(lines)


def test_a_judge_is_read_and_written_down(load, tmp_path):
    """With defaults, with --set, from config.resolved.json's form and from --dry-run's."""
    config = load(BASE, *(f"judge.kind-one.{key}" for key in ("timeout=5", "model=large", "scale=[1, 5]")))
    judge = config.judge["kind-one"]
    assert (judge.kind, judge.timeout, judge.model, judge.scale) == ("score", 5.0, "large", (1.0, 5.0))
    (tmp_path / "again.toml").write_text(config.to_toml())
    (tmp_path / "again.json").write_text(json.dumps(config.to_dict()))
    assert "\n[judge.kind-one]\n" in config.to_toml()
    assert load_config("again.toml") == load_config("again.json") == config
    assert hash(config) is not None
    assert load('model.path = "embedded"').to_dict()["judge"] == {}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"ulr": 1}, "ulr: unknown key; did you mean judge.kind-one.url?"),
        ({"kind": "rank"}, 'ranking, found "rank"; did you mean ranking?'),
        ({"url": None}, "url: expected the address of an API"),
        ({"url": "ftp://a/v1"}, "url: expected the address of an API"),
        ({"url": "http://a:x/v1"}, "url: expected the address"),
        ({"url": "http://a/v1/chat/completions"}, "expected the address without /chat/completions"),
        ({"url": "https://me:sk-planted@a/v1"}, "url: expected no user or password in the address"),
        ({"api_key_env": "sk-planted 1"}, "found another text (not shown"),
        ({"api_key_env": "HF_TOKEN"}, 'found "HF_TOKEN", which other clients read too'),
        ({"api_key": "x"}, "api_key: unknown key; did you mean judge.kind-one.api_key_env?"),
        ({"prompt": "Mark it."}, "prompt: expected {completion} where"),
        ({"prompt": "{completion}{completions}"}, "the judged text stands, found {completions}"),
        ({"kind": "ranking", "prompt": "{completion}"}, "prompt: expected {completions} where"),
        ({"kind": "ranking", "pattern": "(x)"}, 'pattern: expected none with kind = "ranking"'),
        ({"pattern": "(x"}, "pattern: expected a regular expression"),
        ({"pattern": "x"}, "pattern: expected one group, (the score), found 0"),
        ({"extra": "[1]"}, "extra: expected a JSON object"),
        (
            {"extra": '{"messages": []}'},
            "expected none of the keys that the judge sets itself, found messages",
        ),
        ({"scale": [5, 1]}, "scale: expected a list of 2 numbers: 0 <= low < high, found [5, 1]"),
    ],
)
def test_keys_that_do_not_fit_are_reported(load, keys, line):
    """File, key, what was expected and found; never what may be a key or a password."""
    with pytest.raises(ConfigError) as caught:
        load(with_keys(**keys))
    assert line in str(caught.value) and "train.toml: judge.kind-one." in str(caught.value)
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("reward.functions = ['judge.kin']", 'a table [judge.NAME], found "judge.kin"; there are none'),
        ("reward.functions = ['judge.on']\n[judge.one]\nurl='http://a'", "; did you mean one?"),
        ("[judge]\nurl = 'http://a'", "judge.url: expected a table [judge.NAME], each with its own name"),
        ("judge = 3", "judge: expected tables [judge.NAME], found 3"),
        ("[judge.'a b']\nurl = 'http://a'", 'expected a name of letters, digits, - and _, found "a b"'),
    ],
)
def test_names_have_to_be_right(load, text, line):
    """Of the table, and in reward.functions."""
    with pytest.raises(ConfigError) as caught:
        load(f"model.path = 'embedded'\n{text}")
    assert line in str(caught.value)


def test_conditions_may_name_a_judges_numbers(load):
    """Those that it logs, with the nearest spelling."""
    assert load(BASE, "stop.when=['judge/kind-one/total_cost > 5']").stop.when
    with pytest.raises(ConfigError, match="did you mean judge/kind-one/failed"):
        load(BASE, "stop.when=['judge/kind-one/faild > 5']")


def test_several_batch_steps_become_one_number():
    """Counts add up, times are averaged, the largest stays; other names are not a judge's."""
    values = {"requests": 3, "latency": 1.5, "slowest": 2}
    assert {name: combined(f"judge/a/{name}", [1.0, 2.0]) for name in values} == values
    assert combined("judge/requests", [1.0]) is combined("other/a/requests", [1.0]) is None
