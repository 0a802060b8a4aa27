"""tokenizer.pkl: every protocol is read, every other name is refused, and nothing of a pickle runs."""

import copyreg
import importlib
import pickle
import struct

import pytest

from runners.errors import UserError
from runners.tokenization.tokenizer_pickle import encoding_state, find_pickle, read_encoding
from tests.support.tiktoken_files import NANOCHAT_SPECIAL, make_encoding, write_pickle

STATE = {
    "name": "small",
    "pat_str": "[a-z]+|.",
    "mergeable_ranks": {bytes([i]): i for i in range(256)},
    "special_tokens": {"<|bos|>": 256},
}
ran = []  # what a pickle managed to call


def trip(*arguments):
    """Called by a pickle that got through."""
    ran.append(arguments)
    return {}


class Encoding:
    """Pickles as tiktoken's does, with any state."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return copyreg.__newobj__, (Encoding,), self.state


def pickled(state, protocol=4):
    """An Encoding with any state, as bytes; the class's name is replaced by tiktoken's."""
    text = pickle.dumps(Encoding(state), protocol)
    if protocol < 4:
        return text.replace(f"c{__name__}\nEncoding\n".encode(), b"ctiktoken.core\nEncoding\n")
    module = __name__.encode()
    old, new = bytes([len(module)]) + module, b"\x0dtiktoken.core"
    # The one frame's length changes with the name's.
    (frame,) = struct.unpack("<Q", text[3:11])
    return text[:3] + struct.pack("<Q", frame + len(new) - len(old)) + text[11:].replace(old, new)


@pytest.fixture
def registered():
    """An extension code for `trip`, as a library may register one."""
    copyreg.add_extension(__name__, "trip", 200)
    yield 200
    copyreg.remove_extension(__name__, "trip", 200)
    copyreg.clear_extension_cache()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_encoding_comes_back_from_every_protocol(tmp_path, protocol):
    """A real one, trained here: the same vocabulary and the same tokens."""
    encoding = make_encoding()
    found = read_encoding(write_pickle(tmp_path, encoding, protocol=protocol))
    assert type(found).__module__ == "tiktoken.core"
    text = "Anna bakes 48 rolls, naïve 漢字 😀"
    assert found.encode(text) == encoding.encode(text)
    assert found.token_byte_values() == encoding.token_byte_values()
    assert found.special_tokens_set == set(NANOCHAT_SPECIAL)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_state_is_the_encodings_own(protocol):
    """Name, pattern, ranks and special tokens as they were pickled."""
    assert encoding_state(pickled(STATE, protocol)) == STATE


GLOBAL = f"c{__name__}\ntrip\n".encode()
STACK_GLOBAL = b"\x8c" + bytes([len(__name__)]) + __name__.encode() + b"\x8c\x04trip\x93"
ENCODING = b"ctiktoken.core\nEncoding\n"


TRIP = f"{__name__}.trip"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        pytest.param(b"\x80\x02" + GLOBAL + b".", TRIP, id="GLOBAL"),
        pytest.param(b"\x80\x02" + GLOBAL + b")R.", TRIP, id="GLOBAL, REDUCE"),
        pytest.param(b"\x80\x04" + STACK_GLOBAL + b")R.", TRIP, id="STACK_GLOBAL, REDUCE"),
        pytest.param(f"(i{__name__}\ntrip\n.".encode(), TRIP, id="INST"),
        pytest.param(b"(" + GLOBAL + b"o.", TRIP, id="OBJ"),
        pytest.param(b"\x80\x02" + GLOBAL + b")\x81.", TRIP, id="NEWOBJ"),
        pytest.param(b"\x80\x04" + GLOBAL + b")}\x92.", TRIP, id="NEWOBJ_EX"),
        pytest.param(b"\x80\x02" + ENCODING + b")\x81" + GLOBAL + b"b.", TRIP, id="BUILD with a function"),
        pytest.param(
            b"\x80\x04\x8c\x0dtiktoken.core\x8c\x13Encoding.__init__.x\x93.",
            "tiktoken.core.Encoding.__init__.x",
            id="a dotted name",
        ),
        pytest.param(b"\x80\x02ctiktoken.core\nfunctools\n.", "tiktoken.core.functools", id="a neighbour"),
        pytest.param(b"\x80\x02c__builtin__\neval\n(U\x011tR.", "__builtin__.eval", id="builtins"),
        pytest.param(b"\x80\x02ccodecs\nencode\n.", "codecs.encode", id="another module's encode"),
    ],
)
def test_another_name_is_refused_by_name(content, name):
    """Whatever opcode asks for it: the message has the name, and nothing ran."""
    ran.clear()
    with pytest.raises(UserError, match="none of this one was run") as caught:
        encoding_state(content)
    assert f'the pickle asks for "{name}"; ' in str(caught.value)
    assert ran == []


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("opcode", ["EXT1", "EXT2", "EXT4"])
def test_extension_codes_are_refused(registered, opcode, cached):
    """Registered ones by name, also where an earlier pickle has left the function in Python's cache."""
    code = {"EXT1": b"\x82\xc8", "EXT2": b"\x83\xc8\x00", "EXT4": b"\x84\xc8\x00\x00\x00"}[opcode]
    ran.clear()
    if cached:
        assert pickle.loads(b"\x80\x02" + code + b".") is trip
    with pytest.raises(UserError, match=r"asks for .*\.trip"):
        encoding_state(b"\x80\x02" + code + b")R.")
    assert ran == []


