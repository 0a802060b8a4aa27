"""Only an Encoding is read from tokenizer.pkl; other names and opcodes are refused, and no code runs."""

import json
import pickle
import re

import pytest

from runners.conversion.convert import convert
from runners.conversion.nanochat import find_pickle, read_encoding
from runners.errors import UserError
from runners.models.folders import resolve_model
from runners.models.model_reader import read_model
from tests.support.tiktoken_files import make_encoding, make_nanochat_folder, write_pickle

STATE = {
    "name": "small",
    "pat_str": "[a-z]+|.",
    "mergeable_ranks": {bytes([i]): i for i in range(256)},
    "special_tokens": {"<|bos|>": 256},
}
ran = []  # calls by a pickle


def trip(*arguments):
    """Must never be called by a pickle."""
    ran.append(arguments)
    return {}


ENCODING = b"\x80\x04\x8c\x0dtiktoken.core\x8c\x08Encoding\x93"


def pickled(state):
    """A pickled Encoding with any state."""
    return ENCODING + b")\x81" + pickle.dumps(state, 4)[2:-1] + b"b."


@pytest.fixture
def read(tmp_path):
    """Reads a tokenizer.pkl with this content."""

    def content_read(content):
        (tmp_path / "tokenizer.pkl").write_bytes(content)
        return read_encoding(tmp_path / "tokenizer.pkl")

    return content_read


@pytest.mark.parametrize("protocol", [4, 5])
def test_an_encoding_comes_back_from_a_pickle(tmp_path, read, protocol):
    """A trained encoding keeps its vocabulary and tokens."""
    encoding = make_encoding()
    found = read_encoding(write_pickle(tmp_path, encoding, protocol=protocol))
    assert found.encode("Anna bakes, naïve 漢字 😀") == encoding.encode("Anna bakes, naïve 漢字 😀")
    assert found.token_byte_values() == encoding.token_byte_values()
    assert found._special_tokens == encoding._special_tokens
    assert read(pickled(STATE))._special_tokens == {"<|bos|>": 256}


GLOBAL = f"c{__name__}\ntrip\n".encode()
NAME = b"\x8c" + bytes([len(__name__)]) + __name__.encode()
TRIP = b"\x80\x04" + NAME + b"\x8c\x04trip\x93"
AGAIN = b"\x80\x04" + NAME + b"\x94\x8c\x04trip\x94" + ENCODING[2:-1] + b"h\x00h\x01\x93"
NESTED = b"".join(b"\x94h%c\x86" % place for place in range(60))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\x80\x02" + GLOBAL + b")R.", "the opcode GLOBAL"),
        (TRIP + b")R.", "the opcode REDUCE"),
        (f"(i{__name__}\ntrip\n.".encode(), "the opcode INST"),
        (TRIP + b")\x81.", f'it refers to "{__name__}.trip"'),
        (AGAIN + b")\x81.", f'it refers to "{__name__}.trip"'),
        (ENCODING + b")R.", "the opcode REDUCE"),
        (b"\x80\x04(" + ENCODING[2:] + b"o.", "the opcode OBJ"),
        (ENCODING + b")}\x92.", "the opcode NEWOBJ_EX"),
        (b"\x80\x02\x82\xc8)R.", "the opcode EXT1"),
        (b"\x80\x02\x84\xc8\x00\x00\x00.", "the opcode EXT4"),
        (b"Ptrip\n.", "the opcode PERSID"),
        (b"\x80\x02U\x04tripQ.", "the opcode SHORT_BINSTRING"),
        (b"\x80\x04})" + b"2\x86" * 60 + b"K\x01s.", "the opcode DUP"),
        (b"\x80\x04})" + NESTED + b"K\x01s.", "the opcode TUPLE2"),
        (b"\x80\x02K\x01r\xff\xff\xff\xff.", "the opcode LONG_BINPUT"),
        (b"K\x01p99999999999\n.", "the opcode PUT"),
        (pickle.dumps([1], 4), "the opcode EMPTY_LIST"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_opcodes_that_no_vocabulary_needs_are_refused(read, content, found):
    """Other names, calls, external references, and short pickles that expand to gigabytes or hours."""
    ran.clear()
    with pytest.raises(UserError, match=f"{re.escape(found)}; no code was run"):
        read(content)
    assert ran == []


TABLE = "does not map bytes and names to distinct numbers"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ""),
        (b"\x80\x04B\xff\xff\xff\x7fx.", ""),
        (pickle.dumps({"a": 1}, 4), ""),
        (pickled({**STATE, "pat_str": "("}), ""),
        (pickled("gpt2"), ""),
        (ENCODING + b")\x81.", "does not contain a vocabulary"),
        (pickled({"name": "x", "pat_str": "x"}), "does not contain a vocabulary"),
        (pickled({**STATE, "mergeable_ranks": {"a": 1}}), TABLE),
        (pickled({**STATE, "special_tokens": {"a": "b"}}), TABLE),
        (pickled({**STATE, "special_tokens": {"a": 3}}), TABLE),
        (pickled({**STATE, "special_tokens": {"a": -1}}), TABLE),
        (pickled({**STATE, "mergeable_ranks": {b"a": 1}}), "lacks tokens for some bytes"),
    ],
)
def test_invalid_vocabularies_are_refused(read, content, message):
    """The error names the file in one line, also for broken pickles."""
    with pytest.raises(
        UserError, match=r"tokenizer\.pkl: this is not a pickle of tiktoken's Encoding: "
    ) as caught:
        read(content)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_mlx_folder_with_a_pickle_is_converted(tmp_path):
    """`grpo convert` creates the tokenizer's files for folders as MLX-GRPO writes them."""
    folder = make_nanochat_folder(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "generation_config.json").write_text('{"eos_token_id": null, "top_k": 7}')
    assert find_pickle(folder) is None
    (folder / "tokenizer").mkdir()
    inner = write_pickle(folder / "tokenizer")
    assert find_pickle(folder) == inner and find_pickle(folder) != write_pickle(folder) == find_pickle(folder)
    with pytest.raises(UserError, match=r"`grpo convert` creates one from tokenizer\.pkl"):
        resolve_model(str(folder))
    convert(str(folder), tmp_path / "new")
    _, _, tokenizer, notices = read_model(tmp_path / "new")
    assert tokenizer.eos_token_ids == {320, 324} and not notices
    stated = json.loads((tmp_path / "new/generation_config.json").read_text())
    assert stated == {"eos_token_id": [320, 324], "top_k": 7}
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    convert(str(folder), tmp_path / "own")
    assert json.loads((tmp_path / "own/generation_config.json").read_text()) == {"eos_token_id": 0}
