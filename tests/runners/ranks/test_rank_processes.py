"""Ranks as real processes, three launches for many properties: equal at every step, and one end for all."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from runners.config.loading import load_config
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.runners.ranks.test_ranks import lines, weights, worst
from tests.support.launching import begin
from tests.support.tiny_runs import small

LETTERS = '''"""How many different characters a completion has; a group may be alike, and is drawn again."""

import zlib


def letters(completions, **_):
    return [float(len(set(completion[0]["content"]))) // 2 for completion in completions]


def sums(completions, **_):
    return [zlib.crc32(completion[0]["content"].encode()) % 97 / 97 for completion in completions]
'''


@pytest.fixture
def write(tmp_path):
    """Writes a config in `tmp_path`; its path."""
    (tmp_path / "letters.py").write_text(LETTERS)

    def make(name: str, **tables) -> Path:
        path = tmp_path / f"{name}.toml"
        settings = {
            "rollout": {"max_new_tokens": 8, "launch": "eval", "check_every": 8, "max_batch": 64},
            "reward": {"functions": ["letters.py:letters"]},
            "optim": {"batch_size": 3, "max_steps": 4, "learning_rate": 1e-3},
            "eval": {"samples": 3, "at_start": False},
            "checkpoint": {"every": 1, "keep_last": 0},
            "log": {"report": False},
            "system": {"compile": False},
        }
        merged = {key: settings.get(key, {}) | tables.get(key, {}) for key in {**settings, **tables}}
        path.write_text(small(run={"name": name, "output_dir": str(tmp_path / "outputs")}, **merged))
        return path

    return make


def norms(folder: Path) -> list[float]:
    """Of the gradients of all updates."""
    return [
        line["grad_norm"] for line in lines(folder, "training_log.jsonl") if line.get("grad_norm") is not None
    ]


def test_four_ranks_are_equal_at_every_update_and_train_as_one(write, tmp_path):
    """Five prompts on four ranks, adapters, two passes of two minibatches, dynamic sampling, and memory that
    runs out on rank 1: the same weights on all ranks after every update, and those of one rank in the end.
    """
    tables = {
        "model": {"tune": "lora", "lora": {"rank": 4, "scale": 8.0}},
        "data": {"source": "embedded"},  # groups vary in both of its rollouts
        "loss": {"dynamic_sampling": True},
        "optim": {"batch_size": 5, "max_steps": 2, "num_iterations": 2, "minibatches": 2},
        "checkpoint": {"every": 2},
    }
    one = run_training(load_config(str(write("one", **tables))), report=Quiet()).folder
    run = begin(4, tmp_path / "ranks", [str(write("four", **tables))], "digests", "memory")
    said = run.end()
    four = one.with_name("four")
    assert (four / "final").is_dir(), said
    digests = [(tmp_path / f"ranks/{rank}.digests").read_text().splitlines() for rank in range(4)]
    assert len(digests[0]) == 8
    assert len(set(digests[0])) == 8
    assert digests == [digests[0]] * 4
    assert " ".join(said.split()).count("the step is taken again in halves") == 1, said
    same = ("batch_step", "prompt", "completion", "reward")
    want, found = lines(one, "completions.jsonl"), lines(four, "completions.jsonl")
    assert [[line[key] for key in same] for line in found] == [[line[key] for key in same] for line in want]
    assert worst(weights(one / "final"), weights(four / "final")) < 1e-5


def test_what_one_rank_gathered_goes_on_with_two_and_sigterm_saves_on_all(write, tmp_path):
    """Saved by one rank between two batch steps of an accumulation, gone on with by two, which SIGTERM to
    rank 1 ends in order, and then by one again: the end of a run that nothing broke off.
    """
    tables = {
        "optim": {"gradient_accumulation_steps": 2, "max_steps": 4},
        "reward": {"functions": ["letters.py:sums"]},  # each batch step has a gradient
        "rollout": {"temperature": 1.5},
    }
    config = write("sums", **tables)
    straight = run_training(load_config(str(config)), report=Quiet()).folder
    want, texts = weights(straight / "final"), (straight / "completions.jsonl").read_bytes()
    norms_of_straight = norms(straight)
    options = [str(config), "--resume", str(straight / "checkpoint-1")]
    log = straight / "completions.jsonl"
    run = begin(2, tmp_path / "ranks", options)
    assert run.wait_until(lambda: log.read_bytes().count(b"\n") == 24), run.said()  # two batch steps
    pid = run.pid(1)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    said = run.end()
    assert "checkpoint-1" in said
    assert "interrupted" in said, said
    assert said.count("to go on:") == 1  # rank 0 speaks alone
    end = run_training(load_config(str(config)), report=Quiet(), resume=True).folder
    assert worst(weights(end / "final"), want) < 1e-5
    assert (end / "completions.jsonl").read_bytes() == texts
    assert norms(end) == pytest.approx(norms_of_straight, rel=1e-4)


def test_a_file_that_one_rank_lacks_is_one_line_that_names_it(write, tmp_path):
    """Rank 1 has no such data: one line with the rank, its host and the file, and nothing is trained."""
    config = write("missing", data={"source": "embedded"})
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as data:  # a longer path is cut in the line
        for rank, folder in enumerate((Path(data, "0"), Path(data, "1"))):
            folder.mkdir()
            if rank == 0:
                rows = '{"question": "1 + 1", "answer": "2"}\n' * 8
                (folder / "train.jsonl").write_text(rows)
                (folder / "valid.jsonl").write_text(rows)
        options = [str(config), "--set", f"data.source={data}/{{rank}}/train.jsonl"]
        run = begin(2, tmp_path / "ranks", options)
        said = run.end()
    told = [line for line in said.splitlines() if "no such file or folder" in line]
    assert len(told) == 1, said
    assert told[0].startswith(f"rank 1 ({os.uname().nodename}): ")
    assert f"{data}/1/train.jsonl" in told[0]
    assert not list((tmp_path / "outputs").glob("*/training_log.jsonl"))
    assert "Node with rank 1 exited with code 2" in said
    assert "Node with rank 0 exited with code" in said  # 2, or -15: the launcher may be faster than its end
