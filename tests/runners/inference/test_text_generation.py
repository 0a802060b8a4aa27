"""Replies and batches have the same completions; ends, speed, and conversations with kept caches."""

import re

import attrs
import pytest

import grpo_fn as g
from runners.data.rendering import render
from runners.engines.engine import Weights
from runners.inference.inference_model import load_inference
from runners.inference.text_generation import Conversation, Speed, generation_key, sample_batches
from runners.machine.startup import Platform
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
    """The embedded model, which produces end tokens."""
    return load_inference("embedded", CPU)


def ending(model, sampling):
    """The sampling with the model's end tokens."""
    return attrs.evolve(sampling, eos_ids=model.eos_ids)


def batched(model, sampling, questions=QUESTIONS, *, seed=0, generations=1, **options):
    """(text, tokens, finish) of all completions, G per question."""
    examples = [model.example([{"role": "user", "content": text}]) for text in questions]
    options = {"key": generation_key(seed), "decoder": model.decoder, **options}
    sampling = attrs.evolve(ending(model, sampling), num_generations=generations)
    found = []
    for batch in sample_batches(model.engine, examples, sampling, **options):
        found += zip(batch.texts, batch.rollout.completions(), batch.finish, strict=True)
    return found


def conversation(model, sampling, *, seed=0, **options):
    """A conversation with a model without kept caches."""
    model.engine.load(Weights(model.policy, {}, 0))
    return Conversation(model, ending(model, sampling), key=generation_key(seed), **options)


def fresh(model, talk):
    """The text of the last reply if the whole prompt is computed again."""
    text, _ = render(model.tokenizer, talk.messages[:-1], talk.nudge)
    again = conversation(model, talk.sampling, raw=True)
    again.turns = talk.turns - 1
    return "".join(again.reply(text))


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
def test_a_reply_equals_the_completion_of_a_batch(model, sampling, pipelined, monkeypatch):
    """One row with kept caches samples the same tokens as many rows that share a prompt."""
    decoding = attrs.evolve(model.engine.decoding, pipelined=pipelined)
    monkeypatch.setattr(model.engine, "decoding", decoding)
    for number, (text, tokens, finish) in enumerate(batched(model, sampling, seed=3)):
        talk, speed = conversation(model, sampling, seed=3), Speed()
        talk.turns = number
        assert "".join(talk.reply(QUESTIONS[number], speed=speed)) == text and speed.tokens == len(tokens)
        ended = tokens[-1] in model.eos_ids
        assert (finish, len(tokens) == 16 or ended) == ("stop" if ended else "length", True)


def test_completions_do_not_depend_on_the_batch_size(model):
    """One, two, four or all completions are sampled at a time."""
    whole = batched(model, g.Sampling(max_new_tokens=8), generations=2)
    for rows in (1, 2, 4):
        assert batched(model, g.Sampling(max_new_tokens=8), generations=2, rows=rows) == whole
    assert len(whole) == 6


def test_ends(embedded):
    """An end token, a stop string or the limit is reported, and a reply ends at the same place."""
    question = "Ida has 12 cards. Eva has 3 times as many. They sell 9. How many are left?"
    for stop, limit, finish in (([], 60, "stop"), (["</reasoning>"], 60, "stop"), ([], 5, "length")):
        sampling = g.Sampling(temperature=0.0, max_new_tokens=limit, stop=stop)
        ((text, tokens, found),) = batched(embedded, sampling, [question])
        assert "".join(conversation(embedded, sampling).reply(question)) == text and found == finish
        assert text.endswith("</reasoning>") == bool(stop)
        assert (tokens[-1] in embedded.eos_ids) == (finish == "stop" and not stop)


PREFILL = 4  # number of checks before the first token: around each of two layers


