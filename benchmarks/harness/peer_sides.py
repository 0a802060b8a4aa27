"""One side of `peers`, in a process of its own: a trainer's own loop, held before each step until told to go.

    python -m benchmarks.harness.peer_sides ours|mlx-lm-lora|trl SETTINGS.json

Each line on stdin lets one step happen; after it, a line of JSON on stdout says what it took. The first line
on stdout, before any step, says that all is loaded. What the trainers print goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

RANK, SCALE = 8, 10.0  # of LoRA, on both sides


@attrs.frozen(kw_only=True)
class Settings:
    """What both sides do; `prompts` and `answers`, which ours tells when it is ready, are for theirs."""

    folder: str  # of the model
    work: str  # a folder for data, logs and adapters
    tune: str  # "full" | "lora"
    batch_size: int  # prompts a step
    generations: int
    max_new_tokens: int
    beta: float
    learning_rate: float = 1e-5
    overrides: list[str] = attrs.field(factory=list)  # SECTION.KEY=VALUE, of our config
    peer: dict[str, Any] = attrs.field(factory=dict)  # settings of TRL's GRPOConfig
    prompts: list[list[int]] = attrs.field(factory=list)  # token ids
    config: str = ""  # a packaged config of ours, in place of one with the settings above
    rewards: list[str] = attrs.field(factory=list)  # shipped ones; none: `letters`
    answers: list[str] = attrs.field(factory=list)  # of the prompts, for the shipped rewards
    nudge: str = ""  # the end of each prompt, which those rewards read as part of the completion


class Done(Exception):
    """There will be no further step."""


@attrs.frozen
class Memory:
    """How a side tells the most memory that its arrays have taken on the device since the last reset."""

    peak: Callable[[], int] = mx.get_peak_memory  # bytes
    reset: Callable[[], None] = mx.reset_peak_memory


class Gate:
    """Stands between two steps: reports the one that has ended, and waits for the word to begin the next."""

    def __init__(self, out: int, ready: dict[str, Any], memory: Memory | None = None) -> None:
        self._out, self._message, self._memory = out, ready, memory or Memory()
        self._started = self.rollout = 0.0  # seconds
        self.rollout_peak = 0  # bytes
        self.tokens = self.rows = 0  # of the step's completions

    def turn(self) -> None:
        """To be called by a trainer's loop whenever it asks for prompts.

        Raises:
            Done: stdin has ended.
        """
        if self._started:
            usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._message = {
                "seconds": time.perf_counter() - self._started,
                "rollout": self.rollout,
                "tokens": self.tokens,
                "rows": self.rows,
                "peak": max(self.rollout_peak, self._memory.peak()),
                "rollout_peak": self.rollout_peak,
                "rest_peak": self._memory.peak(),
                "resident": usage * (1 if sys.platform == "darwin" else 1024),
            }
        os.write(self._out, (json.dumps(self._message) + "\n").encode())
        if not sys.stdin.readline():
            raise Done
        self._memory.reset()
        self.rollout, self.tokens, self.rows, self.rollout_peak = 0.0, 0, 0, 0
        self._started = time.perf_counter()

    def timed(self, generate: Callable[..., Any], lengths: Callable[[Any], list[int]]) -> Callable[..., Any]:
        """The trainer's own function for rollouts, watched."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = generate(*args, **kwargs)
            self.rollout += time.perf_counter() - started
            self.rollout_peak = max(self.rollout_peak, self._memory.peak())
            self._memory.reset()
            found = lengths(result)
            self.tokens += sum(found)
            self.rows += len(found)
            return result

        return run


