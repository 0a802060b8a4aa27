"""Episodes: calls that a model writes, what they return as tokens, and what rewards get of them."""

import json
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import grpo_fn as g
from runners.config.sections import DataConfig, EnvConfig
from runners.data.prompts import Example
from runners.data.rendering import render
from runners.engines.engine import Row, Ticket
from runners.environments.chat_turns import ChatTurns
from runners.environments.environments import build_environments
from runners.errors import UserError
from runners.rewards.experience import faults_of
from runners.rewards.scoring import Reward, Scorer, resolve_rewards
from runners.tokenization.text import TextDecoder
from runners.user_code.worker import Worker
from tests.support.processes.waiting import HANGS
from tests.support.tiny_models import make_tokenizer

# Templates by the formats that Qwen 2.5 and Llama 3 document, and one that knows neither system nor tools.
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n\n"
    "{% if m.role == 'tool' %}{{ m.content | tojson }}{% elif m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


END = 2  # the id of <|im_end|>


class Wrapped(PreTrainedTokenizerFast):
    """With what mlx-lm's wrapper adds."""

    eos_token_ids = frozenset({END})


def tokenizer_with(template) -> Any:
    """A tokenizer with a chat template."""
    names = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    found = Wrapped(tokenizer_object=make_tokenizer(), **names)
    found.chat_template, found.has_chat_template = template, template is not None
    return found


