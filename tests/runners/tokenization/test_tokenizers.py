"""Text out of tokens: all but the tokens that end it; a stop string ends a completion where it ends."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runners.tokenization.text import TextDecoder
from tests.support.tiny_models import SPECIAL, TAGS, make_tokenizer, write_tokenizer


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
    """Rewards read every tag, however the tokenizer marks it, but no end-of-text token at the end."""
    decoder, tokenizer = make_decoder(tmp_path, special_tags=special_tags)
    text = "<|im_start|><reasoning>7+5=12 , 12<|im_end|>-3=9</reasoning><|im_start|><answer>9</answer>"
    tokens = tokenizer.encode(text + "<|im_end|><|endoftext|>")
    assert tokens[0] in range(len(SPECIAL)) and len({*tokens} & set(tokenizer.encode("".join(TAGS)))) == 4
    assert decoder.decode(tokens) == text
    assert decoder.decode(tokens[-2:]) == "" == decoder.decode(())


def make_sentencepiece():
    """Words with their space in front, bytes for unknown characters: decoding trims the first space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["ab 1 ba < > / a1 11 a b"] * 3, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:4]  # bytes are ordinary tokens, as in real ones
    return Tokenizer.from_str(json.dumps(content))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A decoder of the other family."""
    path = tmp_path_factory.mktemp("sentencepiece")
    write_tokenizer(path, make_sentencepiece())
    tokenizer = load_tokenizer(path)
    return TextDecoder(tokenizer), tokenizer


def shortest(decoder, tokens, stops):
    """The specification: the fewest tokens whose whole text has a stop string in it."""
    for count in range(1, len(tokens) + 1):
        if any(stop in decoder.decode(tokens[:count]) for stop in stops):
            return count
    return None


@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        (["</answer>"], "<answer>9</answer> more", "<answer>9</answer>"),  # one token
        (["in all"], "how many in all?", "how many in all"),  # over token boundaries
        (
            ["r>9</an"],
            "<answer>9</answer> more",
            "<answer>9</answer>",
        ),  # ends inside a token, which stays whole
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
    """What a decoding loop finds that looks when so many tokens are there, one look after another."""
    start = 0
    for stop in places:
        found = find(tokens[:stop], start)
        if found is not None:
            return found
        start = stop
    return None


@given(
    text=st.text(alphabet="ab1 \né√<>/", max_size=30),
    stops=st.lists(st.text(alphabet="ab1 \né√", min_size=1, max_size=4), min_size=1, max_size=3),
    cut=st.integers(0, 3),
    data=st.data(),
)
def test_find_stop_equals_the_naive_search(plain, sentencepiece, text, stops, cut, data):
    """One look or many, wherever they cut a stop string or a character, with special tokens strewn in.

    Not cut where bytes are a last resort: of bytes behind half a character such a decoder makes nothing.
    """
    for (decoder, tokenizer), missing in ((plain, cut), (sentencepiece, 0)):
        tokens = [*tokenizer.encode(text)[missing:], tokenizer.eos_token_id, *tokenizer.encode(text)]
        places = sorted({*data.draw(st.sets(st.integers(1, len(tokens)))), len(tokens)})
        assert looks(decoder.find_stop(stops), tokens, places) == shortest(decoder, tokens, stops)


@pytest.mark.parametrize("text", ["é√", "éé√", "漢√", "😀√", "a√"])
def test_a_stop_behind_other_characters_of_many_bytes(plain, sentencepiece, text):
    """A look back that begins inside a character must not spoil the stop string behind it."""
    for decoder, tokenizer in (plain, sentencepiece):
        tokens = tokenizer.encode(text)
        assert decoder.find_stop(["√"])(tokens, 0) == len(tokens) == shortest(decoder, tokens, ["√"])


def test_a_special_token_can_be_a_stop_string(plain):
    """It then ends completions like an end-of-text token: at the end it gives no text."""
    decoder, tokenizer = TextDecoder(plain[1]), plain[1]
    tokens = tokenizer.encode("a<|im_start|> b<|im_start|>")
    assert decoder.decode(tokens) == "a<|im_start|> b<|im_start|>"
    find = decoder.find_stop(["b<|im_start|>"])
    assert find(tokens, 0) == len(tokens) and decoder.decode(tokens) == "a<|im_start|> b<|im_start|>"
    assert decoder.find_stop(["<|im_start|>"])(tokens, 0) == 2
    assert decoder.decode(tokens) == "a<|im_start|> b"
    stream = decoder.stream()
    assert "".join([*map(stream.add, tokens), stream.finish()]) == "a<|im_start|> b"


@given(text=st.text(alphabet="ab1 \né√<>/漢😀", max_size=30), cut=st.integers(0, 3))
def test_a_stream_joins_to_the_whole_text(plain, sentencepiece, text, cut):
    """Any text, special tokens strewn in: the pieces are the whole, and none ends in half a character.

    Byte-level tokens may be cut anywhere; a decoder with bytes as a last resort spoils its neighbours then.
    """
    for (decoder, tokenizer), missing in ((plain, cut), (sentencepiece, 0)):
        tokens = tokenizer.encode(text)
        tokens = [*tokens[missing:], tokenizer.eos_token_id, *tokens[: len(tokens) - missing]]
        stream = decoder.stream()
        pieces = [stream.add(token) for token in tokens]
        assert not any(piece.endswith("\ufffd") for piece in pieces)
        pieces.append(stream.finish())
        assert "".join(pieces) == decoder.decode(tokens)


def test_a_stream_holds_back_what_is_not_whole(plain):
    """The root sign has three tokens: nothing, nothing, the sign; a second stream knows nothing of it."""
    decoder, tokenizer = plain
    tokens = tokenizer.encode("√")
    stream = decoder.stream()
    assert [stream.add(token) for token in tokens] == ["", "", "√"] and stream.finish() == ""
    cut = decoder.stream()
    assert [cut.add(token) for token in tokens[:2]] == ["", ""]
    assert cut.finish() == decoder.decode(tokens[:2])
