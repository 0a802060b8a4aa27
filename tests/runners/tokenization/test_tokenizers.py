"""Decoding omits only the tokens that end a completion; stop strings end completions at the right token."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer

from runners.tokenization.text import TextDecoder, TextStream
from tests.support.tiny_models import SPECIAL, TAGS, make_tokenizer, sentence_tokenizer, write_tokenizer


def make_decoder(path, *, special_tags):
    """A decoder over a real tokenizer on disk, and the tokenizer."""
    write_tokenizer(path, make_tokenizer(special_tags=special_tags))
    tokenizer = load_tokenizer(path)
    return TextDecoder(tokenizer), tokenizer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Tags as ordinary added tokens."""
    return make_decoder(tmp_path_factory.mktemp("plain"), special_tags=False)


@pytest.mark.parametrize("special_tags", [False, True])
def test_all_but_the_end_is_text(tmp_path, special_tags):
    """Rewards see every tag, special or not, but no end-of-text token at the end."""
    decoder, tokenizer = make_decoder(tmp_path, special_tags=special_tags)
    text = "<|im_start|><reasoning>7+5=12 , 12<|im_end|>-3=9</reasoning><|im_start|><answer>9</answer>"
    tokens = tokenizer.encode(text + "<|im_end|><|endoftext|>")
    assert tokens[0] in range(len(SPECIAL)) and len({*tokens} & set(tokenizer.encode("".join(TAGS)))) == 4
    assert decoder.decode(tokens) == text
    assert decoder.decode(tokens[-2:]) == "" == decoder.decode(())


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A tokenizer like SentencePiece's, whose decoder trims the first space, and its TextDecoder."""
    path = tmp_path_factory.mktemp("sentencepiece")
    sentence_tokenizer(["ab 1 ba < > / a1 11 a b"], True, 290).save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(path)
    return TextDecoder(tokenizer), tokenizer


def shortest(decoder, tokens, stops):
    """The specification: the smallest number of tokens whose text contains a stop string."""
    for count in range(1, len(tokens) + 1):
        if any(stop in decoder.decode(tokens[:count]) for stop in stops):
            return count
    return None


@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        (["</answer>"], "<answer>9</answer> more", "<answer>9</answer>"),  # one token
        (["in all"], "how many in all?", "how many in all"),  # over token boundaries
        (["r>9</an"], "<answer>9</answer>.", "<answer>9</answer>"),  # ends inside a token, which stays whole
        (["√"], "a√√", "a√"),  # three bytes, three tokens
        (["\n\n"], "a\n\nb\n\n", "a\n\n"),
        (["12 ", "7"], "12 + 7", "12 "),  # the earliest of several, which ends in a space
        (["9"], "12", None),
    ],
)
def test_a_stop_string_ends_the_completion(plain, stops, text, kept):
    """The completion ends with the token that completes the earliest stop string."""
    decoder, tokenizer = plain
    tokens = tokenizer.encode(text)
    count = decoder.find_stop(stops)(tokens, 0)
    assert count == shortest(decoder, tokens, stops)
    assert (None if count is None else decoder.decode(tokens[:count])) == kept


def looks(find, tokens, places):
    """The result of a decoding loop that checks whenever it has one of these numbers of tokens."""
    start = 0
    for stop in places:
        found = find(tokens[:stop], start)
        if found is not None:
            return found
        start = stop
    return None


@example(text="é漢😀√", stops=["√"], cut=0, places=set())  # a look back begins inside a character
@given(
    text=st.text(alphabet="ab1 \né√<>/漢😀", max_size=30),
    stops=st.lists(st.text(alphabet="ab1 \né√", min_size=1, max_size=4), min_size=1, max_size=3),
    cut=st.integers(0, 3),
    places=st.sets(st.integers(1, 80)),
)
def test_find_stop_equals_the_naive_search(plain, sentencepiece, text, stops, cut, places):
    """The number of checks and their positions do not matter, even inside a stop string or a character.

    Texts of the tokenizer with byte fallback are not cut: its decoder drops bytes after an incomplete
    character.
    """
    for (decoder, tokenizer), missing in ((plain, cut), (sentencepiece, 0)):
        tokens = [*tokenizer.encode(text)[missing:], tokenizer.eos_token_id, *tokenizer.encode(text)]
        ends = sorted({len(tokens), *(place for place in places if place < len(tokens))})
        assert looks(decoder.find_stop(stops), tokens, ends) == shortest(decoder, tokens, stops)


def test_a_special_token_can_be_a_stop_string(plain):
    """Like an end-of-text token, it ends completions, and is omitted at the end of the text."""
    decoder, tokenizer = TextDecoder(plain[1]), plain[1]
    tokens = tokenizer.encode("a<|im_start|> b<|im_start|>")
    assert decoder.decode(tokens) == "a<|im_start|> b<|im_start|>"
    find = decoder.find_stop(["b<|im_start|>"])
    assert find(tokens, 0) == len(tokens) and decoder.decode(tokens) == "a<|im_start|> b<|im_start|>"
    assert decoder.find_stop(["<|im_start|>"])(tokens, 0) == 2
    assert decoder.decode(tokens) == "a<|im_start|> b"
    stream = TextStream(decoder)
    assert "".join([*map(stream.add, tokens), stream.finish()]) == "a<|im_start|> b"


def test_a_stream_gives_a_character_with_its_last_token(plain):
    """The root sign has three tokens."""
    decoder, tokenizer = plain
    assert [*map(TextStream(decoder).add, tokenizer.encode("a√b"))] == ["a", "", "", "√", "b"]


@given(text=st.text(alphabet="ab1 \né√<>/漢😀", max_size=30), cut=st.integers(0, 3))
def test_a_stream_joins_to_the_whole_text(plain, sentencepiece, text, cut):
    """The pieces join to the whole text, also with special tokens; none ends with an incomplete character.

    Only byte-level tokens are cut, because a decoder with byte fallback would damage the neighbours.
    """
    for (decoder, tokenizer), missing in ((plain, cut), (sentencepiece, 0)):
        tokens = tokenizer.encode(text)
        tokens = [*tokens[missing:], tokenizer.eos_token_id, *tokens[: len(tokens) - missing]]
        stream = TextStream(decoder)
        pieces = [stream.add(token) for token in tokens]
        assert not any(piece.endswith("\ufffd") for piece in pieces)
        pieces.append(stream.finish())
        assert "".join(pieces) == decoder.decode(tokens)
