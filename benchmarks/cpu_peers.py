"""Generation, evaluation and a LoRA step on a CPU against transformers and peft, on the real model.

The model is the one in the folder GRPO_REAL_MODEL. Both sides get the same tokens, 8 rows at a time, in one
process, in turn. *generate* draws 64 tokens a row at temperature 1, *eval* takes the likeliest ones and
decodes them; no row ends early. *LoRA step* is a gradient and an AdamW update of rank-8 adapters on 2
prompts × 4 completions. The other side is transformers' `generate`, and a policy-gradient loss in PyTorch
with peft's adapters on all linear layers, as TRL's loss with one update a rollout; what TRL's trainer does
around it is not counted. Its weights are in float32, and again in bfloat16; ours are float32, as the commands
load them on a CPU.

**What limits it.** Where the processor multiplies bfloat16 itself (AVX512-BF16 or AMX), PyTorch in bfloat16
reads half of the bytes a token, and generates faster than float32 can.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import mlx.core as mx
import numpy as np

import grpo_fn as g
from benchmarks.first_update import REAL, REAL_MODEL, Case, write_run
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.machine import backend
from benchmarks.harness.measure import Call, interleaved
from benchmarks.harness.record import Figure, ratio_figure, time_figure
from runners.config.loading import load_config
from runners.data.prompts import Example
from runners.data.stream import drawn
from runners.errors import UserError
from runners.inference.inference_model import load_inference
from runners.inference.text_generation import sample_batches
from runners.machine.startup import prepare
from runners.profiling import Stepping
from runners.telemetry.diary import Diary
from runners.telemetry.report import Report
from runners.training.setup import Run, SetUp
from runners.training.steps import experience, gradients, learn, propose, update

DTYPES = ("float32", "bfloat16")
RANK, TARGET = 8, 1.5
LORA = ("model.tune=lora", f"model.lora={{rank={RANK}}}")


def opened(path: str, dtype: str) -> Any:
    """transformers' model, which never ends a row by itself."""
    import torch  # pyright: ignore
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def padded(rows: Sequence[Sequence[int]], *, left: bool) -> tuple[Any, Any]:
    """Token ids and attention mask of rows of any lengths."""
    import torch  # pyright: ignore

    width = max(map(len, rows))
    fill = [[0] * (width - len(row)) for row in rows]
    pairs = list(zip(rows, fill, strict=True))
    ids = [[*pad, *row] if left else [*row, *pad] for row, pad in pairs]
    mask = [
        [0] * len(pad) + [1] * len(row) if left else [1] * len(row) + [0] * len(pad) for row, pad in pairs
    ]
    return torch.tensor(ids), torch.tensor(mask)


def sampling_calls(
    path: str, examples: Sequence[Example], new: int, *, temperature: float
) -> dict[str, Call]:
    """The same completions' work on all sides, texts included."""
    import torch  # pyright: ignore

    ours = load_inference(path, prepare())
    sampling = g.Sampling(max_new_tokens=new, temperature=temperature)

    def mine() -> list[str]:
        batches = sample_batches(ours.engine, examples, sampling, key=mx.random.key(0), decoder=ours.decoder)
        done = list(batches)
        if any(length != new for batch in done for length in batch.lengths):
            raise UserError("a row ended early")
        return [text for batch in done for text in batch.texts]

    def theirs(model: Any) -> list[str]:
        ids, mask = padded([list(example.tokens) for example in examples], left=True)
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if temperature else {}
        with torch.no_grad():
            found = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=new, **({"do_sample": False} | how)
            )
        if found.shape[1] != ids.shape[1] + new:
            raise UserError("transformers ended early")
        return ours.tokenizer.batch_decode(found[:, ids.shape[1] :].tolist())

    models = {dtype: opened(path, dtype).eval() for dtype in DTYPES}
    calls: dict[str, Call] = {"ours": lambda: mine() and None}
    for dtype, model in models.items():
        calls[dtype] = lambda model=model: theirs(model) and None
    return calls


