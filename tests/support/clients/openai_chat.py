"""OpenAI's client against a server: chat, stream, tools, completions of ids, errors. Arguments: its URL."""

import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
(model,) = [card.id for card in client.models.list().data]
messages = [{"role": "user", "content": "Anna has 3 pens and buys 4 more. How many pens has she?"}]
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

asked = {"model": model, "messages": messages, "max_tokens": 20, "seed": 1}
whole = client.chat.completions.create(**asked, n=2)
assert [choice.index for choice in whole.choices] == [0, 1] and whole.usage.completion_tokens > 0

extra = {"return_token_ids": True}
ids = client.chat.completions.create(**asked, logprobs=True, top_logprobs=0, extra_body=extra)
choice = ids.choices[0]
wanted = [f"token_id:{token}" for token in choice.token_ids]
assert [entry.token for entry in choice.logprobs.content] == wanted and ids.prompt_token_ids

stream_options = {"include_usage": True}
events = list(client.chat.completions.create(**asked, stream=True, stream_options=stream_options))
text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
assert text == choice.message.content == whole.choices[0].message.content, (text, choice.message.content)
assert events[-1].usage.completion_tokens == ids.usage.completion_tokens

reply = client.chat.completions.create(
    model=model, messages=messages, tools=[tool], tool_choice="auto", max_tokens=20, temperature=0
)
assert reply.choices[0].message.role == "assistant"
messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
client.chat.completions.create(model=model, messages=messages, tools=[tool], max_tokens=5)

text = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=5, logprobs=0, seed=3)
assert len(text.choices[0].logprobs.token_logprobs) == text.usage.completion_tokens
pieces = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=5, seed=3, stream=True)
assert "".join(event.choices[0].text for event in pieces) == text.choices[0].text

for fault, call in (
    (openai.NotFoundError, {"model": "gpt-5"}),
    (openai.BadRequestError, {"max_tokens": 10**6}),
    (openai.BadRequestError, {"logit_bias": {"5": 1}}),
):
    try:
        client.chat.completions.create(**{"model": model, "messages": messages, **call})
    except fault as error:
        assert error.body["message"]
    else:
        raise AssertionError(call)
print("fine")
