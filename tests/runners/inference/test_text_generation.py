"""Streams and batches: one and the same completion, ends, speed; conversations over one cache."""

import re

import mlx.core as mx
import mlx_lm
import pytest

from grpo_fn.prng import EVALUATION
from runners.data.prompts import render
from runners.inference.conversation import Conversation
from runners.inference.inference_model import load_inference
from runners.inference.text_generation import Completion, Sampling, Speed, generate_batches, stream
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


def prompts_of(model, questions=QUESTIONS):
    """The questions as tokens."""
    return [render(model.tokenizer, [{"role": "user", "content": text}])[1] for text in questions]


def streamed(model, prompt, sampling, **options):
    """(pieces, completion) of a stream."""
    *pieces, whole = stream(model, prompt, sampling, decoder=TextDecoder(model.tokenizer), **options)
    assert isinstance(whole, Completion) and all(isinstance(piece, str) for piece in pieces)
    return pieces, whole


def batched(model, prompts, sampling, **options):
    """The completions of all prompts."""
    decoder = TextDecoder(model.tokenizer)
    return list(generate_batches(model, prompts, sampling, decoder=decoder, **options))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, max_tokens=16),
        Sampling(temperature=1.0, seed=3, max_tokens=16),
        Sampling(temperature=0.9, top_p=0.8, top_k=30, min_p=0.01, seed=5, max_tokens=16),
        Sampling(temperature=0.7, repetition_penalty=1.4, max_tokens=16),
    ],
    ids=["greedy", "plain", "truncated", "penalty"],
)
def test_a_stream_is_the_batches_completion(model, sampling):
    """mlx-lm's loop over one prompt and ours over many draw the same tokens from one seed."""
    prompts = prompts_of(model)
    together = batched(model, prompts, sampling)
    for number, prompt in enumerate(prompts):
        pieces, whole = streamed(model, prompt, sampling, number=number)
        assert [whole] == together[number]
        assert "".join(pieces) == whole.text
        ended = whole.tokens[-1] in model.eos_ids
        assert (whole.finish, len(whole.tokens) == 16 or ended) == ("stop" if ended else "length", True)


def test_a_greedy_stream_is_mlx_lms_own(model):
    """`mlx_lm.stream_generate` without any option."""
    prompt = prompts_of(model)[0]
    theirs = [r.token for r in mlx_lm.stream_generate(model.module, model.tokenizer, list(prompt), 12)]
    assert streamed(model, prompt, Sampling(temperature=0.0, max_tokens=12))[1].tokens == tuple(theirs)


def test_seeds_differ_and_repeat(model):
    """One seed gives one text, another another; the completions of a prompt differ among themselves."""
    prompts = prompts_of(model)[:1]

    def draw(seed):
        """Three completions of the first question."""
        sampling = Sampling(temperature=1.0, seed=seed, max_tokens=12)
        return batched(model, prompts, sampling, num_generations=3)

    first, again, other = draw(1), draw(1), draw(2)
    assert first == again != other
    assert len({completion.tokens for completion in first[0]}) == 3


def test_seeds_and_purposes_share_no_completion(model):
    """Four copies of a question from seeds 0 to 3, and from one seed for another purpose: all different."""
    prompts = prompts_of(model)[:1] * 4
    kinds = [{"seed": seed} for seed in range(4)] + [{"purpose": EVALUATION}]
    drawn = [batched(model, prompts, Sampling(temperature=1.0, max_tokens=24, **kind)) for kind in kinds]
    assert len({group[0].tokens for groups in drawn for group in groups}) == 20


def test_batches_of_any_size_give_the_same(model):
    """One, two or all completions at a time, and the number of prompts each batch brings."""
    prompts = prompts_of(model)
    sampling = Sampling(temperature=1.0, max_tokens=8)
    whole = batched(model, prompts, sampling, num_generations=2)
    for rows in (1, 2, 4):
        assert batched(model, prompts, sampling, num_generations=2, max_batch=rows) == whole
    assert [len(group) for group in whole] == [2, 2, 2]


def test_ends(embedded):
    """An end token, a stop string, the limit: each is told, in streams and batches alike."""
    question = "Ida has 12 cards. Eva has 3 times as many. They sell 9. How many are left?"
    (prompt,) = prompts_of(embedded, [question])
    decoder = TextDecoder(embedded.tokenizer)
    for stop, limit, finish in (([], 60, "stop"), (["</reasoning>"], 60, "stop"), ([], 5, "length")):
        sampling = Sampling(temperature=0.0, max_tokens=limit)
        find = decoder.find_stop(stop)
        _, whole = streamed(embedded, prompt, sampling, find_stop=find)
        assert [[whole]] == batched(embedded, [prompt], sampling, find_stop=find)
        assert whole.finish == finish
        assert whole.text.endswith("</reasoning>") == bool(stop)
        assert (whole.tokens[-1] in embedded.eos_ids) == (finish == "stop" and not stop)