def letters(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward for both sides, which hand texts over differently: no two completions are likely to tie."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(map(ord, text)) % 97 / 97 for text in texts]


def ours(settings: Settings, out: int) -> None:
    """`grpo-run` with a config, its prompts behind the gate."""
    from runners.config.loading import load_config
    from runners.training import rollout, train
    from runners.training.setup import SetUp

    work = Path(settings.work)
    config = settings.config or str(work / "train.toml")
    (work / "train.toml").write_text(
        f"""
        [run]
        output_dir = "{work}"
        overwrite = true
        [model]
        path = "{settings.folder}"
        tune = "{settings.tune}"
        lora = {{rank = {RANK}, scale = {SCALE}}}
        [data]
        source = "{work}"
        system_prompt = ""
        nudge = ""
        [rollout]
        num_generations = {settings.generations}
        max_new_tokens = {settings.max_new_tokens}
        [reward]
        functions = ["benchmarks.harness.peer_sides:letters"]
        [loss]
        beta = {settings.beta}
        [optim]
        learning_rate = {settings.learning_rate}
        schedule = "constant"
        warmup_ratio = 0.0
        batch_size = {settings.batch_size}
        max_steps = 1000000
        [eval]
        at_start = false
        [checkpoint]
        every = 0
        """
    )
    build = SetUp.build

    def gated(self: SetUp) -> Any:
        run = build(self)
        prompts = [list(example.tokens) for example in run.order.examples]
        answers = [example.answer for example in run.order.examples]
        gate = Gate(out, {"ready": True, "prompts": prompts, "answers": answers})
        rollout.generate = gate.timed(rollout.generate, lambda rollout: rollout.lengths_b.tolist())
        propose = train.propose

        def at_the_gate(plan: Any, state: Any) -> Any:
            gate.turn()
            return propose(plan, state)

        train.propose = at_the_gate
        return run

    SetUp.build = gated
    train.run_training(load_config(config, settings.overrides))


def mlx_lm_lora(settings: Settings, out: int) -> None:
    """mlx-lm-lora's `train_grpo` on a model as its command line loads it, its batches behind the gate."""
    import mlx.optimizers as optim
    from mlx_lm_lora.trainer import grpo_trainer  # pyright: ignore
    from mlx_lm_lora.utils import from_pretrained  # pyright: ignore

    lora = {"rank": RANK, "scale": SCALE, "dropout": 0.0, "num_layers": -1}  # -1: all, as on our side
    model, tokenizer = from_pretrained(
        settings.folder, lora_config=lora if settings.tune == "lora" else None
    )[:2]
    reference = None
    if settings.beta:  # without it the loss has no use for one, though the command line loads it all the same
        reference = from_pretrained(settings.folder)[0].freeze()
    gate = Gate(out, {"ready": True})
    # The answer is only for rewards that look at it.
    rows = [(tokens, tokens[:1], "prompt", "answer") for tokens in settings.prompts]

    def batches(**kwargs: Any) -> Iterator[Any]:
        for batch in grpo_trainer.iterate_grpo_batches(**kwargs):
            gate.turn()
            yield batch

    grpo_trainer.generate_grpo = gate.timed(
        grpo_trainer.generate_grpo, lambda result: [completion.size for completion in result[0]]
    )
    never = 1_000_000
    grpo_trainer.train_grpo(
        model,
        reference,
        tokenizer,
        optim.AdamW(learning_rate=settings.learning_rate),
        rows,
        reward_funcs=[letters],  # pyright: ignore
        args=grpo_trainer.GRPOTrainingArgs(
            batch_size=settings.batch_size,
            iters=never,
            steps_per_report=never,
            steps_per_eval=never,
            steps_per_save=never,
            adapter_file=str(Path(settings.work) / "adapters.safetensors"),
            group_size=settings.generations,
            max_completion_length=settings.max_new_tokens,
            beta=settings.beta,
            epsilon=0.2,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        ),
        iterate_batches=batches,
        end_answer_token="",
    )


def trl(settings: Settings, out: int) -> None:
    """TRL's GRPOTrainer with transformers' own generation, float32 weights, and bfloat16 products on a GPU.

    Eight rows at a time in the learner, unless the settings say otherwise; one optimizer step a rollout.
    """
    import torch  # pyright: ignore
    from datasets import Dataset
    from peft import LoraConfig  # pyright: ignore
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

    from benchmarks.evidence.trl_side import as_rewards

    on_gpu = torch.cuda.is_available()
    memory = Memory(torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats) if on_gpu else None
    gate = Gate(out, {"ready": True}, memory or Memory(lambda: 0, lambda: None))
    tokenizer = AutoTokenizer.from_pretrained(settings.folder)
    texts = [tokenizer.decode(tokens) for tokens in settings.prompts]
    model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=torch.float32)
    rows = settings.batch_size * settings.generations
    together = min(8, rows)

    class Held(TrainerCallback):
        """Waits at the gate before each step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            gate.turn()

    options = {
        "output_dir": settings.work,
        "per_device_train_batch_size": together,
        "gradient_accumulation_steps": rows // together,
        "num_generations": settings.generations,
        "max_completion_length": settings.max_new_tokens,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "beta": settings.beta,
        "max_steps": 1_000_000,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        **settings.peer,
    }
    adapters = LoraConfig(r=RANK, lora_alpha=int(RANK * SCALE), target_modules="all-linear")
    rewards: Any = as_rewards(settings.rewards, settings.nudge) if settings.rewards else letters
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(**options),
        reward_funcs=rewards,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": texts, "answer": settings.answers}),
        peft_config=adapters if settings.tune == "lora" else None,
        callbacks=[Held()],
    )

    def lengths(result: Any) -> list[int]:
        if on_gpu:
            torch.cuda.synchronize()
        return [len(completion) for completion in result[0]]

    trainer._generate_single_turn = gate.timed(trainer._generate_single_turn, lengths)
    trainer.train()


SIDES = {"ours": ours, "mlx-lm-lora": mlx_lm_lora, "trl": trl}


def main() -> None:
    """Runs the side that the command line names."""
    side, path = sys.argv[1:]
    out = os.dup(1)
    os.dup2(2, 1)  # stdout is for the reports alone
    settings = Settings(**json.loads(Path(path).read_text()))
    with contextlib.suppress(Done):
        SIDES[side](settings, out)


if __name__ == "__main__":
    # The module under its own name as well: the reward is looked up there.
    main()
