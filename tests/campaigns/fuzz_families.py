"""More of the campaign of `fuzz.py`: adapters, chat templates, Parquet files, what reaches a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import strategies as st

from runners.errors import ConfigError, UserError
from tests.campaigns.fuzz_inputs import Target, changed_json, dumped, mutated
from tests.campaigns.fuzz_runs import Runs

ASKED = ({"role": "user", "content": "How many are left?"},)
TALKS = (ASKED, ({"role": "system", "content": "Be brief."}, *ASKED))


class Adapters(Target):
    """adapters.safetensors and adapter_config.json beside a sound model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from mlx.utils import tree_flatten

        from runners.config.sections import LoraConfig
        from runners.files.durable import save_arrays
        from runners.models.adapters import new_adapters
        from runners.models.model_reader import load_module
        from tests.support.tiny_models import make_model_folder

        self.model = make_model_folder(folder / "model", layers=1)
        module, _ = load_module(self.model, False)
        config = new_adapters(module, "lora", LoraConfig(rank=2), 0)
        weights = dict(tree_flatten(module.trainable_parameters()))
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        save_arrays(self.adapters / "adapters.safetensors", cast(Any, weights), {"format": "mlx"})
        self.config = {"fine_tune_type": "lora", "model": str(self.model), **config}
        (self.adapters / "adapter_config.json").write_bytes(dumped(self.config))
        self.kept = {path.name: path.read_bytes() for path in self.adapters.iterdir()}

    def inputs(self) -> st.SearchStrategy[Any]:
        weights = self.kept["adapters.safetensors"]
        (length,) = struct.unpack("<Q", weights[:8])
        header, body = json.loads(weights[8 : 8 + length]), weights[8 + length :]
        few = {name: header[name] for name in list(header)[:2]}

        def packed(part: Any) -> bytes:
            text = dumped({**header, **part} if isinstance(part, dict) else part)
            return struct.pack("<Q", len(text)) + text + body

        return st.one_of(
            st.tuples(st.just("adapters.safetensors"), mutated([weights])),
            st.tuples(st.just("adapters.safetensors"), changed_json(few).map(packed)),
            st.tuples(st.just("adapter_config.json"), changed_json(self.config).map(dumped)),
            st.tuples(st.just("adapter_config.json"), mutated([dumped(self.config)])),
        )

    def feed(self, value: tuple[str, bytes]) -> None:
        from mlx.utils import tree_flatten

        from runners.models.adapters import base_of, read_adapters
        from runners.models.model_reader import load_module

        name, content = value
        try:
            (self.adapters / name).write_bytes(content)
            module, _ = load_module(self.model, False)
            with contextlib.suppress(UserError):
                base_of(self.adapters)
            read_adapters(module, self.adapters, self.model)
            assert tree_flatten(module.parameters())
        finally:
            (self.adapters / name).write_bytes(self.kept[name])

    def warm(self) -> None:
        self.feed(("adapter_config.json", self.kept["adapter_config.json"]))


_PIECES = (
    *("{{ ", " }}", "{% ", " %}", "{%- ", " -%}", "{#", "#}", "messages", "message", "['content']", ".role"),
    *("for m in messages", "endfor", "if m.role == 'user'", "else", "endif", "set ns = namespace(x='xx')"),
    *("set ns.x = ns.x ~ ns.x", "for i in range(99999)", "break", "generation", "endgeneration", "m.content"),
    *("'x' * 10**9", "'x' * 99", "10**10**8", "|center(10**9)", "|tojson(indent=4)", "|join", "|reverse"),
    *("macro f(n)", "endmacro", "f(f)", "call f(1)", "raise_exception('no')", "strftime_now('%Y')"),
    *("loop.index", "''.__class__", "lipsum", "cycler('a')", "bos_token", "add_generation_prompt", "\n", " "),
    *("\x1b[31m", "\udc80", "'", '"', "(", ")", "~", "+", "|", "is defined", "include 'x'", "x"),
)


_HUGE = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ 10**10**8 }}",
    "{{ 'x'|center(10**9) }}",
    "{{ [0] * 10**9 }}",
    "{% set n = namespace(x='xx') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
)