def call(name, **arguments):
    """A tool call as text."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Scripted:
    """An engine in place of a model: the n-th turn of each row is `turns[n]`, ended by the end token."""

    version = rows = 0

    def __init__(self, tokenizer, *turns):
        """With the texts of the turns."""
        self.turns = [[*tokenizer.encode(turn, add_special_tokens=False), END] for turn in turns]
        self.prompts, self._turns, self._rows = [], [], {}
        self.continued: dict[int, Any] = {}  # what each turn goes on from

    def load(self, weights):
        """It has none."""

    def submit(self, request, sampling):
        """The next turn of the request that this one continues, else the first."""
        ticket = Ticket(len(self._turns))
        self._turns.append(0 if request.continues is None else self._turns[request.continues] + 1)
        if request.continues is None:
            self.prompts.append(request.prompt)
        else:
            self.continued[ticket] = request.continues
        tokens = tuple(self.turns[self._turns[ticket]])
        self._rows[ticket] = (Row(tokens, (0.0,) * len(tokens), "stop", ((0, len(tokens)),)),)
        return ticket

    def collect(self, least=1, *, should_stop=None):
        """All that was submitted."""
        rows, self._rows = self._rows, {}
        return rows

    def tokens(self, ticket, *, should_stop=None):
        """Nobody streams them."""
        return iter(())

    def cancel(self, ticket):
        """Nothing is kept."""


SOURCE = '''
import asyncio, time

class Shop:
    made, together = [], []

    def __init__(self):
        self.made.append(self)

    def reset(self, answer, **row):
        self.log, self.answer = [], answer
        return row.get("greeting")

    def price(self, item: str, count: int = 1) -> float:
        """Look up a price.

        Args:
            item: What.
            count: How many.
        """
        self.log.append(item)
        return {"apple": 3, "pear": 4}[item] * count

    async def later(self, item: str) -> str:
        """Look it up later.

        Args:
            item: What.
        """
        self.together.append(item)
        while len(self.together) < 24:  # of all instances
            await asyncio.sleep(0.001)
        return item + "!"

    def odd(self, kind: str) -> str:
        """Do something odd.

        Args:
            kind: What.
        """
        if kind == "hang":
            time.sleep(6000)
        if kind == "exit":
            raise SystemExit(1)
        if kind == "print":
            print("from a tool")
            return "printed"
        odd = {"long": "x" * 10_000_000, "bytes": b"\\xff", "surrogate": "\\ud800", "none": None}
        return odd[kind] if kind in odd else Bad()

    def _hidden(self):
        pass

    def get_reward(self):
        return float(len(self.log))

class Bad:
    def __str__(self):
        raise RuntimeError("no text")

def by_environment(environments, **kwargs):
    return [len(environment.log) for environment in environments]

class Judged:
    def reset(self, **row):
        pass

    async def get_reward(self):
        await asyncio.sleep(0)
        return 2.0

class Late(Shop):
    """The first instance answers when all other conversations have gone on."""

    def wait(self, item: str) -> str:
        """Answer.

        Args:
            item: What.
        """
        time.sleep(0.5 * (self is self.made[0]))
        return item

class Greeter:
    greetings = iter([" A", " A", " B", " BB"])

    def reset(self, **row):
        return next(self.greetings)

SHOPS = {"one": Shop}

class NoReset:
    pass

class Untyped:
    def reset(self, **row):
        pass

    def tool(self, a):
        pass

class Needs:
    def __init__(self):
        raise RuntimeError("no server at localhost:1")

'''


@pytest.fixture(scope="module")
def worker():
    """One process for all tests."""
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def built(tmp_path, worker):
    """A function that builds environments of [env], with a template."""
    (tmp_path / "shop.py").write_text(SOURCE)

    def build(template=QWEN, nudge="", thoughts=("[T]", "[/T]"), **env):
        tokenizer: Any = tokenizer_with(template)
        keys = {"factory": "shop.py:Shop", "timeout": HANGS, **env}
        decoder, data = TextDecoder(tokenizer), DataConfig(nudge=nudge, thoughts=thoughts)
        return build_environments(EnvConfig(**keys), data, tokenizer, decoder, [END], [tmp_path], worker)

    return build


def examples(environments, count=1, **columns):
    """Problems with columns."""
    messages = ({"role": "user", "content": "What do 2 apples cost?"},)
    tokens = render(environments.chat.tokenizer, messages, tools=environments.chat.schemas)[1]
    return [Example(messages, "", tokens, "6", {"answer": "6", **columns}) for _ in range(count)]


def played_by(environments, script, rows, generations=1):
    """The conversations of a script with these problems."""
    sampling = g.Sampling(num_generations=generations)
    return environments.play(script, rows, sampling, key=mx.random.key(0))


def play(environments, *turns, rows=1, **columns):
    """One conversation a row with these turns of the model."""
    script = Scripted(environments.chat.tokenizer, *turns)
    rollout, played = played_by(environments, script, examples(environments, rows, **columns))
    return rollout, played, script


@pytest.mark.parametrize("template", [QWEN, LLAMA, PLAIN, None], ids=["qwen", "llama", "plain", "none"])
def test_a_conversation_with_calls(built, template):
    """Two turns with the call's result between them as given tokens; rewards receive TRL's messages."""
    environments = built(template)
    asks = "Let me see. " + call("price", item="apple", count=2)
    rollout, played, script = play(environments, asks, "It is 6.")
    asked = {"name": "price", "arguments": {"item": "apple", "count": 2}}
    calls = [{"type": "function", "function": asked}]
    assert played[0].messages == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "name": "price", "content": "6"},
        {"role": "assistant", "content": "It is 6."},
    ]
    assert played[0].counts == {"turns": 2, "calls": 1, "failures": 0, "timeouts": 0, "cut": 0}
    prompt = environments.chat.tokenizer.decode(list(script.prompts[0]))
    assert "price" in prompt and "later" in prompt and "_hidden" not in prompt and "reset" not in prompt
    tokens, sampled = rollout.completions()[0], rollout.sampled()[0]
    given = [token for token, mine in zip(tokens, sampled, strict=True) if not mine]
    given = environments.chat.tokenizer.decode(given)
    assert "6" in given and "It is" not in given and "Let me" not in given
    assert given.rstrip().endswith(("assistant", "Assistant:"))


def test_the_given_tokens_are_those_of_the_whole_template():
    """Turn by turn, the tokens equal the template's rendering of the whole conversation."""
    tokenizer = tokenizer_with(QWEN)
    chat = ChatTurns(tokenizer, [], {}, frozenset({END}))
    question = {"role": "user", "content": "q"}
    observations = [
        {"role": "tool", "name": name, "content": text} for name, text in (("f", "one\nline"), ("g", "2"))
    ]
    start = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    unthinking = ChatTurns(tokenizer, [], {"enable_thinking": False}, frozenset({END}))
    assert tokenizer.decode(list(unthinking.follow([END], observations))).endswith("<think>\n\n</think>\n\n")
    for end in ([END], []):  # a turn that ended by itself, and one cut by a stop string
        turn = [*tokenizer.encode("I ask"), *end]
        given = chat.follow(turn, observations)
        got = [*tokenizer.encode(start), *turn, *given]
        whole = [question, {"role": "assistant", "content": "I ask"}, *observations]
        want = tokenizer.apply_chat_template(whole, add_generation_prompt=True, return_dict=False)
        assert got == want


