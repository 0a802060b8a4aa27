"""Streams and batches: one and the same completion, ends, speed; conversations over kept caches."""

import re

import attrs
import pytest

import grpo_fn as g
from runners.data.rendering import render
from runners.engines.engine import Requests
from runners.inference.inference_model import load_inference
from runners.inference.text_generation import (
    Completion,
    Conversation,
    Speed,
    generation_key,
    sample_batches,
    stream,
)
from runners.machine.startup import Platform
from runners.tokenization.text import TextDecoder
from tests.support.tiktoken_files import make_nanochat_folder
from tests.support.tiny_models import make_model_folder

CPU = Platform(backend="cpu")
QUESTIONS = ["How many pens?", "7+5", "Anna bakes 48 rolls. How many does she bake in all?"]


@pytest.fixture(scope="module", params=["llama", "nanochat"])
def model(request, tmp_path_factory):
    """Two architectures with two kinds of tokenizer."""
    path = tmp_path_factory.mktemp("models") / request.param
    make = make_nanochat_folder if request.param == "nanochat" else make_model_folder
    return load_inference(str(make(path)), CPU)


@pytest.fixture(scope="module")
def embedded():
    """The model in the package, which knows how to end."""
    return load_inference("embedded", CPU)


def examples_of(model, questions=QUESTIONS):
    """The questions as prompts."""
    return [model.example([{"role": "user", "content": text}]) for text in questions]


def streamed(model, prompt, sampling, *, number=0, seed=0, **options):
    """(pieces, completion) of a stream."""
    request = Requests(prompts=[prompt], numbers=[number])
    options = {"key": generation_key(seed), "decoder": TextDecoder(model.tokenizer), **options}
    *pieces, whole = stream(model.engine, request, ending(model, sampling), **options)
    assert isinstance(whole, Completion) and all(isinstance(piece, str) for piece in pieces)
    return pieces, whole


def batched(model, examples, sampling, *, seed=0, generations=1, **options):
    """The completions of all prompts, G of each in a row."""
    options = {"key": generation_key(seed), "decoder": TextDecoder(model.tokenizer), **options}
    sampling = attrs.evolve(ending(model, sampling), num_generations=generations)
    found = []
    for batch in sample_batches(model.engine, examples, sampling, **options):
        rows = zip(batch.texts, batch.rollout.completions(), batch.finish, strict=True)
        found += [Completion(text, tuple(tokens), finish) for text, tokens, finish in rows]
    return found


def ending(model, sampling):
    """The sampling, which also ends at the model's end tokens."""
    return attrs.evolve(sampling, eos_ids=model.eos_ids)


@pytest.mark.parametrize(
    "sampling",
    [
        g.Sampling(temperature=0.0, max_new_tokens=16),
        g.Sampling(max_new_tokens=16),
        g.Sampling(temperature=0.9, top_p=0.8, top_k=30, min_p=0.01, max_new_tokens=16),
        g.Sampling(temperature=0.7, repetition_penalty=1.4, max_new_tokens=16),
    ],
    ids=["greedy", "plain", "truncated", "penalty"],
)
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_stream_is_the_batches_completion(model, sampling, pipelined, monkeypatch):
    """One row over kept caches, and many rows over one copy of each prompt, draw the same tokens."""
    decoding = attrs.evolve(model.engine.decoding, pipelined=pipelined)
    monkeypatch.setattr(model.engine, "decoding", decoding)
    examples = examples_of(model)
    together = batched(model, examples, sampling, seed=3)
    for number, example in enumerate(examples):
        pieces, whole = streamed(model, example.tokens, sampling, number=number, seed=3)
        assert whole == together[number]
        assert "".join(pieces) == whole.text
        ended = whole.tokens[-1] in model.eos_ids
        assert (whole.finish, len(whole.tokens) == 16 or ended) == ("stop" if ended else "length", True)


def test_batches_of_any_size_give_the_same(model):
    """One, two or all completions at a time."""
    examples, sampling = examples_of(model), g.Sampling(max_new_tokens=8)
    whole = batched(model, examples, sampling, generations=2)
    for rows in (1, 2, 4):
        assert batched(model, examples, sampling, generations=2, rows=rows) == whole
    assert len(whole) == 6


def test_ends(embedded):
    """An end token, a stop string, the limit: each is told, in streams and batches alike."""
    question = "Ida has 12 cards. Eva has 3 times as many. They sell 9. How many are left?"
    (example,) = examples_of(embedded, [question])
    decoder = TextDecoder(embedded.tokenizer)
    for stop, limit, finish in (([], 60, "stop"), (["</reasoning>"], 60, "stop"), ([], 5, "length")):
        find = decoder.find_stop(stop)
        sampling = g.Sampling(temperature=0.0, max_new_tokens=limit, find_stop=find)
        _, whole = streamed(embedded, example.tokens, sampling)
        assert [whole] == batched(embedded, [example], sampling)
        assert whole.finish == finish
        assert whole.text.endswith("</reasoning>") == bool(stop)
        assert (whole.tokens[-1] in embedded.eos_ids) == (finish == "stop" and not stop)


PREFILL = 2  # layers, after each of which a stream asks


