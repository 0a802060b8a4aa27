"""tiktoken's encodings, converted to transformers' files, keep tokens, texts and nanochat's chat format."""

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from runners.config.sections import DataConfig, ModelConfig
from runners.data.rendering import render, template_notices
from runners.machine.startup import Platform
from runners.models.loaded_model import load_model
from runners.models.model_reader import load_tokenizer
from runners.tokenization.text import TextDecoder
from runners.tokenization.tiktoken_encoding import write_tokenizer
from tests.support.tiktoken_files import NANOCHAT_SPECIAL, make_encoding, make_nanochat_folder

CPU = Platform(backend="cpu")
HELLO = [{"role": "user", "content": "How many?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *HELLO,
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "And now?"},
]
ENCODING = make_encoding()  # nanochat's special tokens; 320 byte-level tokens before them


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The tokenizer of an encoding's files."""

    def make(encoding):
        folder = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(encoding, folder)
        return load_tokenizer(folder)

    return make


@pytest.fixture(scope="module")
def tokenizer(written):
    """ENCODING's."""
    return written(ENCODING)


@pytest.mark.parametrize(
    ("special", "bos", "eos", "pad", "ends"),
    [
        (NANOCHAT_SPECIAL, "<|bos|>", "<|assistant_end|>", "<|assistant_end|>", {320, 324}),
        (("<|endoftext|>",), None, "<|endoftext|>", "<|endoftext|>", {320}),
        (("<|bos|>", "<|pad|>"), "<|bos|>", "<|bos|>", "<|pad|>", {320}),
        (("<|fim|>",), None, None, None, set()),
    ],
)
def test_the_special_tokens_and_their_ids(written, special, bos, eos, pad, ends):
    """BOS, EOS and padding fit a training run, and every token keeps its name and id."""
    tokenizer = written(make_encoding(special))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (bos, eos, pad)
    assert tokenizer.eos_token_ids == ends
    assert tokenizer.encode("a") == [*([320] if bos else []), 97]
    assert {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()} == dict(
        enumerate(special, 320)
    )
    assert sorted(tokenizer.get_vocab().values()) == [*range(320 + len(special))]


TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from(["Anna", " bakes", " rolls", "naïve", "漢字", "48", "<|user_end|>", "\r\n", "  ", "'s"])
).map("".join)


@given(text=TEXTS)
@example("漢字😀 Größe\r\n")
def test_texts_have_tiktoken_s_tokens(tokenizer, text):
    """Names of special tokens are encoded as tokens or as letters, and decoding returns the text."""
    found = tokenizer.encode(text, add_special_tokens=False)
    assert found == ENCODING.encode(text, allowed_special="all")
    split = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert split == ENCODING.encode(text, disallowed_special=())
    assert TextDecoder(tokenizer).part(split) == text


@given(ids=st.lists(st.integers(0, 335), max_size=12))
def test_tokens_have_tiktoken_s_text(tokenizer, ids):
    """Incomplete characters become U+FFFD, and ids of the embedding's padding have no text."""
    known = [i for i in ids if i < ENCODING.n_vocab]
    assert TextDecoder(tokenizer).part(ids) == ENCODING.decode(known)


def test_gaps_between_the_ids_are_kept(written):
    """cl100k_base has such gaps."""
    ranks, special = {bytes([value]): value for value in range(256)}, {"<|endoftext|>": 260, "<|fim|>": 300}
    tokenizer = written(tiktoken.Encoding("gaps", pat_str=".", mergeable_ranks=ranks, special_tokens=special))
    assert tokenizer.encode("a<|fim|>b<|endoftext|>") == [97, 300, 98, 260]


def test_a_conversation_has_nanochats_turns(tokenizer):
    """nanochat's marks separate turns; the first user turn contains the system message."""
    text = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|bos|><|user_start|>Be brief.\n\nHow many?<|user_end|><|assistant_start|>7<|assistant_end|>"
        "<|user_start|>And now?<|user_end|><|assistant_start|>"
    )
    done = tokenizer.apply_chat_template(TALK[:3], tokenize=False)
    left_open = tokenizer.apply_chat_template(TALK[:3], tokenize=False, continue_final_message=True)
    assert done.endswith("<|assistant_start|>7<|assistant_end|>")
    assert left_open == done.removesuffix("<|assistant_end|>")
    spaces = [{"role": "user", "content": " {{ a }}\n "}]
    assert tokenizer.apply_chat_template(spaces, tokenize=False) == (
        "<|bos|><|user_start|> {{ a }}\n <|user_end|>"
    )


def test_without_turn_marks_there_is_no_template(written):
    """Prompts are plain text after <|bos|>, if the encoding has it, and a notice says so."""
    plain = written(make_encoding(("<|bos|>",)))
    text, tokens = render(plain, TALK)
    assert text == "System: Be brief.\n\nUser: How many?\n\nAssistant: 7\n\nUser: And now?\n\nAssistant: "
    assert tokens == tuple(plain.encode(text)) and tokens[0] == 320
    assert "no chat template" in template_notices(plain, DataConfig())[0]


def test_a_nanochat_model_s_prompts_end_in_the_assistants_turn(tmp_path):
    """The nudge follows the mark; both end tokens are known, and a custom template can be used."""
    loaded = load_model(ModelConfig(path=str(make_nanochat_folder(tmp_path / "model"))), CPU)
    assert loaded.eos_ids == (320, 324) and loaded.notices == ()
    text, tokens = render(loaded.tokenizer, TALK, "<reasoning>")
    assert text.startswith("<|bos|><|user_start|>Be brief.\n\nHow many?<|user_end|>")
    assert text.endswith("<|assistant_start|><reasoning>")
    assert loaded.tokenizer.decode(tokens) == text and tokens.count(320) == 1
    own = {"chat_template": "Q: {{ messages[-1].content }} {{ mark }}", "mark": "A:"}
    assert render(loaded.tokenizer, HELLO, template_kwargs=own)[0] == "Q: How many? A:"