class Templates(Target):
    """chat_template.jinja: real ones mutated, pieces of the language in any order, and ones without end."""

    patience = 24  # two seconds of computing in a process of its own, on a machine that may be busy

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from tests.support.tiny_models import make_model_folder

        self.model = make_model_folder(folder / "model", layers=1, chat_template=False)

    def inputs(self) -> st.SearchStrategy[Any]:
        from tests.support.tiny_models import CHAT_TEMPLATE

        turns = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        valid = [CHAT_TEMPLATE.encode(), f"{turns}[{{{{ m.content | trim }}}}]{{% endfor %}}".encode()]
        pieces = st.lists(st.sampled_from(_PIECES), max_size=14).map("".join)
        blocks = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=5).flatmap(
            lambda parts: st.sampled_from([f"{{{{ {' '.join(parts)} }}}}", f"{{% {' '.join(parts)} %}}"])
        )
        huge = st.tuples(st.sampled_from(_HUGE), st.lists(blocks, max_size=2)).map(
            lambda parts: parts[0] + "".join(parts[1])
        )
        invented = pieces | st.lists(blocks, max_size=4).map("".join) | huge
        return mutated(valid) | invented.map(lambda text: text.encode("utf-8", "surrogateescape"))

    def feed(self, value: bytes) -> None:
        from runners.data.prompts import render
        from runners.models.model_reader import load_tokenizer

        (self.model / "chat_template.jinja").write_bytes(value)
        tokenizer = load_tokenizer(self.model)
        for messages in TALKS:
            text, tokens = render(tokenizer, messages)
            assert tokens and len(text) < 1 << 21

    def warm(self) -> None:
        from tests.support.tiny_models import CHAT_TEMPLATE

        self.feed(CHAT_TEMPLATE.encode())


_LARGEST = 1 << 22  # bytes of a Parquet file: one of 300 MB takes seconds to read, and rightly so


class Parquet(Target):
    """Parquet files: of any values in any encoding, strings that repeat, and mutated ones."""

    def inputs(self) -> st.SearchStrategy[Any]:
        text = st.text(max_size=4) | st.sampled_from(["q" * 50_000, "\x1b[31m", ""])
        column = st.one_of(
            st.lists(text | st.none(), min_size=4, max_size=4),
            st.lists(st.lists(text, max_size=3) | st.none(), min_size=4, max_size=4),
            st.lists(st.integers(-(2**40), 2**40), min_size=4, max_size=4),
            st.lists(st.binary(max_size=4), min_size=4, max_size=4),
            st.lists(st.floats(), min_size=4, max_size=4),
            st.lists(st.fixed_dictionaries({"a": text}), min_size=4, max_size=4),
        )
        table = st.fixed_dictionaries({"question": column, "answer": column}, optional={"more": column})
        options = st.fixed_dictionaries(
            {
                "compression": st.sampled_from(["none", "snappy", "zstd", "gzip"]),
                "use_dictionary": st.booleans(),
                "row_group_size": st.sampled_from([1, 3, 100_000]),
                "data_page_version": st.sampled_from(["1.0", "2.0"]),
            }
        )
        made = st.tuples(table, options, st.sampled_from([1, 1, 40, 2000])).map(self._made)
        return made | made.flatmap(lambda data: mutated([data]))

    def feed(self, value: bytes) -> None:
        from runners.data import parquet_rows
        from runners.data.row_files import read_file

        parquet_rows.LEAST = 1 << 20
        path = self.folder / "rows.parquet"
        path.write_bytes(value)
        rows = read_file(path)
        held = sum(_letters(row.values) for row in rows)
        assert held <= max(parquet_rows.LEAST, parquet_rows.RATIO * len(value))

    def warm(self) -> None:
        self.feed(self._made(({"question": ["a"] * 4, "answer": ["b"] * 4}, {}, 1)))

    def _made(self, parts: tuple[dict[str, list[Any]], dict[str, Any], int]) -> bytes:
        import pyarrow
        import pyarrow.parquet

        columns, options, times = parts
        if times > 40:  # each group takes a millisecond to read
            options = {**options, "row_group_size": 100_000}
        stream = io.BytesIO()
        table = pyarrow.table({name: values * times for name, values in columns.items()})
        pyarrow.parquet.write_table(table, stream, **options)
        if stream.tell() > _LARGEST:  # it is small files that must not become large
            stream = io.BytesIO()
            packed = {**options, "compression": "zstd", "use_dictionary": True}
            pyarrow.parquet.write_table(table, stream, **packed)
        return stream.getvalue()


