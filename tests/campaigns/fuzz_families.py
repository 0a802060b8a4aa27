"""More of the campaign of `fuzz.py`: adapters, chat templates, Parquet files."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any, cast

from hypothesis import strategies as st

from runners.errors import UserError
from tests.campaigns.fuzz_inputs import FolderTarget, Target, dumped, mutated

ASKED = ({"role": "user", "content": "How many are left?"},)
TALKS = (ASKED, ({"role": "system", "content": "Be brief."}, *ASKED))


class Adapters(FolderTarget):
    """adapters.safetensors and adapter_config.json beside a sound model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from mlx.utils import tree_flatten

        from runners.config.sections import LoraConfig
        from runners.files.tensor_files import save_arrays
        from runners.models.adapters import new_adapters
        from runners.models.model_reader import load_module
        from tests.support.tiny_models import make_model_folder

        self.model = make_model_folder(folder / "model", layers=1)
        module, _ = load_module(self.model, False)
        config = new_adapters(module, "lora", LoraConfig(rank=2), 0)
        weights = dict(tree_flatten(module.trainable_parameters()))
        self.place = folder / "adapters"
        self.place.mkdir()
        save_arrays(self.place / "adapters.safetensors", cast(Any, weights), {"format": "mlx"})
        self.config = {"fine_tune_type": "lora", "model": str(self.model), **config}
        (self.place / "adapter_config.json").write_bytes(dumped(self.config))
        self.keep()

    def inputs(self) -> st.SearchStrategy[Any]:
        return st.one_of(
            self.mutated("adapters.safetensors"),
            self.few_changed("adapters.safetensors"),
            self.changed("adapter_config.json", self.config),
            self.mutated("adapter_config.json"),
        )

    def read(self) -> None:
        from mlx.utils import tree_flatten

        from runners.models.adapters import base_of, read_adapters
        from runners.models.model_reader import load_module

        module, _ = load_module(self.model, False)
        with contextlib.suppress(UserError):
            base_of(self.place)
        read_adapters(module, self.place, self.model)
        assert tree_flatten(module.parameters())


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
        from runners.data.rendering import render
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


FAMILIES: dict[str, type[Target]] = {
    "adapters": Adapters,
    "templates": Templates,
    "parquet": Parquet,
}