@pytest.mark.parametrize(
    ("turn", "told", "failed"),
    [
        (call("price", item="plum"), "plum", True),
        (call("prices", item="apple"), "there is no tool prices; did you mean price?", True),
        (call("price"), "missing 1 required", True),
        (call("odd", kind="exit"), "1", True),
        (call("odd", kind="bad"), "no text", True),
        ("<tool_call>{broken</tool_call>", "cannot be read", True),
        (call("odd", kind="bytes"), r"b'\xff'", False),
        (call("odd", kind="surrogate"), "?", False),
        (call("odd", kind="none"), "None", False),
        (call("odd", kind="print"), "printed", False),
        (call("odd", kind="long"), "xxx [cut]", False),
    ],
)
def test_whatever_a_call_does_is_a_text_for_the_model(built, turn, told, failed):
    """The model sees an error or an odd result as text; ten megabytes are truncated."""
    rollout, played, _ = play(built(max_observation_tokens=200), turn, "I see.")
    (episode,) = played
    content = episode.messages[1]["content"]
    assert told in content and ("error" in content) == failed and content.endswith("}" if failed else told)
    assert (episode.counts["failures"], episode.counts["cut"]) == (failed, "cut" in told)
    assert episode.fault == "" and rollout.tokens_bt.shape[1] < 500


def test_a_call_that_hangs_is_an_observation_and_its_instance_is_not_used_again(built):
    """A later episode has a new instance."""
    environments = built(timeout=0.3)
    _, played, _ = play(environments, call("odd", kind="hang"), "Late.")
    assert "timed out after 0.3 s" in played[0].messages[1]["content"]
    assert played[0].counts["timeouts"] == 1
    environments.config = attrs.evolve(environments.config, timeout=HANGS)
    plays = [play(environments, "Hello.", rows=2)[1] for _ in range(2)]
    again, third = ({each.environment for each in row} for row in plays)
    assert played[0].environment not in again and again == third


def test_a_failure_may_cost_the_reward(built):
    """With on_error = "no_reward", the conversation ends at the failure."""
    environments = built(on_error="no_reward")
    _, played, _ = play(environments, call("price", item="plum"), "never said")
    assert played[0].fault.startswith("price: ") and len(played[0].messages) == 1
    assert "environment: price" in faults_of(played)[0]


@pytest.mark.parametrize(
    ("nudge", "thought"), [("", "[T]Ask? {}"), ("", "[T]{}[/T]"), ("", "{}[/T]So."), ("[T]", "Ask? {}")]
)
def test_a_call_inside_thoughts_is_not_made(built, nudge, thought):
    """Nor is a call in thoughts that the nudge started or that were cut off; the message contains the
    thoughts."""
    said = thought.format(call("price", item="apple"))
    _, played, _ = play(built(nudge=nudge), said, "never said")
    assert played[0].messages == [{"role": "assistant", "content": nudge + said}]
    assert played[0].counts["calls"] == 0


@pytest.mark.parametrize(("nudge", "thought"), [("", "[T]a[/T]"), ("Well.", ""), ("[T]", "a[/T]")])
def test_a_call_behind_thoughts_is_made(built, nudge, thought):
    """The message contains the nudge, and the call does not."""
    asked = json.dumps({"name": "price", "arguments": {"item": "pear"}})
    _, played, _ = play(built(nudge=nudge), thought + asked, "So.")
    assert [message["content"] for message in played[0].messages] == [nudge + thought, "4", "So."]


def test_bounds_on_turns_and_calls(built):
    """The last turn's calls are not made; calls beyond the bound are refused."""
    asks = call("price", item="apple")
    _, played, _ = play(built(max_turns=3), *[asks] * 5)
    assert played[0].counts["turns"] == 3 and played[0].counts["calls"] == 2
    environments = built(max_tool_calls=2)
    _, played, _ = play(environments, asks * 3, "So.")
    contents = [message["content"] for message in played[0].messages if message["role"] == "tool"]
    assert contents[:2] == ["3", "3"] and "at most" in contents[2]