def step_calls(run: Run, path: str) -> dict[str, Call]:
    """A gradient and an update on the same rows."""
    import torch  # pyright: ignore
    from peft import LoraConfig, get_peft_model  # pyright: ignore

    stepping = Stepping(run, Diary(Report()))
    plan = stepping.plan
    found = experience(plan, plan.engine, propose(plan, stepping.state))
    examples, generations = found.examples, found.rollout.num_generations
    values = np.random.default_rng(0).normal(size=(len(examples), generations)).astype(np.float32)
    found = attrs.evolve(found, advantages_pg=mx.array(values))

    def mine() -> Any:
        state, _ = update(plan, gradients(plan, learn(plan, stepping.state, found)))
        return state.train.params

    prompts = [list(examples[row // generations].tokens) for row in range(values.size)]
    completions = [list(tokens) for tokens in found.rollout.completions()]
    ids, mask = padded([p + c for p, c in zip(prompts, completions, strict=True)], left=False)
    counted = torch.zeros(ids.shape)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        counted[row, len(prompt) : len(prompt) + len(completion)] = 1.0
    counted, advantages = counted[:, 1:], torch.tensor(values).reshape(-1, 1)
    first = min(map(len, prompts)) - 1

    def peer(dtype: str) -> Call:
        adapters = LoraConfig(r=RANK, lora_alpha=10 * RANK, target_modules="all-linear")
        model = get_peft_model(opened(path, dtype), adapters)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)

        def theirs() -> None:
            keep = ids.shape[1] - first
            logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits[:, :-1].float()
            logp = torch.log_softmax(logits, -1).gather(-1, ids[:, first + 1 :, None])[..., 0]
            weight = counted[:, first:]
            loss = -((logp - logp.detach()).exp() * advantages * weight).sum() / weight.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return theirs

    return {"ours": mine, **{dtype: peer(dtype) for dtype in DTYPES}}


def figures(title: str, calls: dict[str, Call], repeats: int, tokens: int, judged: bool) -> list[Figure]:
    """Every side's time and tokens/s, and the others' times over ours."""
    say(f"cpu_peers: {title}")
    timings = interleaved(calls, repeats=repeats)
    found = []
    for side, timing in timings.items():
        name = side if side == "ours" else f"PyTorch, {side}"
        rate = Figure(name=f"{title}: rate, {name}", value=tokens / timing.median, unit="tokens/s")
        found += [time_figure(f"{title}: time, {name}", timing), rate]
        if side != "ours":
            target = TARGET if judged else None
            found.append(ratio_figure(f"{title}: {name} / ours", timing / timings["ours"], at_least=target))
    return found


@benchmark("cpu_peers")
@click.option("--repeats", default=3, show_default=True, help="Rounds that are timed.")
def main(quick: bool, repeats: int) -> Iterator[list[Figure]]:
    """`grpo generate`, `grpo eval` and one LoRA step of the real model on a CPU, against transformers."""
    absent = [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]
    if backend() != "cpu" or absent or not (quick or os.environ.get(REAL_MODEL)):
        why = (
            f"{absent[0]} is not here" if absent else f"it is for a CPU and the model that {REAL_MODEL} names"
        )
        say(f"cpu_peers: skipped, as {why}")
        return
    repeats, new = (1, 8) if quick else (repeats, 64)
    case = Case(model="tiny" if quick else REAL, prompts=2, generations=4, new=new)
    with tempfile.TemporaryDirectory(prefix="cpu-peers-") as name:
        write_run(Path(name), case)
        path = str(Path(name) / "model") if quick else os.environ[REAL_MODEL]
        own = (f"data.source={name}/rows.jsonl", f"run.output_dir={name}/out")
        reward = f'reward.functions=["{name}/letters.py:letters"]'
        run = SetUp(load_config(f"{name}/train.toml", [*LORA, *own, reward]).check(), prepare(), say).build()
        examples = drawn(run.order, 0, 8).examples
        for title, temperature in (("generate", 1.0), ("eval", 0.0)):
            calls = sampling_calls(path, examples, new, temperature=temperature)
            yield figures(title, calls, repeats, 8 * new, not quick)
        yield figures("LoRA step", step_calls(run, path), repeats, 8 * new, not quick)


if __name__ == "__main__":
    os.environ["GRPO_FN_TORCH"] = "1"  # transformers finds it
    main()