def test_a_stream_stops_when_asked(model):
    """After the token under way; what came so far is the completion."""
    asked = iter([False, False, True])
    _, whole = streamed(model, prompts_of(model)[0], Sampling(max_tokens=50), stopped=lambda: next(asked))
    assert whole.finish == "interrupted" and len(whole.tokens) == 3


def test_batches_stop_when_asked(model):
    """The batch under way ends where it is, and no other follows."""
    calls = []
    done = batched(
        model,
        prompts_of(model),
        Sampling(temperature=1.0, max_tokens=40),
        max_batch=2,
        stopped=lambda: len(calls) > 1 or calls.append(1) is not None,
    )
    assert len(done) == 2
    assert "interrupted" in {completion.finish for (completion,) in done}
    for (completion,) in done:
        assert 0 < len(completion.tokens) < 40
        assert (completion.finish == "stop") == (completion.tokens[-1] in model.eos_ids)


def test_the_speed_is_told(model):
    """Tokens of prompts and completions add up over calls; the line has them."""
    prompts = prompts_of(model)
    speed = Speed()
    speed.start()
    streamed(model, prompts[0], Sampling(max_tokens=7), speed=speed)
    assert (speed.prompt_tokens, speed.tokens) == (len(prompts[0]), 7)
    batched(model, prompts, Sampling(max_tokens=7), speed=speed)
    assert speed.prompt_tokens == len(prompts[0]) + sum(map(len, prompts)) and speed.tokens == 28
    assert 0 < speed.seconds < 60
    assert f"prompt {speed.prompt_tokens} tokens" in speed.line()
    # In a unit that fits the tiny model: "0.00274 GB" is nobody's way to say it.
    assert re.search(r"peak memory \d+(\.\d)? (MB|kB)$", speed.line())


def test_a_conversation_remembers_and_reuses_its_cache(model):
    """The second turn's prompt holds the first; its reply is that of the whole prompt computed anew."""
    sampling = Sampling(temperature=0.0, max_tokens=9)
    talk = Conversation(model, sampling, system="Be brief.")
    first = "".join(talk.reply("How many?"))
    speed = Speed()
    second = "".join(talk.reply("And now?", speed=speed))
    assert [message["role"] for message in talk.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert [message["content"] for message in talk.messages[1:4]] == ["How many?", first, "And now?"]
    _, prompt = render(model.tokenizer, talk.messages[:-1])
    assert streamed(model, prompt, sampling)[1].text == second
    assert 0 < speed.prompt_tokens < len(prompt), "the first turn was computed again"


def test_a_cleared_conversation_begins_anew(model):
    """The same question, the same answer as in the beginning; another seed number for another turn."""
    talk = Conversation(model, Sampling(temperature=1.0, max_tokens=9))
    first = "".join(talk.reply("How many?"))
    assert "".join(talk.reply("How many?")) != first
    talk.clear()
    assert talk.messages == [] and "".join(talk.reply("How many?")) == first


def test_a_nudge_begins_each_reply(model):
    """It is shown, given to the model, and part of what it said."""
    talk = Conversation(model, Sampling(temperature=0.0, max_tokens=5), nudge="<reasoning>")
    text = "".join(talk.reply("7+5"))
    assert text.startswith("<reasoning>") and talk.messages[-1]["content"] == text
    prompt = render(model.tokenizer, talk.messages[:1], "<reasoning>")[1]
    assert text == "<reasoning>" + streamed(model, prompt, Sampling(temperature=0.0, max_tokens=5))[1].text


def test_a_conversation_goes_on_after_an_interruption(model):
    """What had come stays; the next reply is that of the whole prompt."""
    sampling = Sampling(temperature=0.0, max_tokens=12)
    talk = Conversation(model, sampling)
    asked = iter([False, True])
    list(talk.reply("How many?", stopped=lambda: next(asked)))
    second = "".join(talk.reply("And now?"))
    _, prompt = render(model.tokenizer, talk.messages[:-1])
    assert streamed(model, prompt, sampling)[1].text == second


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(model):
    """An exception in the midst of a reply: no message, and the next turn is right."""
    sampling = Sampling(temperature=0.0, max_tokens=6)
    talk = Conversation(model, sampling)
    first = "".join(talk.reply("How many?"))
    before = list(talk.messages)

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(talk.reply("7+5", stopped=fail))
    assert talk.messages == before and before[-1]["content"] == first
    second = "".join(talk.reply("And now?"))
    _, prompt = render(model.tokenizer, talk.messages[:-1])
    assert streamed(model, prompt, sampling)[1].text == second


def test_models_without_a_cache_that_can_be_cut(model, monkeypatch):
    """Each turn is computed from its beginning then."""
    monkeypatch.setattr("mlx_lm.models.cache.can_trim_prompt_cache", lambda cache: False)
    sampling = Sampling(temperature=0.0, max_tokens=6)
    talk = Conversation(model, sampling)
    list(talk.reply("How many?"))
    speed = Speed()
    second = "".join(talk.reply("And now?", speed=speed))
    _, prompt = render(model.tokenizer, talk.messages[:-1])
    assert speed.prompt_tokens == len(prompt) and streamed(model, prompt, sampling)[1].text == second
    mx.clear_cache()
