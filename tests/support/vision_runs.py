"""A tiny vision-language model, pictures with questions about them, and a config that trains on both."""

import json
from pathlib import Path
from typing import Any

from runners.files.toml_files import toml_text
from tests.support.vision_models import make_vision_folder, write_picture

REWARD = '''"""A reward that random text earns more or less of; it keeps the images that it is given."""

SEEN = []


def letters(completions, image, **_):
    SEEN.extend(image)
    return [float(len(set(completion[0]["content"]))) for completion in completions]
'''
CONFIG: dict[str, dict[str, Any]] = {
    "run": {"name": "seeing"},
    "model": {"path": "model", "tune": "lora", "lora": {"rank": 4, "scale": 8.0}},
    "data": {"source": "train.jsonl", "image": "image", "system_prompt": "Look.", "nudge": ""},
    "answer": {"form": "xml"},
    "rollout": {"num_generations": 3, "max_new_tokens": 8, "launch": "eval"},
    "reward": {"functions": ["letters.py:letters"]},
    "optim": {"learning_rate": 5e-3, "batch_size": 2, "max_steps": 2},
    "eval": {"samples": 2},
    "checkpoint": {"every": 1},
    "system": {"compile": False},  # two updates: compiling would take longer
}


def write_vision_data(folder: Path) -> None:
    """train.jsonl: 11 questions, about one picture, two or none, in sizes of 2 × 3 to 4 × 4 tokens; pics/."""
    rows = []
    for number in range(11):
        write_picture(
            folder / f"pics/{number}.png", 16 + 8 * (number % 3), 24 + 8 * (number % 2), seed=number
        )
        image: Any = f"pics/{number}.png"
        if number % 4 == 3:
            image = None
        if number % 5 == 1:
            image = [image, "pics/0.png"] if image else ["pics/0.png"]
        rows.append({"question": f"How many rolls? {number}", "answer": str(number), "image": image})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text)
    (folder / "letters.py").write_text(REWARD)


def write_vision_run(folder: Path, family: str = "qwen2_vl", **tables: dict[str, Any]) -> Path:
    """The model, the data and a config, whose path is returned; `tables` replace keys of CONFIG's.

    Model and data are made where the folder has neither.
    """
    if not (folder / "model").exists() and not (folder / "train.jsonl").exists():
        make_vision_folder(folder / "model", family)
        write_vision_data(folder)
    merged = {name: CONFIG.get(name, {}) | tables.get(name, {}) for name in {**CONFIG, **tables}}
    merged["run"] = {"output_dir": str(folder / "outputs")} | merged["run"]
    path = folder / f"{merged['run']['name']}.toml"
    path.write_text(toml_text(merged))
    return path
