"""The cookbook's rl_loop and sl_loop with other sizes and data. Arguments: URL, model, logs, size."""

import itertools
import json
import sys
from pathlib import Path

import datasets
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.recipes import rl_loop, sl_loop
from transformers import AutoTokenizer

URL, FOLDER, LOGS, SIZE = sys.argv[1:5]
NAME = "Qwen/Qwen3-8B-Base"  # the server's name for its model: the cookbook looks up how to render by it
STEPS = 3
problems = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(24)]
roles = {"question": "user", "answer": "assistant"}
chats = [
    {"messages": [{"role": role, "content": each[name]} for name, role in roles.items()]} for each in problems
]


def load_dataset(name, *_):
    """Data of this script, in place of the Hub's."""
    rows = problems if "gsm8k" in name else chats
    return datasets.DatasetDict(train=datasets.Dataset.from_list(rows))


datasets.load_dataset = load_dataset
tokenizer_utils.register_tokenizer(NAME, lambda: AutoTokenizer.from_pretrained(FOLDER))
sizes = {"base_url": URL, "model_name": NAME, "lora_rank": 4, "max_steps": STEPS, "save_every": 2}
turns = itertools.cycle((0.0, 1.0, 0.5))
rl_loop.get_reward = lambda response, answer: next(turns)  # small models solve nothing
rl = {"batch_size": int(SIZE), "group_size": int(SIZE), "max_tokens": 8, "loss_fn": "importance_sampling"}
rl_loop.main(rl_loop.Config(log_path=f"{LOGS}/rl", **rl, **sizes))
sl = {"batch_size": 2 * int(SIZE), "max_length": 256, "learning_rate": 1e-3}
sl_loop.main(sl_loop.Config(log_path=f"{LOGS}/sl", **sl, **sizes))
logs = [Path(LOGS, each, "metrics.jsonl").read_text().splitlines() for each in ("rl", "sl")]
rl, sl = ([json.loads(line) for line in lines] for lines in logs)
assert len(rl) == len(sl) == STEPS and all(row["grad_norm:mean"] > 0 for row in [*rl, *sl])
assert sl[-1]["train_mean_nll"] < sl[0]["train_mean_nll"], [row["train_mean_nll"] for row in sl]
print("fine")