def _letters(value: Any) -> int:
    """Characters and bytes of all texts in a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_letters, value)) if isinstance(value, list) else 0


class _Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Terminal(Target):
    """Text of models, tokenizers, rewards and data sets, through everything that writes to a terminal.

    The property: no character below 0x20 but line feed and tab, and none of 0x7f to 0x9f.
    """

    def inputs(self) -> st.SearchStrategy[Any]:
        control = st.sampled_from([chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))])
        sequence = st.sampled_from(
            ["\x1b[2J", "\x1b]0;x\x07", "\x9b31m", "\x1b[", "\r", "\x85", "\u2028", "\u202e", "\ud800", "\n"]
        )
        return st.lists(control | sequence | st.text(max_size=4), min_size=1, max_size=6).map("".join)

    def feed(self, value: str) -> None:
        from runners.machine.terminal import others_visible

        out, err = _Screen(), _Screen()
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = out, err
        try:
            with others_visible():
                for write in (_echoes, _errors, _replies, _checked, _reports, _scores, _logs, _rows):
                    write(value, self.folder)
        finally:
            sys.stdout, sys.stderr = before
        for screen in (out, err):
            written = screen.getvalue()
            bad = [letter for letter in written if ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0]
            assert set(bad) <= {"\n", "\t"}, repr(written)
            written.encode()

    def warm(self) -> None:
        self.feed("a")


def _echoes(text: str, folder: Path) -> None:
    from runners.machine.terminal import echo

    for err in (False, True):
        echo(text, err=err)
        for letter in text:  # as a stream of tokens comes
            echo(letter, err=err, nl=False)


def _errors(text: str, folder: Path) -> None:
    """Errors as a command ends with them."""
    from runners.commands.base import ends_with_a_line
    from runners.errors import error_line, show

    def end(error: BaseException) -> None:
        @ends_with_a_line
        def command() -> None:
            raise error

        with contextlib.suppress(SystemExit):
            command()

    told_errors = (text, show(text), show([text, {text: text}]), error_line(ValueError(text)))
    for each in (*map(UserError, told_errors), ConfigError([text, text]), MemoryError(text)):
        end(each)


def _replies(text: str, folder: Path) -> None:
    """Of `grpo generate` and `grpo chat`."""
    from runners.commands.chat import show_reply, talk

    def pieces(**_: Any) -> Iterator[str]:
        yield from text

    show_reply(pieces(), raw=False)
    before = sys.stdin
    sys.stdin = io.StringIO("hello\n")
    try:
        talk(cast(Any, SimpleNamespace(reply=lambda message, **_: pieces())))
    finally:
        sys.stdin = before


def _checked(text: str, folder: Path) -> None:
    """`grpo check`."""
    import numpy as np

    from runners.commands import check
    from runners.evaluation.reward_check import RewardCheck

    values = {
        "tokenizer": text,
        "prompt": text,
        "train": 1,
        "evaluation": 1,
        "held_out": 1,
        "lengths": (1, 2),
    }
    values |= {"kinds": (text,), "rewards": (text,), "values_kan": np.ones((1, 1, 1)), "warnings": (text,)}
    fields = {field.name for field in RewardCheck.__attrs_attrs__}  # pyright: ignore[reportAttributeAccessIssue]
    check._show(RewardCheck(**{name: value for name, value in values.items() if name in fields}))


def _reports(text: str, folder: Path) -> None:
    """The display: plain on a terminal, and the live block, whose own colours and movements are left out."""
    from rich.console import Console

    from runners.telemetry import events
    from runners.telemetry.live import LiveReport
    from runners.telemetry.report import PlainReport

    console = Console(file=sys.stdout, force_terminal=False, color_system=None, width=80)
    for report in (PlainReport(sys.stdout), LiveReport(console=console)):
        with report:
            report.handle(events.Status(text))
            report.handle(events.Started(2, {"run": text, text: text}))
            report.handle(events.Status(text))
            if isinstance(report, LiveReport):
                console.print(report.render())
            report.handle(events.Evaluated(text, 0.5, 1, 2, 1.0))
            report.handle(events.Note(text))
            report.handle(events.Table(text, (text, text), [(text, text)]))
            report.handle(events.Finished({text: text}))


def _scores(text: str, folder: Path) -> None:
    """What is said of a reward that fails, returns a text, and logs under this name."""
    from runners.machine.terminal import echo
    from runners.rewards.scoring import Reward, Scorer

    def fails(completions: Any) -> Any:
        raise ValueError(text)

    def returns(completions: Any, log_metric: Any) -> Any:
        log_metric(f"rewards/{text}", 1.0)
        return [text]

    rewards = [Reward(text, fails), Reward(text, returns)]
    for problem in Scorer(rewards, 0).score([text], [[]], {}).problems:
        echo(problem)


def _logs(text: str, folder: Path) -> None:
    """What other people's packages log."""
    handler = logging.StreamHandler(sys.stderr)
    record = logging.getLogRecordFactory()("x", logging.WARNING, "x", 1, "of type %s", (text,), None)
    handler.emit(record)


def _rows(text: str, folder: Path) -> None:
    """A data set whose columns and values it is."""
    from runners.config.sections import DataConfig
    from runners.data.datasets import load_rows
    from runners.machine.terminal import echo

    path = folder / "rows.jsonl"
    row = json.dumps({text: text, "question": text, "answer": None})
    path.write_text(f"{row}\n{row[:-2]}\n")
    for config in (DataConfig(source=str(path)), DataConfig(source=str(path), on_bad_row="skip")):
        try:
            load_rows(config)
        except UserError as error:
            echo(str(error), err=True)


FAMILIES: dict[str, type[Target]] = {
    "runs": Runs,
    "adapters": Adapters,
    "templates": Templates,
    "parquet": Parquet,
    "terminal": Terminal,
}
