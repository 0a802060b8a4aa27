"""Files as nobody means them: mutated and invented, through the functions that read them.

    python -m tests.campaigns.fuzz --inputs 10000 [--target NAME] [--seed N]

Whatever a file holds, reading it gives a value or a UserError: any other exception, a crash, more than five
seconds, or a file touched outside of the input's own folder is a failure. Each kind of file is read in a
process of its own, so that one which MLX or Python cannot survive is found too, with the input that did it.
The long form has 100,000 inputs. Those of chat templates need a process each, and so are a tenth as many as
the others'; `--jobs` shares them out among cores.
"""

from __future__ import annotations

import argparse
import contextlib
import copyreg
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from runners.machine.startup import load_blas

load_blas()

from runners.checkpoints.manifest import MANIFEST, write_manifest  # noqa: E402
from runners.checkpoints.trainer_state import VERSION  # noqa: E402
from runners.errors import UserError  # noqa: E402
from tests.campaigns.fuzz_families import FAMILIES  # noqa: E402
from tests.campaigns.fuzz_inputs import JSON, FolderTarget, Target, changed_json, dumped, mutated, packed  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SLOWER = 10  # inputs of a fast target for one of a target whose inputs need a process each
SECONDS = 5.0  # for one input
MEMORY = 8 << 30  # bytes of a process's address space
_WRITING = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate")
_RUNNING = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
    "socket.getaddrinfo",
)


class Toml(Target):
    """Configs: the packaged ones mutated, and known keys with any values."""

    def inputs(self) -> st.SearchStrategy[Any]:
        from runners.config.flat_keys import FLAT_KEYS
        from runners.config.loading import KEYS

        valid = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.toml"))]
        names = sorted(
            {".".join(key).replace("*", "x") for key in KEYS} | set(FLAT_KEYS) | {"stop.when", "nonsense"}
        )
        scalar = JSON.map(lambda value: json.dumps(value).encode("utf-8", "replace"))
        line = st.tuples(st.sampled_from(names).map(str.encode), scalar).map(b" = ".join)
        return mutated(valid) | st.lists(line, max_size=4).map(
            lambda rows: b'model.path = "embedded"\n' + b"\n".join(rows)
        )

    def feed(self, value: bytes) -> None:
        from runners.config.loading import load_config

        (self.folder / "train.toml").write_bytes(value)
        load_config(str(self.folder / "train.toml")).check()

    def warm(self) -> None:
        self.feed(b'model.path = "embedded"\n')


class Rows(Target):
    """Data files of each format, whole and row by row."""

    def inputs(self) -> st.SearchStrategy[Any]:
        import pyarrow
        import pyarrow.parquet

        rows = [{"question": f"What is {i}?", "answer": f"#### {i}", "level": i} for i in range(4)]
        lines = b"\n".join(map(dumped, rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), self.folder / "made.parquet")
        parquet = (self.folder / "made.parquet").read_bytes()
        csv = b"question,answer\r\n" + b"".join(b'"What is %d?",%d\r\n' % (i, i) for i in range(4))
        any_rows = st.lists(changed_json(rows[0]), max_size=4)
        return st.one_of(
            st.tuples(st.just("jsonl"), mutated([lines])),
            st.tuples(st.just("jsonl"), any_rows.map(lambda found: b"\n".join(map(dumped, found)))),
            st.tuples(st.just("json"), mutated([dumped(rows), lines]) | any_rows.map(dumped)),
            st.tuples(st.just("csv"), mutated([csv])),
            st.tuples(st.just("parquet"), mutated([parquet])),
        )

    def feed(self, value: tuple[str, bytes]) -> None:
        from runners.config.sections import DataConfig
        from runners.data.datasets import load_rows
        from runners.data.prompts import reward_columns

        path = self.folder / f"rows.{value[0]}"
        path.write_bytes(value[1])
        with contextlib.suppress(UserError):
            load_rows(DataConfig(source=str(path)))
        reward_columns(load_rows(DataConfig(source=str(path), on_bad_row="skip"))[0])

    def warm(self) -> None:
        self.feed(("jsonl", b'{"question": "1", "answer": 2}\n' * 3))


