"""An episode with mini-swe-agent: its default agent, its text model, and a local shell."""

import json
import os
import sys

os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
os.environ["MSWEA_SILENT_STARTUP"] = "1"

from minisweagent.agents.default import DefaultAgent  # pyright: ignore
from minisweagent.environments.local import LocalEnvironment  # pyright: ignore
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel  # pyright: ignore

row = json.load(sys.stdin)
model = LitellmTextbasedModel(model_name="openai/gpt-4o", model_kwargs={"max_tokens": 8})
templates = {"system_template": "Use bash.", "instance_template": "{{task}}"}
agent = DefaultAgent(model, LocalEnvironment(), **templates, step_limit=2)
agent.run(row["question"])
said = "".join(str(message["content"]) for message in agent.messages if message["role"] == "assistant")
print(json.dumps({"reward": float(len(set(said)))}))
