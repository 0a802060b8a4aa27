"""TRL's side of `against_trl`, in a process of its own.

    python -m benchmarks.evidence.trl_side train SETTINGS.json FOLDER SEED
    python -m benchmarks.evidence.trl_side logits SETTINGS.json OUT.json

The first trains, and writes a log like that of a run of ours into FOLDER; seconds are from its start. The
second compares the logits that transformers and mlx-lm compute from the model folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runners.answers.forms import answer_form
from runners.config.user_functions import resolve_function
from runners.rewards.builtin import built_in

STARTED = time.perf_counter()
EVALUATED_TOGETHER = 200  # problems


def opened(settings: dict[str, Any]) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer, which makes the same tokens of the prompts as ours.

    Raises:
        ValueError: it does not.
    """
    import torch  # pyright: ignore
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    for example in settings["test"] + settings["train"]:
        found = tokenizer(example["prompt"])["input_ids"]
        if found != example["tokens"]:
            raise ValueError(f"{example['prompt']!r}: tokens {found}; ours are {example['tokens']}")
    return AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32), tokenizer


def as_rewards(names: Sequence[str], nudge: str, form: str = "xml") -> list[Any]:
    """Rewards, as a config names them, for TRL's completions: texts without the prompt's last words."""
    shipped = built_in(answer_form(form))

    def made(name: str) -> Callable[..., list[float | None]]:
        function = shipped.get(name) or resolve_function(name, key="reward.functions")

        def reward(completions: Sequence[str], **columns: Any) -> list[float | None]:
            columns.pop("prompts", None)
            said = [[{"role": "assistant", "content": nudge + text}] for text in completions]
            return function(said, **columns)

        reward.__name__ = name
        return reward

    return [made(name) for name in names]


def evaluation(model: Any, tokenizer: Any, settings: dict[str, Any]) -> dict[str, float]:
    """Greedy completions of the held-out problems: the mean of their rewards, the share of right answers."""
    import torch  # pyright: ignore

    problems, right, total = settings["test"], 0, 0.0
    form = answer_form(settings["form"], given=settings["nudge"])
    rewards = as_rewards(settings["rewards"], settings["nudge"], settings["form"])
    was_training = model.training
    model.eval()
    for start in range(0, len(problems), EVALUATED_TOGETHER):
        part = problems[start : start + EVALUATED_TOGETHER]
        inputs = tokenizer(
            [problem["prompt"] for problem in part], padding=True, padding_side="left", return_tensors="pt"
        )
        with torch.no_grad():
            tokens = model.generate(
                input_ids=inputs["input_ids"].to(model.device),
                attention_mask=inputs["attention_mask"].to(model.device),
                do_sample=False,
                max_new_tokens=settings["trl"]["max_completion_length"],
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        golds = [problem["answer"] for problem in part]
        total += sum(value or 0.0 for reward in rewards for value in reward(texts, answer=golds))
        if form is not None:
            pairs = zip(texts, golds, strict=True)
            right += sum(form.is_right(settings["nudge"] + text, gold) for text, gold in pairs)
    model.train(was_training)
    found = {"eval/reward": total / len(problems), "em_subset": len(problems)}
    return found if form is None else {**found, "em": right / len(problems)}


def train(settings: dict[str, Any], folder: Path, seed: int) -> None:
    """TRL's GRPOTrainer: one update a rollout; each is logged. On a GPU products are in bfloat16."""
    import torch  # pyright: ignore
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

    folder.mkdir(parents=True)
    model, tokenizer = opened(settings)
    rows = settings["batch_size"] * settings["trl"]["num_generations"]
    last = settings["trl"]["max_steps"]
    on_gpu = torch.cuda.is_available()

    with (folder / "training_log.jsonl").open("w", encoding="utf-8") as log:

        def write(**line: Any) -> None:
            line["time/elapsed"] = time.perf_counter() - STARTED
            log.write(json.dumps(line) + "\n")
            log.flush()

        def evaluated(update: int) -> None:
            write(update=update, **evaluation(model, tokenizer, settings))

        class Watch(TrainerCallback):
            """Logs every update and evaluates as the config says."""

            started = 0.0

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                evaluated(0)

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.started = time.perf_counter()

            def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float], **___: Any) -> None:
                if "reward" not in logs:  # the summary at the end
                    return
                seconds = time.perf_counter() - self.started
                taken = {"memory/peak_gb": torch.cuda.max_memory_allocated() / 1e9} if on_gpu else {}
                write(
                    update=state.global_step,
                    reward=logs["reward"],
                    step_time=seconds,
                    num_tokens=logs["num_tokens"],
                    **taken,
                )
                if state.global_step == last or not state.global_step % (settings["eval_every"] or last):
                    evaluated(state.global_step)

        options = {
            "output_dir": str(folder),
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": 1,
            "seed": seed,
            "bf16": on_gpu,
            "use_cpu": not on_gpu,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            **settings["trl"],
        }
        data = [{"prompt": each["prompt"], "answer": each["answer"]} for each in settings["train"]]
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(**options),
            reward_funcs=as_rewards(settings["rewards"], settings["nudge"], settings["form"]),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(data),
            callbacks=[Watch()],
        )
        trainer.train()


def compare_logits(settings: dict[str, Any], out: Path) -> None:
    """The largest difference of any logit over the held-out prompts, each alone."""
    import mlx.core as mx
    import numpy as np
    import torch  # pyright: ignore
    from mlx_lm.utils import load_model

    theirs, _ = opened(settings)
    theirs.eval()
    ours, _ = load_model(Path(settings["model"]))
    ours.set_dtype(mx.float32)
    difference, low, high, tokens = 0.0, 0.0, 0.0, 0
    for example in settings["test"]:
        with torch.no_grad():
            one = theirs(torch.tensor([example["tokens"]])).logits.numpy()
        other = np.array(ours(mx.array([example["tokens"]])))
        difference = max(difference, float(np.abs(one - other).max()))
        low, high = min(low, float(one.min())), max(high, float(one.max()))
        tokens += len(example["tokens"])
    out.write_text(json.dumps({"difference": difference, "low": low, "high": high, "tokens": tokens}))


def main() -> None:
    """Does what the command line says."""
    what, path, *rest = sys.argv[1:]
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    if what == "train":
        train(settings, Path(rest[0]), int(rest[1]))
    else:
        compare_logits(settings, Path(rest[0]))


if __name__ == "__main__":
    main()