class Weights(FolderTarget):
    """A model folder whose safetensors header, or config.json, or index has been changed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from tests.support.tiny_models import make_model_folder

        self.place = make_model_folder(folder / "model")
        self.keep()

    def inputs(self) -> st.SearchStrategy[Any]:
        index = {"metadata": {}, "weight_map": {"a": "model.safetensors"}}
        return st.one_of(
            self.mutated("model.safetensors"),
            self.few_changed("model.safetensors"),
            self.changed("config.json", json.loads(self.kept["config.json"])),
            self.changed("model.safetensors.index.json", index),
        )

    def read(self) -> None:
        from runners.models.folders import resolve_model
        from runners.models.model_reader import read_model

        read_model(resolve_model(str(self.place)))


class Checkpoint(FolderTarget):
    """trainer_state.json, the manifest, and the header of optimizer.safetensors of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import mlx.core as mx

        import grpo_fn as g
        from runners.checkpoints.state_files import STATE_FILE, pack_state
        from runners.files.tensor_files import save_arrays
        from runners.training.run_state import RunState

        self.place = folder / "run" / "checkpoint-1"
        self.place.mkdir(parents=True)
        params = {"a": {"weight": mx.ones((3, 2))}, "b": [mx.zeros((4,))]}
        state = g.init_state(params, g.adamw(0.1), key=mx.random.key(0))
        weights = {"a.weight": params["a"]["weight"]}
        save_arrays(self.place / "model.safetensors", weights, {"format": "mlx"})
        run = RunState(train=state, batch_step=1, update=1, scores=(0.5,))
        save_arrays(self.place / STATE_FILE, *pack_state(state, weights, run.trees()))
        tables = {name: {} for name in ("config", "inputs", "arithmetic", "logs")}
        decided = {"launch": "eval", "max_batch": 1}
        self.facts = {
            "version": VERSION,
            "step": 1,
            "em": 0.25,
            "eval_reward": 0.5,
            "reward": 1.5,
            "data": "x",
        }
        self.facts |= tables | {"decided": decided, "loop": run.plain()}
        (self.place / "trainer_state.json").write_bytes(dumped(self.facts))
        write_manifest(self.place)
        self.keep()

    def inputs(self) -> st.SearchStrategy[Any]:
        header, body = self.header("optimizer.safetensors")
        structure = json.loads(header["__metadata__"]["structure"])

        def with_structure(structure: Any) -> bytes:
            metadata = {**header["__metadata__"], "structure": json.dumps(structure)}
            return packed({**header, "__metadata__": metadata}, body)

        return st.one_of(
            self.changed("trainer_state.json", self.facts),
            self.mutated("trainer_state.json"),
            self.mutated("optimizer.safetensors"),
            st.tuples(st.just("optimizer.safetensors"), changed_json(structure).map(with_structure)),
            self.changed(MANIFEST, json.loads(self.kept[MANIFEST])),
        )

    def read(self) -> None:
        from runners.checkpoints.resume import find_origin
        from runners.checkpoints.run_folder import list_checkpoints
        from runners.checkpoints.state_files import load_trees
        from runners.checkpoints.trainer_state import read_trainer_state
        from runners.checkpoints.writing import prune_checkpoints
        from runners.training.run_state import restore_state

        prune_checkpoints(self.folder / "run", keep_last=1, keep_best=1)
        assert list_checkpoints(self.folder / "run") == [self.place]
        with contextlib.suppress(UserError):
            find_origin(self.folder / "run", None, str)
        train, trees = load_trees(self.place)
        restore_state(read_trainer_state(self.place).loop, trees, train, "trainer_state.json")


