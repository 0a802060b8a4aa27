"""An episode with OpenAI's Agents SDK: as its documentation has it, with chat completions."""

import json
import sys

from agents import Agent, Runner, set_default_openai_api, set_tracing_disabled  # pyright: ignore

row = json.load(sys.stdin)
set_default_openai_api("chat_completions")
set_tracing_disabled(True)
helper = Agent(name="Helper", instructions="Count.", model="gpt-4o")
checker = Agent(name="Checker", instructions="Check.", model="gpt-4o")
first = Runner.run_sync(helper, row["question"])
more = Runner.run_sync(helper, [*first.to_input_list(), {"role": "user", "content": "Sure?"}])
checked = Runner.run_sync(checker, str(more.final_output) or "nothing")
print(json.dumps({"reward": float(len(set(str(checked.final_output))))}))
