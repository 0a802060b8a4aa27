"""The cookbook's rl_numerics_check with small sizes. Arguments: URL, model's folder, logs, renderer."""

import asyncio
import json
import sys
from pathlib import Path

import datasets
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.recipes.rl_numerics_check import env, train
from tinker_cookbook.rl import train as rl_train
from transformers import AutoTokenizer

URL, FOLDER, LOGS, RENDERER = sys.argv[1:5]
NAME = "Qwen/Qwen3-8B-Base"
STEPS = 1
line = " The river runs until the sea , and after the rain it was until the evening ."
datasets.load_dataset = lambda *_, **__: datasets.Dataset.from_dict({"text": [line * 40] * 400})
tokenizer_utils.register_tokenizer(NAME, lambda: AutoTokenizer.from_pretrained(FOLDER))
task = env.CountingTaskConfig(num_pages_min=1, num_pages_max=1, page_chars=120)
names = {"model_name": NAME, "renderer_name": RENDERER, "base_url": URL, "log_path": LOGS}
sizes = {
    "lora_rank": 4,
    "group_size": 2,
    "groups_per_batch": 1,
    "max_tokens": 12,
    "max_trajectory_tokens": 2048,
}
steps = {"learning_rate": 1e-3, "save_every": 0, "max_steps": STEPS}
config = train.build_config(train.CLIConfig(task=task, **names, **sizes, **steps))
asyncio.run(rl_train.main(config))
rows = [json.loads(text) for text in Path(LOGS, "metrics.jsonl").read_text().splitlines()]
kls = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
apart = [[row[name] for name in kls] for row in rows if kls[0] in row]
assert apart and all(abs(first) < 1e-3 and second < 1e-4 for first, second in apart), apart
print("fine")