class Prompt(Target):
    """grpo_prompt.json in a model folder."""

    def inputs(self) -> st.SearchStrategy[Any]:
        self.warm()
        valid = (self.folder / "grpo_prompt.json").read_bytes()
        return mutated([valid]) | changed_json(json.loads(valid)).map(dumped)

    def feed(self, value: bytes) -> None:
        from runners.tokenization.prompt_settings import read_prompt

        (self.folder / "grpo_prompt.json").write_bytes(value)
        found = read_prompt(self.folder)
        assert found is not None
        found.sections()

    def warm(self) -> None:
        from runners.config.loading import load_config
        from runners.tokenization.prompt_settings import PromptSettings, write_prompt

        settings = PromptSettings.of(load_config("quickstart").to_dict())
        write_prompt(self.folder, settings)
        self.feed((self.folder / "grpo_prompt.json").read_bytes())


_STATE = {
    "name": "n",
    "pat_str": "[a-z]+|.",
    "mergeable_ranks": {bytes([i]): i for i in range(256)},
    "special_tokens": {"<|bos|>": 256},
}


class Tokenizer(Target):
    """tokenizer.pkl: real ones mutated, and opcodes in any order around the names that are admitted."""

    def inputs(self) -> st.SearchStrategy[Any]:
        valid = [_pickled(_STATE, protocol) for protocol in (4, 5)]
        pieces = st.sampled_from(
            [
                *(bytes([code]) for code in range(256)),
                b"ctiktoken.core\nEncoding\n",
                b"c_codecs\nencode\n",
                b"cos\nsystem\n",
                b"\x8c\x02os\x8c\x06system\x93",
                b"U\x09touch ran\x85R",
                b")\x81",
                b"}b",
                b"h\x00\x86\x94",
                b"r\xff\xff\xff\xff",
                b"S'latin1'\n",
                b"\x8c\x06latin1",
            ]
        )
        return mutated(valid) | st.lists(pieces, max_size=20).map(
            lambda parts: b"\x80\x04" + b"".join(parts) + b"."
        )

    def feed(self, value: bytes) -> None:
        from runners.tokenization.tokenizer_pickle import read_encoding

        (self.folder / "tokenizer.pkl").write_bytes(value)
        read_encoding(self.folder / "tokenizer.pkl")

    def warm(self) -> None:
        self.feed(_pickled(_STATE, 4))


TARGETS: dict[str, type[Target]] = {
    "toml": Toml,
    "rows": Rows,
    "weights": Weights,
    "checkpoint": Checkpoint,
    "tokenizer": Tokenizer,
    "prompt": Prompt,
    **FAMILIES,
}


class _Encoding:
    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (_Encoding,), self.state


def _pickled(state: Any, protocol: int) -> bytes:
    """A pickle of tiktoken's Encoding with this state."""
    module, name = _Encoding.__module__, _Encoding.__qualname__
    data = pickle.dumps(_Encoding(state), protocol)
    old = b"\x8c" + bytes([len(module)]) + module.encode() + b"\x94\x8c" + bytes([len(name)]) + name.encode()
    # Without its frame, whose length would be another: frames are optional.
    return (data[:2] + data[11:]).replace(old, b"\x8c\x0dtiktoken.core\x94\x8c\x08Encoding")


class Watchdog:
    """Notes every file that is written, made or removed outside of a folder, and all that is run but the
    processes in which a tokenizer is tried."""

    def __init__(self, folder: Path) -> None:
        self.allowed = (str(folder.resolve()), "/dev/", str(ROOT / ".hypothesis"))
        self.found: list[str] = []
        self.on = False
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _RUNNING:
            if event == "subprocess.Popen" and "first_use:first_use" in repr(arguments[1]):
                return
            self.found.append(f"{event} {arguments!r:.200}")
        elif event in _WRITING:
            path, *rest = arguments
            if not isinstance(path, str | bytes | os.PathLike):
                return
            if event == "open" and not _writes(rest):
                return
            whole = os.path.realpath(os.fsdecode(path))
            if not whole.startswith(self.allowed) and "__pycache__" not in whole:
                self.found.append(f"{event} {whole}")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block; what was found is an error at its end."""
        self.found, self.on = [], True
        try:
            yield
        finally:
            self.on = False
        if self.found:
            raise AssertionError(f"outside of the folder: {self.found}")


def _writes(rest: list[Any]) -> bool:
    mode, flags = (*rest, None, None)[:2]
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


class TooLong(BaseException):
    """An input took too long; no Exception, as those of other people's code become a UserError."""