def test_an_unregistered_extension_code_is_refused():
    """It means nothing here."""
    with pytest.raises(UserError, match=r"no pickle that can be read: .*extension code"):
        encoding_state(b"\x80\x02\x82\xc9.")


@pytest.mark.parametrize("content", [b"Ptrip\n.", b"\x80\x02U\x04tripQ."], ids=["PERSID", "BINPERSID"])
def test_persistent_ids_are_refused(content):
    """They point outside the file."""
    with pytest.raises(UserError, match=r'refers to something outside it \("trip"\)'):
        encoding_state(content)


def test_a_persistent_id_may_be_anything():
    """One that is no text is not spelt out: it may be made to take for ever."""
    nested = b"\x80\x02)" + b"2\x86" * 60 + b"Q."
    for content in (nested, b"\x80\x02)" + b"\x85" * 60 + b"Q."):
        with pytest.raises(UserError, match=r"twice|outside it .tuple.") as caught:
            encoding_state(content)
        assert len(str(caught.value)) < 200


TWICE = b"\x80\x04)" + b"".join(b"\x94h%c\x86" % place for place in range(60))  # ((), ()) 60 deep
HIDDEN = b"\x80\x04)" + b"".join(b"N0\x94h%c\x86" % place for place in range(60))  # with a detour before it


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"\x80\x04}" + TWICE[2:] + b"K\x01s.", "twice", id="a key that takes for ever to hash"),
        pytest.param(b"\x80\x04}" + HIDDEN[2:] + b"K\x01s.", "twice", id="the same, put off"),
        pytest.param(b"\x80\x04})" + b"2\x86" * 60 + b"K\x01s.", "twice", id="by DUP"),
        pytest.param(b"\x80\x02K\x01r\xff\xff\xff\xff.", "asks for 4,294,967,295 places", id="LONG_BINPUT"),
        pytest.param(b"K\x01p99999999999\n.", "asks for 99,999,999,999 places", id="PUT"),
        pytest.param(b"\x80\x04B\xff\xff\xff\x7fx.", "no pickle that can be read", id="BINBYTES"),
        pytest.param(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fx.", "no pickle that can be read", id="BINBYTES8"),
        pytest.param(b"\x80\x02\x8b\xff\xff\xff\x7fx.", "no pickle that can be read", id="LONG4"),
    ],
)
def test_bombs_are_refused_before_they_are_built(content, message):
    """A few bytes that stand for gigabytes, or for hours."""
    with pytest.raises(UserError, match=message):
        encoding_state(content)


def test_calling_what_is_admitted_makes_data_and_no_more():
    """REDUCE, OBJ, INST and NEWOBJ of the stand-in, before a good encoding: it comes back all the same."""
    good = pickled(STATE, 2)
    for start in (ENCODING + b")R0", b"(itiktoken.core\nEncoding\n0", b"(" + ENCODING + b"o0"):
        assert encoding_state(b"\x80\x02" + start + good[2:]) == STATE
    with pytest.raises(UserError, match="no pickle that can be read: TypeError"):
        encoding_state(b"\x80\x02" + ENCODING + b"U\x01x\x85R.")  # with an argument that it does not take


