"""The other side of the comparisons with other trainers, in a separate process.

    python -m benchmarks.sides train|mlx-lm-lora SETTINGS.json FOLDER SEED

`train` lets TRL train, for at most `seconds` of the settings if they are there, `mlx-lm-lora` that trainer;
both write a log like that of our runs into FOLDER, with seconds from their start.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from operator import mul
from pathlib import Path
from typing import Any

import mlx.core as mx

from runners.answers.forms import answer_form
from runners.config.loading import Config
from runners.config.user_functions import resolve_function
from runners.files.run_files import METRICS
from runners.quickstart import MODEL_DIR
from runners.rewards.builtin import built_in

STARTED = time.perf_counter()
EVALUATED_TOGETHER = 660  # problems: half of GSM8K's test problems


def side_settings(config: Config) -> dict[str, Any]:
    """What the other side needs to know: its prompts as text and tokens, the answers, and the settings."""
    from transformers import AutoTokenizer

    from runners.data.datasets import load_rows
    from runners.data.prompts import build_examples
    from runners.evaluation.evaluation import held_out

    model = MODEL_DIR if config.model.path == "embedded" else config.model.path
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    train, test = (build_examples(rows, config.data, tokenizer)[0] for rows in load_rows(config.data))
    optim, loss, lora = config.optim, config.loss_spec(), config.model.lora

    def plain(examples) -> list[dict[str, object]]:
        return [
            {"prompt": example.text, "tokens": list(example.tokens), "answer": example.answer}
            for example in examples
        ]

    return {
        "model": str(model),
        "lora": {"rank": lora.rank, "scale": lora.scale} if config.model.tune == "lora" else None,
        "train": plain(train),
        "test": plain(held_out(test, config.eval.samples)),
        "nudge": config.data.nudge,
        "rewards": list(config.reward.functions),
        "weights": list(config.reward.weights) or [1.0] * len(config.reward.functions),
        "form": config.answer.form,
        "eval_every": config.eval.every,
        "batch_size": optim.batch_size,
        "trl": {
            "num_generations": config.rollout.num_generations,
            "max_completion_length": config.rollout.max_new_tokens,
            "temperature": config.rollout.temperature,
            "loss_type": "dapo",  # the mean over the tokens of a batch
            "epsilon": loss.epsilon_low,
            "epsilon_high": loss.epsilon_high,
            "beta": loss.beta,
            "scale_rewards": "group",
            "learning_rate": optim.learning_rate,
            "lr_scheduler_type": optim.schedule,
            "warmup_steps": round(optim.warmup_ratio * optim.max_steps),
            "adam_beta1": optim.betas[0],
            "adam_beta2": optim.betas[1],
            "adam_epsilon": optim.eps,
            "weight_decay": optim.weight_decay,
            "max_grad_norm": optim.max_grad_norm,
            "max_steps": optim.max_steps,
        },
    }


def their_command(side: str, settings: dict[str, Any], folder: Path, seed: int) -> list[str]:
    """The command of another trainer's run; its settings are written next to the folder of its log."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(settings), encoding="utf-8")
    return [sys.executable, "-m", "benchmarks.sides", side, str(file), str(folder), str(seed)]


class Rollouts:
    """Watches a trainer's own function for rollouts: its seconds, and the tokens that it has sampled."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0

    def watched(
        self, generate: Callable[..., Any], lengths: Callable[[Any], list[int]]
    ) -> Callable[..., Any]:
        """The function; `lengths` reads the completions' lengths off what it returns."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = generate(*args, **kwargs)
            self._tokens += sum(lengths(result))
            self._seconds += time.perf_counter() - started
            return result

        return run

    def take(self) -> dict[str, float]:
        """What has been sampled since the last time, as a log has it."""
        found = {"time/rollout": self._seconds, "tokens": self._tokens}
        self._seconds = 0.0
        self._tokens = 0
        return found