def test_coroutines_are_awaited_together(built):
    """Coroutines of all rows run together, along with plain calls."""
    environments = built(workers=1)
    _, played, _ = play(environments, call("later", item="a"), "So.", rows=24)
    assert {each.messages[1]["content"] for each in played} == {"a!"}
    _, played, _ = play(environments, call("later", item="a") + call("price", item="pear"), "So.")
    assert [m["content"] for m in played[0].messages if m["role"] == "tool"] == ["a!", "4"]


def test_texts_of_reset_extend_the_prompts(built):
    """The text that `reset` returns ends the last message; different texts become given tokens after the
    shared prompt."""
    environments = built()
    _, _, script = play(environments, "Hello.", greeting=" Welcome!")
    assert " Welcome!<|im_end|>" in environments.chat.tokenizer.decode(list(script.prompts[0]))
    environments = built(factory="shop.py:Greeter")
    script = Scripted(environments.chat.tokenizer, "Hello.")
    rollout, played = played_by(environments, script, examples(environments, 2), 2)
    assert len(rollout.prompts) == 2 and rollout.num_generations == 2
    for row, (tokens, mine) in enumerate(zip(rollout.completions(), ("A", "A", "B", "BB"), strict=True)):
        spelled = environments.chat.tokenizer.decode([*rollout.prompts[row // 2], *tokens])
        assert f"cost? {mine}<|im_end|>" in spelled
    assert {tuple(m["content"] for m in each.messages) for each in played} == {("Hello.",)}
    batch = g.make_batch(rollout, mx.ones((2, 2)))
    assert batch.num_tokens.item() == 4 * len(script.turns[0]), "the greetings are given"


@pytest.mark.parametrize("schedule", ["together", "arrival"])
def test_turns_go_on_together_or_as_replies_arrive(built, schedule):
    """The row with the slow call continues with the others, or last."""
    environments = built(factory="shop.py:Late", schedule=schedule, workers=4)
    script = Scripted(environments.chat.tokenizer, call("wait", item="it"), "Hello.")
    _, played = played_by(environments, script, examples(environments, 4))
    assert [each.counts["turns"] for each in played] == [2] * 4 and not any(each.fault for each in played)
    second = [script.continued[ticket] for ticket in sorted(script.continued)]
    late = max(range(4), key=lambda row: played[row].seconds)
    assert second.index(late) == (late if schedule == "together" else 3), second


def test_a_reset_that_fails_costs_the_reward(built):
    """Other episodes are not affected."""
    environments = built()
    script = Scripted(environments.chat.tokenizer, "Hello.")
    rows = examples(environments, 2)
    del rows[0].columns["answer"]
    _, played = played_by(environments, script, rows)
    assert played[0].fault.startswith("reset: ") and played[1].fault == ""


def test_rewards_get_messages_and_environments(built, tmp_path):
    """Rewards have TRL's signature; the environment may have its own reward."""
    environments = built()
    _, played, _ = play(environments, call("price", item="apple"), "3", rows=2)

    def by_messages(completions):
        return [len(completion) for completion in completions]

    worker = environments.calls.worker
    (by_environment,) = resolve_rewards(["shop.py:by_environment"], (), [tmp_path], worker)
    rewards = [by_environment, Reward("b", by_messages), environments.reward]
    scores = Scorer(rewards).score(
        *(["x", "y"], [[], []], {"answer": ["6", "6"]}),
        conversations=[each.messages for each in played],
        environments=[each.environment for each in played],
    )
    assert not scores.problems and environments.reward.name == "Shop"
    assert np.array_equal(scores.values_kb, [[1, 1], [3, 3], [1, 1]])
    later = built(factory="shop.py:Judged")  # whose get_reward is a coroutine
    _, played, _ = play(later, "2", rows=2)
    numbers = [each.environment for each in played]
    scores = Scorer([later.reward]).score(["x"] * 2, [[]] * 2, {}, environments=numbers)
    assert scores.values_kb.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"factory": "shop.py:Shops"}, "did you mean Shop?"),
        ({"factory": "shop.py:NoReset"}, "has no method reset"),
        ({"factory": "shop.py:SHOPS"}, "expected one class; its reset(**row) can choose by a"),
        ({"factory": "shop.py:Untyped"}, "expected type hints"),
        ({"factory": "shop.py:Needs"}, "no server at localhost:1"),
        ({"factory": "", "tools": ("shop.py:nothing",)}, "has no nothing"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(built, env, said):
    """The error is one line and comes before anything is sampled."""
    with pytest.raises(UserError) as refused:
        built(**env)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert built(factory="") is None
