"""The tokens behind a turn, by templates that write an assistant's last turn differently."""

import pytest

from runners.environments.chat_turns import ChatTurns
from tests.support.serving import embedded

# As Qwen3's: empty thoughts in an assistant's turn, but only in the last one.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.role == 'assistant' and loop.last %}<think> </think> {% endif %}"
    "{{ message.content }}END {% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("roles", [("user",), ("tool",), ("tool", "tool", "user")])
def test_messages_behind_a_turn_whose_last_form_differs(ended, roles):
    """The tokens follow the template after the turn's end; if the turn was cut off, its end comes first."""
    loaded = embedded()
    tokenizer = loaded.tokenizer
    (end,) = loaded.eos_ids
    name = tokenizer.convert_ids_to_tokens(end)
    template = {"chat_template": TEMPLATE.replace("END", name)}
    turns = ChatTurns(tokenizer, (), template, frozenset(loaded.eos_ids), loaded.decoder)
    messages = [{"role": role, "content": f"{n}+{n}"} for n, role in enumerate(roles)]
    found = turns.follow((9, end) if ended else (9, 9), messages)
    behind = "".join(f"{role}: {n}+{n}{name} " for n, role in enumerate(roles))
    expected = f"{'' if ended else name} {behind}assistant: "
    assert found == tuple(tokenizer.encode(expected, add_special_tokens=False))
