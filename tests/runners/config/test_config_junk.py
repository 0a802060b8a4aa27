"""Random configs: any content of a file or of --set either loads or raises a ConfigError."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from runners.config.flat_keys import FLAT_KEYS, TABLE
from runners.config.loading import KEYS, SECTIONS, ConfigError, load_config
from runners.errors import spell
from tests.support.properties.strategies import examples

MODEL = 'model.path = "embedded"\n'
_NAMES = sorted({*SECTIONS, *FLAT_KEYS, TABLE, *(path[-1] for path in KEYS), "", "x.y", "\n"})
_LEAVES = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["embedded", "none", "clip"]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=3),
    max_leaves=6,
)


def outcome(path, text, overrides=()):
    """The config's faults, if any; any other exception fails the test."""
    path.write_text(text)
    try:
        load_config(str(path), overrides)
    except ConfigError as error:
        assert error.problems and all(line and line.isprintable() for line in error.problems)
        return error.problems
    return ()


@settings(max_examples=examples(100))
@given(table=st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=5))
def test_random_tables_load_or_are_refused(tmp_path_factory, table):
    """TOML with known and unknown names gives a config or a ConfigError with printable lines."""
    text = "\n".join(f"{spell(key)} = {quoted(value)}" for key, value in table.items())
    outcome(tmp_path_factory.getbasetemp() / "junk.toml", text)


def quoted(value):
    """Inline TOML with every key in quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spell(key)} = {quoted(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(quoted, value)) + "]" if isinstance(value, list) else spell(value)


@settings(max_examples=examples(100))
@given(path=st.sampled_from(sorted(KEYS)), value=_VALUES)
@example(path=("answer", "form"), value="none")
@example(path=("data", "curriculum"), value="static")
@example(path=("model", "adapters"), value="0")
@example(path=("teacher", "path"), value="self")
def test_a_bad_value_is_reported_at_its_key(tmp_path_factory, path, value):
    """A value is accepted, or each error line names the file and the key."""
    start = "" if path == ("model", "path") else MODEL
    file = tmp_path_factory.getbasetemp() / "one.toml"
    name = ".".join(path)
    faults = outcome(file, f"{start}{name} = {quoted(value)}\n")
    assert all(line.startswith(f"{file}: ") and name in line for line in faults), faults


@settings(max_examples=examples(100))
@given(
    override=st.text(max_size=20) | st.builds("{}={}".format, st.sampled_from(_NAMES), st.text(max_size=9))
)
def test_random_overrides_load_or_are_refused(tmp_path_factory, override):
    """The error lines of a bad --set start with --set."""
    faults = outcome(tmp_path_factory.getbasetemp() / "set.toml", MODEL, [override])
    assert all(line.startswith("--set") for line in faults)
