"""Defines `grpo init`, which inspects a model and a data set, and writes a config for them."""

from pathlib import Path

import click

from runners.commands.base import command, option
from runners.errors import UserError, listed
from runners.machine.terminal import echo


@command(
    "init",
    click.argument("model"),
    click.argument("data"),
    option("--out=FILE", "File for the new config.", default="train.toml", show_default=True),
    option("--question=COLUMN", "Column with questions or messages [found by name].", default=""),
    option("--answer=COLUMN", "Column with reference answers [found by name].", default=""),
    notes="""\
\b
Examples:
  grpo init Qwen/Qwen2.5-0.5B-Instruct rows.jsonl
  grpo init Qwen/Qwen2.5-0.5B-Instruct table.csv --question Frage --answer Antwort
  grpo init embedded embedded --out toy.toml

\b
The config depends on the model's size, bits and chat template, and on the data: the columns with
questions and answers, and the format of the answers (numbers after ####, \\boxed{}, numbers,
letters, labels, or none).
""",
)
def init_command(model: str, data: str, out: str, question: str, answer: str) -> None:
    """Write a config for a model and a data set.

    MODEL is a model folder, a Hub name or "embedded"; DATA is a file, a folder, a Hub name or "embedded".
    Existing files are not replaced.
    """
    target = Path(out).expanduser()
    if target.exists():
        raise UserError(f"--out {out}: expected the name of a new file, found an existing one")
    from runners.machine import startup

    startup.prepare()
    from runners.drafting import REWARD, draft, survey_data, survey_model
    from runners.files.durable import save_text
    from runners.machine.memory_readings import usable_memory

    found = survey_data(data, question, answer)
    about = survey_model(model)
    echo(f"model    {about[0]}")
    echo(f"columns  {listed(found.columns)}")
    echo(f"data     {found.prompt or found.question} → {found.answer or 'no answers'}: {found.why}")
    rewards = target.with_name(f"{target.stem}_reward.py")
    text = draft(model, data, about, found, reward=rewards.name, memory=usable_memory())
    if not found.answer:
        echo(
            "         --answer sets the column with reference answers, --question the column "
            "with questions"
        )
    if found.form == "none" and not rewards.exists():
        save_text(rewards, REWARD)
        echo(f"written  {rewards}, an example reward; replace it with your own")
    save_text(target, text)
    echo(f"written  {target}")
    echo(f"next     grpo check {out} --sample 4, then grpo-run {out}")
