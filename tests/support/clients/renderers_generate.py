"""renderers' client: two turns of ids. Arguments: the server's URL, the tokenizer's folder."""

import asyncio
import sys

from openai import AsyncOpenAI
from renderers.client import OverlongPromptError, generate
from renderers.default import DefaultRenderer
from transformers import AutoTokenizer


async def main() -> None:
    url, folder = sys.argv[1:]
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    (model,) = [card.id for card in (await client.models.list()).data]
    renderer = DefaultRenderer(AutoTokenizer.from_pretrained(folder))
    messages = [{"role": "user", "content": "Anna has 3 pens and buys 4 more. How many pens has she?"}]
    params = {"max_tokens": 20, "temperature": 0.8, "top_p": 0.95, "seed": 3}
    asked = {"client": client, "renderer": renderer, "model": model, "sampling_params": params}
    first = await generate(messages=messages, **asked, cache_salt="0", priority=1)
    assert len(first["completion_ids"]) == len(first["completion_logprobs"]) > 0
    longer = [*first["prompt_ids"], *first["completion_ids"], *first["prompt_ids"]]
    second = await generate(messages=messages, prompt_ids=longer, **asked)
    assert second["prompt_ids"] == longer and second["finish_reason"] in ("stop", "length")
    try:
        await generate(messages=messages, prompt_ids=longer * 200, **asked)
    except OverlongPromptError:
        print("fine")


asyncio.run(main())