def _too_long(*_: object) -> None:
    raise TooLong


def run_target(name: str, inputs: int, number: int, folder: Path) -> None:
    """Feeds so many inputs to one target, in this process; raises at the first that fails, made small."""
    place = folder / "input"
    place.mkdir(parents=True)
    os.environ["GRPO_FN_CACHE"] = str(folder / "cache")
    last = folder / "last"
    counts = {"taken": 0, "refused": 0}
    target = TARGETS[name](place)
    strategy = target.inputs()
    target.warm()
    watchdog = Watchdog(folder)
    signal.signal(signal.SIGALRM, _too_long)

    @seed(number)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(strategy)
    def feed(value: Any) -> None:
        last.write_bytes(repr(value).encode("utf-8", "backslashreplace"))
        signal.setitimer(signal.ITIMER_REAL, SECONDS * target.patience)
        try:
            with watchdog.watching():
                target.feed(value)
            counts["taken"] += 1
        except UserError as error:
            assert str(error).strip() and "Traceback" not in str(error)
            counts["refused"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    feed()
    print(
        f"{name}: {sum(counts.values()):,} inputs, {counts['taken']:,} taken, {counts['refused']:,} refused"
    )


def fuzz(
    groups: list[list[str]], inputs: int, number: int, tell: Callable[[str], None] = print, jobs: int = 1
) -> list[str]:
    """Each group of targets in a process of its own, so many inputs a target; the failures, a text each.

    `jobs`: processes side by side. A group's inputs are then shared out among as many, with a seed each.
    """
    failures: list[str] = []
    share = -(-inputs // jobs)

    def run(group: list[str], number: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        command = [sys.executable, "-m", "tests.campaigns.fuzz", "--inside", str(folder)]
        chosen = [part for name in group for part in ("--target", name)]
        try:
            done = subprocess.run(
                [*command, *chosen, "--inputs", str(share), "--seed", str(number)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=600 + share * sum(TARGETS.get(name, Target).patience for name in group),
            )
            died, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            died, output = -signal.SIGKILL, "no end"
        if died:
            lasts = [last for name in group if (last := folder / name / "last").is_file()]  # in their turn
            said = lasts[-1].read_text()[:2000] if lasts else "none"
            failures.append(f"{group}: exit code {died}; last input {said}\n{output[-6000:]}")
        tell(failures[-1] if died else output.strip())
        shutil.rmtree(folder, ignore_errors=True)

    with ThreadPoolExecutor(jobs) as pool:
        parts = [pool.submit(run, group, number + job) for group in groups for job in range(jobs)]
    for part in parts:
        part.result()
    return failures


def main() -> int:
    """The command; exit code 1 where anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10_000, help="in all, shared out among the targets")
    parser.add_argument("--target", choices=TARGETS, action="append", help="one or more; all if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    values = parser.parse_args()
    if values.inside:
        if sys.platform == "linux":  # an input that asks for more is refused, or ends this process alone
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        for name in values.target:
            run_target(name, values.inputs, values.seed, Path(values.inside) / name)
        return 0
    targets = values.target or list(TARGETS)
    weights = {name: 1 / SLOWER if TARGETS[name].patience > 1 else 1.0 for name in targets}
    each = values.inputs / sum(weights.values())
    failures = []
    for name, weight in weights.items():
        failures += fuzz([[name]], math.ceil(each * weight), values.seed, jobs=values.jobs)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