def letters(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward for all sides, which hand texts over differently: no two completions are likely to tie."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(map(ord, text)) % 97 / 97 for text in texts]


def as_rewards(names: Sequence[str], nudge: str, form: str = "xml") -> list[Any]:
    """Rewards, as a config names them, for TRL's completions: texts without the prompt's last words."""
    shipped = built_in(answer_form(form))

    def made(name: str) -> Callable[..., list[float | None]]:
        function = shipped.get(name) or resolve_function(name, key="reward.functions")

        def reward(completions: Sequence[str], **columns: Any) -> list[float | None]:
            columns.pop("prompts", None)
            said = [[{"role": "assistant", "content": nudge + text}] for text in completions]
            return function(said, **columns)

        reward.__name__ = name.rpartition(":")[2]
        return reward

    return [made(name) for name in names]


def evaluation(model: Any, tokenizer: Any, settings: dict[str, Any]) -> dict[str, float]:
    """Greedy completions of the held-out problems: the mean of their rewards, the share of right answers."""
    import torch  # pyright: ignore

    problems = settings["test"]
    form = answer_form(settings["form"], given=settings["nudge"])
    right = 0
    rewards = as_rewards(settings["rewards"], settings["nudge"], settings["form"])
    totals = dict.fromkeys((reward.__name__ for reward in rewards), 0.0)
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
        for reward in rewards:
            totals[reward.__name__] += sum(value or 0.0 for value in reward(texts, answer=golds))
        if form is not None:
            pairs = zip(texts, golds, strict=True)
            right += sum(form.is_right(settings["nudge"] + text, gold) for text, gold in pairs)
    model.train(was_training)
    means = {f"eval/rewards/{name}": total / len(problems) for name, total in totals.items()}
    weighted = sum(map(mul, settings["weights"], means.values()))
    found = {"eval/reward": weighted, **means, "em_subset": len(problems)}
    return found if form is None else {**found, "em": right / len(problems)}


def log_writer(folder: Path) -> Callable[..., None]:
    """A function that appends a line to the log of a run in this folder, with the seconds since the start."""
    folder.mkdir(parents=True)

    def write(**line: Any) -> None:
        line["time/elapsed"] = time.perf_counter() - STARTED
        with (folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return write


def mlx_lm_lora(settings: dict[str, Any], folder: Path, seed: int) -> None:
    """mlx-lm-lora's `train_grpo` on a model as its command line loads it; each step is logged."""
    import mlx.optimizers as optim
    from mlx_lm_lora.trainer import grpo_trainer  # pyright: ignore
    from mlx_lm_lora.utils import from_pretrained  # pyright: ignore

    lora, told = settings["lora"], settings["trl"]
    if lora:
        lora = {**lora, "dropout": 0.0, "num_layers": -1}  # -1: all, as on our side
    model, tokenizer = from_pretrained(settings["model"], lora_config=lora)[:2]
    reference = None
    if told["beta"]:  # without it the loss has no use for one, though the command line loads it all the same
        reference = from_pretrained(settings["model"])[0].freeze()
    mx.random.seed(seed)
    rollouts = Rollouts()
    write = log_writer(folder)
    # The answer is only for rewards that look at it.
    rows = [(each["tokens"], each["tokens"][:1], "prompt", "answer") for each in settings["train"]]

    def batches(**kwargs: Any) -> Iterator[Any]:
        for update, batch in enumerate(grpo_trainer.iterate_grpo_batches(**kwargs), 1):
            mx.reset_peak_memory()
            started = time.perf_counter()
            yield batch  # the step is over when the next batch is asked for
            seconds = time.perf_counter() - started
            peak = {"memory/peak_gb": mx.get_peak_memory() / 1e9}
            write(update=update, step_time=seconds, **peak, **rollouts.take())

    grpo_trainer.generate_grpo = rollouts.watched(
        grpo_trainer.generate_grpo, lambda result: [completion.size for completion in result[0]]
    )
    never = 1_000_000
    grpo_trainer.train_grpo(
        model,
        reference,
        tokenizer,
        optim.AdamW(learning_rate=told["learning_rate"]),
        rows,
        reward_funcs=[letters],  # pyright: ignore
        args=grpo_trainer.GRPOTrainingArgs(
            batch_size=settings["batch_size"],
            iters=told["max_steps"] + 1,
            steps_per_report=never,
            steps_per_eval=never,
            steps_per_save=never,
            adapter_file=str(folder / "adapters.safetensors"),
            group_size=told["num_generations"],
            max_completion_length=told["max_completion_length"],
            beta=told["beta"],
            epsilon=0.2,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        ),
        iterate_batches=batches,
        end_answer_token="",
    )


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


def train(settings: dict[str, Any], folder: Path, seed: int) -> None:
    """TRL's GRPOTrainer with transformers' own generation: one optimizer step a rollout, each logged; float32
    weights, and bfloat16 products on a GPU. `together` of the settings are the learner's rows at a time; by
    default all.
    """
    import torch  # pyright: ignore
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

    on_gpu = torch.cuda.is_available()
    model, tokenizer = opened(settings)
    rows = settings["batch_size"] * settings["trl"]["num_generations"]
    together = min(settings.get("together", rows), rows)
    adapters = None
    lora = settings["lora"]
    if lora:
        from peft import LoraConfig  # pyright: ignore

        alpha = int(lora["rank"] * lora["scale"])
        adapters = LoraConfig(r=lora["rank"], lora_alpha=alpha, target_modules="all-linear")
    usual = {
        "output_dir": str(folder),
        "per_device_train_batch_size": together,
        "gradient_accumulation_steps": rows // together,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "reward_weights": settings["weights"],
        "logging_steps": 1,
        "seed": seed,
    }

    def lengths(result: Any) -> list[int]:
        if on_gpu:
            torch.cuda.synchronize()
        return [len(completion) for completion in result[0]]

    rollouts = Rollouts()
    GRPOTrainer._generate_single_turn = rollouts.watched(GRPOTrainer._generate_single_turn, lengths)
    write = log_writer(folder)
    last = settings["trl"]["max_steps"]

    def evaluated(update: int) -> None:
        write(update=update, **evaluation(trainer.model, tokenizer, settings))

    class Watch(TrainerCallback):
        """Logs every update and evaluates as the config says."""

        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            evaluated(0)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            if time.perf_counter() - STARTED > settings.get("seconds", math.inf):
                control.should_training_stop = True

        def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float], **___: Any) -> None:
            if "reward" not in logs:  # the summary at the end
                return
            taken = {"step_time": time.perf_counter() - self.started, **rollouts.take()}
            if on_gpu:
                taken["memory/peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            write(update=state.global_step, reward=logs["reward"], num_tokens=logs["num_tokens"], **taken)
            if state.global_step != last and not state.global_step % (settings["eval_every"] or last):
                evaluated(state.global_step)

    data = [{"prompt": each["prompt"], "answer": each["answer"]} for each in settings["train"]]
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(**{**usual, **settings["trl"]}),
        reward_funcs=as_rewards(settings["rewards"], settings["nudge"], settings["form"]),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(data),
        peft_config=adapters,
        callbacks=[Watch()],
    )
    trainer.train()
    evaluated(trainer.state.global_step)


def main() -> None:
    """Does what the command line says."""
    side, path, folder, seed = sys.argv[1:]
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    {"train": train, "mlx-lm-lora": mlx_lm_lora}[side](settings, Path(folder), int(seed))


if __name__ == "__main__":
    main()