def test_a_stream_stops_when_asked(model):
    """After the token under way; what came so far is the completion. Before the first one there is none."""
    prompt, sampling = examples_of(model)[0].tokens, g.Sampling(max_new_tokens=50)
    asked = iter([*[False] * PREFILL, False, False, True])
    model.engine.load({}, 0)
    _, whole = streamed(model, prompt, sampling, should_stop=lambda: next(asked))
    assert whole.finish == "interrupted" and len(whole.tokens) == 3
    model.engine.load({}, 0)  # with kept keys there would be a first token at once
    _, nothing = streamed(model, prompt, sampling, should_stop=lambda: True)
    assert nothing == Completion("", (), "interrupted")


def test_batches_stop_when_asked(model):
    """The batch under way ends where it is, and no other follows."""
    calls = []

    def stop():
        calls.append(1)
        return len(calls) > 12

    how = {"rows": 2, "should_stop": stop}
    done = batched(model, examples_of(model), g.Sampling(max_new_tokens=40), **how)
    assert len(done) == 2
    assert "interrupted" in {completion.finish for completion in done}
    for completion in done:
        assert 0 < len(completion.tokens) < 40
        assert (completion.finish == "stop") == (completion.tokens[-1] in model.eos_ids)


def test_tokens_and_seconds_add_up_over_calls(model):
    """Tokens of prompts and completions add up over calls; the line has them."""
    examples, sampling = examples_of(model), g.Sampling(temperature=0.7, max_new_tokens=7)
    speed, first = Speed(), len(examples[0].tokens)
    model.engine.load({}, 0)
    streamed(model, examples[0].tokens, sampling, speed=speed)
    assert (speed.prompt_tokens, speed.tokens) == (first, 7)
    how = {"key": generation_key(0), "decoder": TextDecoder(model.tokenizer)}
    for batch in sample_batches(model.engine, examples, sampling, **how):
        speed.add(batch)
    prompts = sum(len(example.tokens) for example in examples)
    assert speed.prompt_tokens == first + prompts and speed.tokens == 28
    assert 0 < speed.seconds < 60
    assert f"prompt {speed.prompt_tokens} tokens" in speed.line()
    # In a unit that fits the tiny model: "0.00274 GB" is nobody's way to say it.
    assert re.search(r"peak memory \d+(\.\d)? (MB|kB)$", speed.line())


def fresh(model, prompt, sampling):
    """The text of a whole prompt's completion, with nothing kept."""
    model.engine.load({}, 0)
    return streamed(model, prompt, sampling, number=1)[1].text


def conversation(model, sampling, **options):
    """A conversation with a model that has just been loaded: it has kept nothing."""
    model.engine.load({}, 0)
    return Conversation(model, ending(model, sampling), key=generation_key(0), **options)


@pytest.mark.parametrize("kind", ["whole", "interrupted", "without a cache that can be cut"])
def test_a_second_turn_is_that_of_the_whole_prompt(model, kind, monkeypatch):
    """It holds the first turn, or what came of it before it was stopped, which is not computed again."""
    cut = kind.startswith("without")
    if cut:
        monkeypatch.setattr("mlx_lm.models.cache.can_trim_prompt_cache", lambda cache: False)
    sampling, speed = g.Sampling(temperature=0.0, max_new_tokens=9), Speed()
    talk = conversation(model, sampling, system="Be brief.")
    asked = iter([False, kind == "interrupted", *[False] * 99])
    first = "".join(talk.reply("How many?", should_stop=lambda: next(asked)))
    second = "".join(talk.reply("And now?", speed=speed))
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 2]
    assert [message["content"] for message in talk.messages[1:4]] == ["How many?", first, "And now?"]
    _, prompt = render(model.tokenizer, talk.messages[:-1])
    assert (speed.prompt_tokens == len(prompt)) == cut and fresh(model, prompt, sampling) == second


def test_a_cleared_conversation_starts_from_its_beginning(model):
    """The same question, the same answer as in the beginning; another seed number for another turn."""
    talk = conversation(model, g.Sampling(temperature=1.0, max_new_tokens=9))
    first = "".join(talk.reply("How many?"))
    assert "".join(talk.reply("How many?")) != first
    talk.clear()
    assert talk.messages == [] and "".join(talk.reply("How many?")) == first


def test_a_nudge_begins_each_reply(model):
    """It is shown, given to the model, and part of what it said."""
    talk = conversation(model, g.Sampling(temperature=0.0, max_new_tokens=5), nudge="<reasoning>")
    text = "".join(talk.reply("7+5"))
    assert text.startswith("<reasoning>") and talk.messages[-1]["content"] == text
    prompt = render(model.tokenizer, talk.messages[:1], "<reasoning>")[1]
    assert (
        text == "<reasoning>" + streamed(model, prompt, g.Sampling(temperature=0.0, max_new_tokens=5))[1].text
    )


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(model):
    """An exception in the midst of a reply: no message, and the next turn is right."""
    sampling = g.Sampling(temperature=0.0, max_new_tokens=6)
    talk = conversation(model, sampling)
    first = "".join(talk.reply("How many?"))
    before = list(talk.messages)

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(talk.reply("7+5", should_stop=fail))
    assert talk.messages == before and before[-1]["content"] == first
    second = "".join(talk.reply("And now?"))
    _, prompt = render(model.tokenizer, talk.messages[:-1])
    assert fresh(model, prompt, sampling) == second