def test_building_on_what_is_admitted_changes_nothing_that_stays():
    """BUILD sets attributes on what is there: not on the class, and on the function for one reading only."""
    attributes = b"(N}U\x04nameU\x01xstb0"
    with pytest.raises(UserError, match="no pickle that can be read: TypeError"):
        encoding_state(b"\x80\x02" + ENCODING + attributes + pickled(STATE, 2)[2:])
    on_function = b"\x80\x02c_codecs\nencode\n" + attributes
    assert encoding_state(on_function + pickled(STATE, 2)[2:]) == STATE
    for module, name in (("tiktoken.core", "Encoding"), ("_codecs", "encode")):
        assert not hasattr(getattr(importlib.import_module(module), name), "name")
    with pytest.raises(UserError, match="found a pickled function"):
        encoding_state(b"\x80\x02c_codecs\nencode\n.")


def test_the_bytes_of_protocol_2_are_latin_1_only():
    """The function for bytes is not the codecs module's: no other codec can be asked for."""
    with pytest.raises(UserError, match=r'_codecs.encode: expected "latin1", found "rot13"'):
        encoding_state(b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no pickle that can be read: ValueError"),
        (b"\x80\x04\x95\xff", "no pickle that can be read"),
        (b"\x80\x63.", "no pickle that can be read: ValueError: unsupported pickle protocol"),
        (pickle.dumps({"a": 1}), "expected tiktoken's Encoding, found a pickled dict"),
        (pickled("gpt2"), 'expected its vocabulary, found "gpt2"'),
        (pickled(None), "the Encoding's state: expected its vocabulary, found NoneType"),
        (b"\x80\x02" + ENCODING + b")\x81.", "the Encoding's state: expected its vocabulary, found NoneType"),
        (pickled({**STATE, "pat_str": b"x"}), "pat_str: expected str, found bytes"),
        (pickled({"name": "x", "pat_str": "x"}), "mergeable_ranks: expected dict, found nothing"),
        (pickled({**STATE, "mergeable_ranks": {"a": 1}}), "mergeable_ranks is not a table from bytes to int"),
        (pickled({**STATE, "special_tokens": {"a": True}}), "special_tokens is not a table from str to int"),
        (pickled({**STATE, "special_tokens": {"a": 3}}), "ids are not different numbers"),
        (pickled({**STATE, "special_tokens": {"a": 2**31}}), "ids are not different numbers"),
        (pickled({**STATE, "mergeable_ranks": {b"a": 1}}), "no token for the byte 0x00"),
    ],
)
def test_what_is_no_vocabulary_is_reported(content, message):
    """One line that says what was found; broken pickles end in the same way."""
    with pytest.raises(UserError) as caught:
        encoding_state(content)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_file_is_named(tmp_path):
    """Errors lead with the path; a pattern that is no regular expression is one."""
    file = tmp_path / "tokenizer.pkl"
    with pytest.raises(UserError, match=r"tokenizer.pkl: cannot be read"):
        read_encoding(file)
    file.write_bytes(b"\x80\x02cos\nsystem\n.")
    with pytest.raises(UserError, match=r'tokenizer.pkl: the pickle asks for "os.system"'):
        read_encoding(file)
    file.write_bytes(pickled({**STATE, "pat_str": "("}))
    with pytest.raises(UserError, match=r"tokenizer.pkl: tiktoken does not take it"):
        read_encoding(file)


def test_the_file_is_found_in_the_folder_or_in_its_tokenizer_folder(tmp_path):
    """nanochat keeps it in tokenizer/; the folder's own wins."""
    assert find_pickle(tmp_path) is None
    (tmp_path / "tokenizer").mkdir()
    inner = write_pickle(tmp_path / "tokenizer")
    assert find_pickle(tmp_path) == inner
    assert find_pickle(tmp_path) != write_pickle(tmp_path) == find_pickle(tmp_path)
