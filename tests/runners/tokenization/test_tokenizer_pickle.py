"""tokenizer.pkl: an Encoding is read, other names and opcodes are refused, and nothing of a pickle runs."""

import copyreg
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


def pickled(state):
    """An Encoding with any state, as bytes; the class's name is replaced by tiktoken's."""
    text, module = pickle.dumps(Encoding(state), 4), __name__.encode()
    old, new = bytes([len(module)]) + module, b"\x0dtiktoken.core"
    # The one frame's length changes with the name's.
    (frame,) = struct.unpack("<Q", text[3:11])
    return text[:3] + struct.pack("<Q", frame + len(new) - len(old)) + text[11:].replace(old, new)


@pytest.mark.parametrize("protocol", [4, 5])
def test_an_encoding_comes_back_from_a_pickle(tmp_path, protocol):
    """A real one, trained here: the same vocabulary and the same tokens."""
    encoding = make_encoding()
    found = read_encoding(write_pickle(tmp_path, encoding, protocol=protocol))
    assert type(found).__module__ == "tiktoken.core"
    text = "Anna bakes 48 rolls, naïve 漢字 😀"
    assert found.encode(text) == encoding.encode(text)
    assert found.token_byte_values() == encoding.token_byte_values()
    assert found.special_tokens_set == set(NANOCHAT_SPECIAL)
    assert encoding_state(pickled(STATE)) == STATE


GLOBAL = f"c{__name__}\ntrip\n".encode()
STACK_GLOBAL = b"\x8c" + bytes([len(__name__)]) + __name__.encode() + b"\x8c\x04trip\x93"
ENCODING = b"\x8c\x0dtiktoken.core\x8c\x08Encoding\x93"
AGAIN = b"\x80\x04" + STACK_GLOBAL[:-7] + b"\x94\x8c\x04trip\x94" + ENCODING[:-1] + b"h\x00h\x01\x93"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"\x80\x02" + GLOBAL + b")R.", "the opcode GLOBAL", id="GLOBAL, REDUCE"),
        pytest.param(b"\x80\x04" + STACK_GLOBAL + b")R.", "the opcode REDUCE", id="STACK_GLOBAL, REDUCE"),
        pytest.param(f"(i{__name__}\ntrip\n.".encode(), "the opcode INST", id="INST"),
        pytest.param(
            b"\x80\x04" + STACK_GLOBAL + b")\x81.", f'asks for "{__name__}.trip"; ', id="STACK_GLOBAL"
        ),
        pytest.param(AGAIN + b")\x81.", f'asks for "{__name__}.trip"; ', id="a name from the memo"),
        pytest.param(
            b"\x80\x04\x8c\x0dtiktoken.core\x8c\x13Encoding.__init__.x\x93.",
            'asks for "tiktoken.core.Encoding.__init__.x"; ',
            id="a dotted name",
        ),
    ],
)
def test_another_name_is_refused_and_nothing_runs(content, message):
    """Whatever opcode asks for it."""
    ran.clear()
    with pytest.raises(UserError, match=r"none of (it|this one) was run") as caught:
        encoding_state(content)
    assert message in str(caught.value) and ran == []


@pytest.mark.parametrize(
    ("content", "opcode"),
    [
        (b"\x80\x04" + ENCODING + b")R.", "REDUCE"),
        (b"\x80\x04(" + ENCODING + b"o.", "OBJ"),
        (b"\x80\x04" + ENCODING + b")}\x92.", "NEWOBJ_EX"),
        (b"\x80\x02\x82\xc8)R.", "EXT1"),
        (b"\x80\x02\x84\xc8\x00\x00\x00.", "EXT4"),
        (b"Ptrip\n.", "PERSID"),
        (b"\x80\x02U\x04tripQ.", "SHORT_BINSTRING"),
        (b"\x80\x04})" + b"2\x86" * 60 + b"K\x01s.", "DUP"),
        (b"\x80\x04})" + b"".join(b"\x94h%c\x86" % place for place in range(60)) + b"K\x01s.", "TUPLE2"),
        (b"\x80\x02K\x01r\xff\xff\xff\xff.", "LONG_BINPUT"),
        (b"K\x01p99999999999\n.", "PUT"),
        (pickle.dumps([1], 4), "EMPTY_LIST"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_opcodes_that_no_vocabulary_needs_are_refused(content, opcode):
    """Calls, references to outside, and few bytes that stand for gigabytes or for hours."""
    with pytest.raises(UserError, match=rf"protocol 4 or 5 .* the opcode {opcode}; none of it was run"):
        encoding_state(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no pickle that can be read: ValueError"),
        (b"\x80\x04\x95\xff", "no pickle that can be read"),
        (b"\x80\x63.", "no pickle that can be read: ValueError: unsupported pickle protocol"),
        (b"\x80\x04B\xff\xff\xff\x7fx.", "no pickle that can be read"),
        (b"\x80\x04}}K\x01s.", "no pickle that can be read: TypeError"),
        (b"\x80\x04" + ENCODING + b"}b.", "no pickle that can be read: TypeError"),
        (b"\x80\x04" + ENCODING + b".", "expected tiktoken's Encoding, found a pickled type"),
        (pickle.dumps({"a": 1}, 4), "expected tiktoken's Encoding, found a pickled dict"),
        (pickled("gpt2"), "expected its vocabulary, found str"),
        (b"\x80\x04" + ENCODING + b")\x81.", "the Encoding's state: expected its vocabulary, found NoneType"),
        (pickled({**STATE, "pat_str": b"x"}), "pat_str: expected str, found bytes"),
        (pickled({"name": "x", "pat_str": "x"}), "mergeable_ranks: expected dict, found nothing"),
        (pickled({**STATE, "mergeable_ranks": {"a": 1}}), "mergeable_ranks is not a table from bytes to int"),
        (pickled({**STATE, "special_tokens": {"a": "b"}}), "special_tokens is not a table from str to int"),
        (pickled({**STATE, "special_tokens": {"a": 3}}), "ids are not different numbers"),
        (pickled({**STATE, "special_tokens": {"a": -1}}), "ids are not different numbers"),
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
    with pytest.raises(UserError, match=r"tokenizer.pkl: expected a pickle .* the opcode GLOBAL"):
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
