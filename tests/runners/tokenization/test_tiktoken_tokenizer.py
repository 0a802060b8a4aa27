"""nanochat's tokenizer: transformers' surface, nanochat's chat form, whole characters, real generation."""

import mlx.core as mx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runners.config.sections import DataConfig, ModelConfig
from runners.data.rendering import render, template_notices
from runners.machine.startup import Platform
from runners.models.loaded_model import load_model
from runners.tokenization.tiktoken_tokenizer import TiktokenTokenizer, load_tiktoken
from tests.support.tiktoken_files import NANOCHAT_SPECIAL, make_encoding, make_nanochat_folder, write_pickle

CPU = Platform(backend="cpu")
HELLO = [{"role": "user", "content": "How many?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *HELLO,
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture(scope="module")
def tokenizer():
    """nanochat's special tokens; 320 byte-level tokens before them."""
    return TiktokenTokenizer(make_encoding())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A nanochat folder as `load_model` gives it."""
    folder = make_nanochat_folder(tmp_path_factory.mktemp("nanochat") / "model")
    return load_model(ModelConfig(path=str(folder)), CPU)


@pytest.mark.parametrize(
    ("special", "bos", "eos", "pad", "ends"),
    [
        (NANOCHAT_SPECIAL, "<|bos|>", "<|assistant_end|>", "<|assistant_end|>", (320, 324)),
        (("<|endoftext|>",), None, "<|endoftext|>", "<|endoftext|>", (320,)),
        (("<|bos|>", "<|pad|>"), "<|bos|>", "<|bos|>", "<|pad|>", (320,)),
        (("<|fim|>",), None, None, None, ()),
    ],
)
def test_the_special_tokens_and_their_ids(special, bos, eos, pad, ends):
    """BOS, EOS and padding as a training run wants them; every token by name and by id."""
    tokenizer = TiktokenTokenizer(make_encoding(special))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (bos, eos, pad)
    assert tokenizer.end_ids == ends
    assert tokenizer.bos_token_id == (None if bos is None else 320)
    assert {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()} == dict(
        enumerate(special, 320)
    )
    vocabulary = tokenizer.get_vocab()
    assert tokenizer.vocab_size == len(tokenizer) == len(vocabulary) == 320 + len(special)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert [vocabulary[token] for token in tokens] == [*range(len(tokenizer))]
    assert tokenizer.convert_ids_to_tokens([320, 999, -1]) == [special[0], None, None]
    assert tokenizer.convert_ids_to_tokens(320) == special[0]


def test_special_tokens_in_a_text_are_allowed_or_not(tokenizer):
    """By default a special token's name is the token, with split_special_tokens it is letters."""
    text = "a<|user_end|>b"
    assert tokenizer.encode(text, add_special_tokens=False) == [97, 322, 98]
    split = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert 322 not in split and tokenizer.decode(split) == text
    assert tokenizer.encode("a") == [320, 97]
    assert TiktokenTokenizer(make_encoding(("<|fim|>",))).encode("a") == [97]


def test_decoding(tokenizer):
    """Special tokens kept or left out; ids of the padding give nothing; broken characters U+FFFD."""
    ids = [320, *tokenizer.encode("naïve 😀", add_special_tokens=False), 324]
    assert tokenizer.decode(ids) == "<|bos|>naïve 😀<|assistant_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "naïve 😀"
    assert tokenizer.decode([97, 330, 5000, -1, 98]) == "ab" and tokenizer.decode(97) == "a"
    assert tokenizer.decode(mx.array([97, 98])) == "ab"
    assert tokenizer.decode([0xF0, 0x9F]) == "\ufffd" and tokenizer.decode([]) == ""


@given(text=st.text(max_size=40))
@example("漢字😀 Größe\r\n")
def test_a_text_comes_back(tokenizer, text):
    """Any text, whatever its characters (but lone surrogates, which no text on disk has)."""
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids) == text


def test_a_conversation_has_nanochats_turns(tokenizer):
    """The marks of nanochat, the system message inside the first user's turn, the assistant's turn opened."""
    text = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|bos|><|user_start|>Be brief.\n\nHow many?<|user_end|><|assistant_start|>7<|assistant_end|>"
        "<|user_start|>And now?<|user_end|><|assistant_start|>"
    )
    ids = tokenizer.apply_chat_template(TALK, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False) and ids.count(320) == 1
    done = tokenizer.apply_chat_template(TALK[:3], tokenize=False)
    left_open = tokenizer.apply_chat_template(TALK[:3], tokenize=False, continue_final_message=True)
    assert done.endswith("<|assistant_start|>7<|assistant_end|>")
    assert left_open == done.removesuffix("<|assistant_end|>")
    spaces = [{"role": "user", "content": " {{ a }}\n "}]
    assert tokenizer.apply_chat_template(spaces, tokenize=False) == (
        "<|bos|><|user_start|> {{ a }}\n <|user_end|>"
    )


def test_without_turn_marks_there_is_no_template(tmp_path):
    """Prompts are plain text, with <|bos|> in front where there is one, and a line says so."""
    write_pickle(tmp_path, make_encoding(("<|bos|>",)))
    plain = load_tiktoken(tmp_path / "tokenizer.pkl")
    text, tokens = render(plain, TALK)
    assert text == "System: Be brief.\n\nUser: How many?\n\nAssistant: 7\n\nUser: And now?\n\nAssistant: "
    assert tokens == tuple(plain.encode(text)) and tokens[0] == 320
    assert "no chat template" in template_notices(plain, DataConfig())[0]


def test_load_model_finds_the_pickle_by_itself(loaded):
    """mlx-lm's wrapper around it, both ends known, the embedding's padding allowed."""
    assert isinstance(loaded.tokenizer._tokenizer, TiktokenTokenizer)
    assert loaded.eos_ids == (320, 324) and loaded.notices == ()
    assert loaded.tokenizer.has_chat_template and not loaded.tokenizer.has_thinking
    assert loaded.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)[-1] == 323


def test_prompts_end_in_the_assistants_turn(loaded):
    """The rendered prompt, nudge included, and its tokens; a template of one's own in its place."""
    text, tokens = render(loaded.tokenizer, TALK, "<reasoning>")
    assert text.startswith("<|bos|><|user_start|>Be brief.\n\nHow many?<|user_end|>")
    assert text.endswith("<|assistant_start|><reasoning>")
    assert loaded.tokenizer.decode(tokens) == text and tokens.count(320) == 1
    own = {"chat_template": "Q: {{ messages[-1].content }} {{ mark }}", "mark": "A:"}
    assert render(loaded.tokenizer, HELLO, template_kwargs=own)[0] == "Q: How many? A:"