def test_a_reply_stops_when_asked(model):
    """The tokens so far are the reply; before the first token it is empty."""
    asked, speed = iter([*[False] * PREFILL, False, False, True]), Speed()
    talk = conversation(model, g.Sampling(max_new_tokens=50))
    said = "".join(talk.reply("7+5", should_stop=lambda: next(asked), speed=speed))
    assert speed.tokens == 3 and talk.messages[-1]["content"] == said
    talk = conversation(model, g.Sampling(max_new_tokens=50))
    assert list(talk.reply("7+5", should_stop=lambda: True)) == []


def test_batches_stop_when_asked(model):
    """The current batch ends immediately, and no other one starts."""
    calls = []

    def stop():
        calls.append(1)
        return len(calls) > 12

    done = batched(model, g.Sampling(max_new_tokens=40), rows=2, should_stop=stop)
    assert len(done) == 2
    assert "interrupted" in {finish for _, _, finish in done}
    for _, tokens, finish in done:
        assert 0 < len(tokens) < 40
        assert (finish == "stop") == (tokens[-1] in model.eos_ids)


def test_tokens_and_seconds_add_up_over_calls(model):
    """The sums of prompt and completion tokens are in the line."""
    sampling, speed = g.Sampling(temperature=0.7, max_new_tokens=7), Speed()
    examples = [model.example([{"role": "user", "content": text}]) for text in QUESTIONS]
    first = len(examples[0].tokens)
    list(conversation(model, sampling).reply(QUESTIONS[0], speed=speed))
    assert speed.prompt_tokens == first and 0 < speed.tokens <= 7
    tokens = speed.tokens
    for batch in sample_batches(
        model.engine, examples, sampling, key=generation_key(0), decoder=model.decoder
    ):
        speed.add(batch)
    prompts = sum(len(example.tokens) for example in examples)
    assert speed.prompt_tokens == first + prompts and speed.tokens == tokens + 21
    assert 0 < speed.seconds < 60
    assert f"prompt {speed.prompt_tokens} tokens" in speed.line()
    # in a unit that fits the tiny model
    assert re.search(r"peak memory \d+(\.\d)? (MB|kB)$", speed.line())


@pytest.mark.parametrize("kind", ["whole", "interrupted", "without a cache that can be cut"])
def test_a_second_turn_equals_that_of_the_whole_prompt(model, kind, monkeypatch):
    """The first turn, complete or interrupted, is part of the prompt but is not computed again."""
    cut = kind.startswith("without")
    if kind.startswith("without"):
        monkeypatch.setattr("mlx_lm.models.cache.can_trim_prompt_cache", lambda cache: False)
    sampling, speed = g.Sampling(temperature=0.0, max_new_tokens=9), Speed()
    talk = conversation(model, sampling, system="Be brief.")
    asked = iter([*[False] * 6, kind == "interrupted", *[False] * 99])  # after the prompt
    first = "".join(talk.reply("How many?", should_stop=lambda: next(asked)))
    second = "".join(talk.reply("And now?", speed=speed))
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 2]
    assert [message["content"] for message in talk.messages[1:4]] == ["How many?", first, "And now?"]
    _, prompt = render(model.tokenizer, talk.messages[:-1])
    assert (speed.prompt_tokens == len(prompt)) == cut and fresh(model, talk) == second


def test_a_cleared_conversation_starts_from_its_beginning(model):
    """A question is answered as in the first turn; later turns use other random numbers."""
    talk = conversation(model, g.Sampling(temperature=1.0, max_new_tokens=9))
    first = "".join(talk.reply("How many?"))
    assert "".join(talk.reply("How many?")) != first
    talk.clear()
    assert talk.messages == [] and "".join(talk.reply("How many?")) == first


def test_a_nudge_begins_each_reply(model):
    """It is shown, passed to the model, and part of the reply."""
    talk = conversation(model, g.Sampling(temperature=0.0, max_new_tokens=5), nudge="<reasoning>")
    text = "".join(talk.reply("7+5"))
    assert text.startswith("<reasoning>") and talk.messages[-1]["content"] == text
    assert text == "<reasoning>" + fresh(model, talk)


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(model):
    """After an exception during a reply, no message is added, and the next turn is correct."""
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
    assert fresh(model, talk) == second
