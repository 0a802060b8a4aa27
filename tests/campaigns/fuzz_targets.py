"""What the campaign of `fuzz.py` feeds, and what reads it.

A target is a function of an empty folder that gives a strategy of inputs, the function that reads one, and an
input that is valid.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pyarrow
import pyarrow.parquet
import tiktoken
from hypothesis import strategies as st
from mlx.utils import tree_flatten

import grpo_fn as g
from runners.checkpoints.checkpoint import (
    STATE_FILE,
    VERSION,
    load_trees,
    pack_state,
    prune_checkpoints,
    read_trainer_state,
)
from runners.checkpoints.manifest import MANIFEST, write_manifest
from runners.checkpoints.resume import find_origin
from runners.checkpoints.run_folder import list_checkpoints
from runners.config.loading import load_config
from runners.config.sections import DataConfig, LoraConfig
from runners.conversion.gguf.reading import convert_gguf
from runners.conversion.nanochat import read_encoding
from runners.data.curriculum import draw_weights, prompt_id, with_difficulty
from runners.data.datasets import load_rows
from runners.data.gold import GoldReader
from runners.data.prompts import Example, reward_columns
from runners.data.rendering import render
from runners.errors import UserError
from runners.files.tensor_files import save_arrays
from runners.models.adapters import base_of, new_adapters, read_adapters
from runners.models.folders import resolve_model
from runners.models.model_reader import load_module, load_tokenizer, read_model
from runners.models.peft_adapters import PEFT_ADAPTERS, to_peft
from runners.tokenization.prompt_settings import PromptSettings, read_prompt, write_prompt
from runners.training.run_state import RunState, restore_state
from tests.support.gguf_files import LLAMA, write
from tests.support.tiny_models import CHAT_TEMPLATE, make_model_folder

Made = tuple[st.SearchStrategy[Any], Callable[[Any], object], Any]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["../x", "/etc/passwd", "\x1b[31m", "\ud800", "F32", "model.safetensors", "a" * 300])
    | st.sampled_from([10**400, -(10**400), "1e999"])
    | st.sampled_from([20, 300]).map(lambda depth: json.loads("[" * depth + "]" * depth)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: Any, valid: list[bytes]) -> bytes:
    """A valid file with a few bytes overwritten, cut out, put in, doubled, or the end cut off."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        # Most of what a parser minds stands at the beginning.
        end = min(len(data), draw(st.sampled_from([16, 200, 3000, len(data)])))
        place = draw(st.integers(0, end))
        width = draw(st.integers(1, 8))
        usual = st.sampled_from([b"\xff" * 4, b'"', b"[", b"{", b"-1", b"\0"])
        new = draw(st.binary(min_size=1, max_size=6) | usual)
        match draw(st.sampled_from(["over", "cut", "in", "twice", "end"])):
            case "over":
                data[place : place + len(new)] = new
            case "cut":
                del data[place : place + width]
            case "in":
                data[place:place] = new
            case "twice":
                data[place:place] = data[place : place + width * 20]
            case "end":
                del data[place:]
    return bytes(data)


def changed_json(value: Any) -> st.SearchStrategy[Any]:
    """A JSON value in which one place, at any depth, is replaced by any other value, or left out."""
    if isinstance(value, dict) and value:
        inner = st.sampled_from(sorted(value)).flatmap(
            lambda key: changed_json(value[key]).map(lambda new: {**value, key: new})
        )
        less = st.sampled_from(sorted(value)).map(lambda key: {k: v for k, v in value.items() if k != key})
        more = st.tuples(st.text(max_size=5), JSON).map(lambda pair: {**value, pair[0]: pair[1]})
        return inner | less | more | JSON
    if isinstance(value, list) and value:
        inner = st.integers(0, min(len(value), 5) - 1).flatmap(
            lambda i: changed_json(value[i]).map(lambda new: [*value[:i], new, *value[i + 1 :]])
        )
        return inner | JSON
    return JSON


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


class Folder:
    """A sound folder of which an input, (name, content), replaces one file."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.files = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}

    def target(self, inputs: st.SearchStrategy[Any], read: Callable[[], object]) -> Made:
        """With the function that reads the whole folder."""

        def feed(value: tuple[str, bytes]) -> None:
            name, content = value
            (self.place / name).write_bytes(content)
            try:
                read()
            finally:
                (self.place / name).unlink()
                if name in self.files:
                    (self.place / name).write_bytes(self.files[name])

        return inputs, feed, next(iter(self.files.items()))

    def changed(self, name: str, value: Any = None) -> st.SearchStrategy[Any]:
        """The file as JSON, with one place of it, or of `value`, changed."""
        return st.tuples(st.just(name), changed_json(value or json.loads(self.files[name])).map(dumped))

    def mutated(self, name: str) -> st.SearchStrategy[Any]:
        """The file with some bytes changed."""
        return st.tuples(st.just(name), mutated([self.files[name]]))

    def few_changed(self, name: str) -> st.SearchStrategy[Any]:
        """A safetensors file with one place of its header's first two entries changed."""
        header, body = self.header(name)
        few = {key: header[key] for key in list(header)[:2]}
        whole = changed_json(few).map(lambda part: {**header, **part} if isinstance(part, dict) else part)
        return st.tuples(st.just(name), whole.map(lambda changed: packed(changed, body)))

    def header(self, name: str) -> tuple[dict[str, Any], bytes]:
        """The header of a safetensors file, and what is behind it."""
        content = self.files[name]
        (length,) = struct.unpack("<Q", content[:8])
        return json.loads(content[8 : 8 + length]), content[8 + length :]


def packed(header: Any, body: bytes) -> bytes:
    """A safetensors file."""
    text = dumped(header)
    return struct.pack("<Q", len(text)) + text + body


def rows(folder: Path) -> Made:
    """Data files of each format, whole and row by row."""
    valid = [{"question": f"What is {i}?", "answer": f"#### {i}", "level": i} for i in range(4)]
    lines = b"\n".join(map(dumped, valid))
    csv = b"question,answer\r\n" + b"".join(b'"What is %d?",%d\r\n' % (i, i) for i in range(4))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(valid), folder / "made.parquet")
    parquet = (folder / "made.parquet").read_bytes()
    any_rows = st.lists(changed_json(valid[0]), max_size=4)
    inputs = st.one_of(
        st.tuples(st.just("jsonl"), mutated([lines])),
        st.tuples(st.just("jsonl"), any_rows.map(lambda found: b"\n".join(map(dumped, found)))),
        st.tuples(st.just("json"), mutated([dumped(valid), lines]) | any_rows.map(dumped)),
        st.tuples(st.just("csv"), mutated([csv])),
        st.tuples(st.just("parquet"), mutated([parquet])),
    )

    def feed(value: tuple[str, bytes]) -> None:
        path = folder / f"rows.{value[0]}"
        path.write_bytes(value[1])
        with contextlib.suppress(UserError):
            load_rows(DataConfig(source=str(path)))
        reward_columns(load_rows(DataConfig(source=str(path), on_bad_row="skip"))[0])

    return inputs, feed, ("jsonl", lines)


def weights(folder: Path) -> Made:
    """A model folder whose safetensors header, or config.json, or index has been changed."""
    model = Folder(make_model_folder(folder / "model"))
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors"}}
    inputs = st.one_of(
        model.mutated("model.safetensors"),
        model.few_changed("model.safetensors"),
        model.changed("config.json"),
        model.changed("model.safetensors.index.json", index),
    )
    return model.target(inputs, lambda: read_model(resolve_model(str(model.place))))


def checkpoint(folder: Path) -> Made:
    """trainer_state.json, the manifest, and the header of optimizer.safetensors of a checkpoint."""
    place = folder / "run" / "checkpoint-1"
    place.mkdir(parents=True)
    params = {"a": {"weight": mx.ones((3, 2))}, "b": [mx.zeros((4,))]}
    state = g.init_state(params, g.adamw(0.1), key=mx.random.key(0))
    arrays = {"a.weight": params["a"]["weight"]}
    save_arrays(place / "model.safetensors", arrays, {"format": "mlx"})
    run = RunState(train=state, batch_step=1, update=1, scores=(0.5,))
    plain, trees = run.saved()
    save_arrays(place / STATE_FILE, *pack_state(state, arrays, trees))
    facts = {"version": VERSION, "step": 1, "em": 0.25, "eval_reward": 0.5, "reward": 1.5, "data": "x"}
    facts |= {name: {} for name in ("config", "inputs", "arithmetic", "logs")}
    facts |= {"decided": {"launch": "eval", "max_batch": 1}, "loop": plain}
    (place / "trainer_state.json").write_bytes(dumped(facts))
    write_manifest(place)
    whole = Folder(place)
    header, body = whole.header(STATE_FILE)

    def with_structure(structure: Any) -> tuple[str, bytes]:
        metadata = {**header["__metadata__"], "structure": json.dumps(structure)}
        return STATE_FILE, packed({**header, "__metadata__": metadata}, body)

    inputs = st.one_of(
        whole.changed("trainer_state.json"),
        whole.mutated("trainer_state.json"),
        whole.mutated(STATE_FILE),
        changed_json(json.loads(header["__metadata__"]["structure"])).map(with_structure),
        whole.changed(MANIFEST),
    )

    def read() -> None:
        prune_checkpoints(folder / "run", keep_last=1, keep_best=1)
        assert list_checkpoints(folder / "run") == [place]
        with contextlib.suppress(UserError):
            find_origin(folder / "run", None, lambda line: None)
        train, trees = load_trees(place)
        restore_state(read_trainer_state(place).loop, trees, train, "trainer_state.json")

    return whole.target(inputs, read)


def prompt(folder: Path) -> Made:
    """grpo_prompt.json in a model folder."""
    write_prompt(folder, PromptSettings.of(load_config("quickstart").to_dict()))
    whole = Folder(folder)
    (name,) = whole.files

    def read() -> None:
        found = read_prompt(folder)
        assert found is not None
        found.sections()

    return whole.target(whole.mutated(name) | whole.changed(name), read)


def tokenizer(folder: Path) -> Made:
    """tokenizer.pkl: real ones mutated, and opcodes in any order around the names that are admitted."""
    ranks, special = {bytes([i]): i for i in range(256)}, {"<|bos|>": 256}
    encoding = tiktoken.Encoding("n", pat_str="[a-z]+|.", mergeable_ranks=ranks, special_tokens=special)
    valid = [pickle.dumps(encoding, protocol) for protocol in (4, 5)]
    named = [b"ctiktoken.core\nEncoding\n", b"c_codecs\nencode\n", b"cos\nsystem\n"]
    named += [b"\x8c\x02os\x8c\x06system\x93", b"U\x09touch ran\x85R", b")\x81", b"}b", b"h\x00\x86\x94"]
    named += [b"r\xff\xff\xff\xff", b"S'latin1'\n", b"\x8c\x06latin1"]
    pieces = st.sampled_from([*(bytes([code]) for code in range(256)), *named])
    invented = st.lists(pieces, max_size=20).map(lambda parts: b"\x80\x04" + b"".join(parts) + b".")
    path = folder / "tokenizer.pkl"

    def feed(value: bytes) -> None:
        path.write_bytes(value)
        read_encoding(path)

    return mutated(valid) | invented, feed, valid[0]


def _adapters(folder: Path) -> tuple[Path, Path, dict[str, Any], Any]:
    """A sound model, a new folder, and what adapter_config.json says of new adapters, with their arrays."""
    model, place = make_model_folder(folder / "model", layers=1), folder / "adapters"
    place.mkdir()
    module, _ = load_module(model, False)
    config = new_adapters(module, "lora", LoraConfig(rank=2), 0)
    stated = {"fine_tune_type": "lora", "model": str(model), **config}
    return model, place, stated, dict(tree_flatten(module.trainable_parameters()))


def adapters(folder: Path) -> Made:
    """adapters.safetensors and adapter_config.json beside a sound model."""
    model, place, stated, arrays = _adapters(folder)
    save_arrays(place / "adapters.safetensors", arrays, {"format": "mlx"})
    (place / "adapter_config.json").write_bytes(dumped(stated))
    return _adapter_target(place, model, "adapters.safetensors")


def peft(folder: Path) -> Made:
    """The same in PEFT's format, with patterns and scales in adapter_config.json."""
    model, place, stated, arrays = _adapters(folder)
    stated, theirs = to_peft(stated, arrays)
    layer = stated["target_modules"][0]
    stated |= {"alpha_pattern": {layer: 3.0}, "rank_pattern": {layer: 2}, "layers_to_transform": None}
    save_arrays(place / PEFT_ADAPTERS, theirs, {"format": "pt"})
    (place / "adapter_config.json").write_bytes(dumped(stated))
    return _adapter_target(place, model, PEFT_ADAPTERS)


def _adapter_target(place: Path, model: Path, weights: str) -> Made:
    whole = Folder(place)
    inputs = st.one_of(
        whole.mutated(weights),
        whole.few_changed(weights),
        whole.changed("adapter_config.json"),
        whole.mutated("adapter_config.json"),
    )

    def read() -> None:
        module, _ = load_module(model, False)
        with contextlib.suppress(UserError):
            base_of(place)
        read_adapters(module, place, model)
        assert tree_flatten(module.parameters())

    return whole.target(inputs, read)


def gguf(folder: Path) -> Made:
    """A GGUF file: its bytes changed, and its metadata of other types and sizes."""
    file = folder / "made.gguf"
    (folder / "model").mkdir()
    write(file)
    whole = file.read_bytes()
    kinds = st.sampled_from([0, 4, 5, 6, 8, 9, 10, 12, 99])
    numbers = st.sampled_from([0, 1, 3, 2**31, 2**63 - 1]) | st.integers(0, 255)
    values = st.tuples(kinds, numbers).map(lambda pair: struct.pack("<IQ", *pair))
    arrays = st.tuples(kinds, numbers).map(lambda pair: struct.pack("<IIQ", 9, *pair))
    plain = st.text(max_size=8) | st.integers(0, 2**31 - 1) | st.floats(width=32) | st.booleans()
    changed = st.tuples(st.sampled_from(sorted(LLAMA)), values | arrays | plain)

    def written(pair: tuple[str, Any]) -> bytes:
        write(file, metadata=LLAMA | dict([pair]))
        return file.read_bytes()

    def feed(value: bytes) -> None:
        file.write_bytes(value)
        for made in (folder / "model").iterdir():
            made.unlink()
        convert_gguf(file, folder / "model", dequantize=False)

    return mutated([whole]) | changed.map(written), feed, whole


def completions(folder: Path) -> Made:
    """The file of sft.completions, as a run leaves it."""
    model = make_model_folder(folder / "model", layers=1)
    file = folder / "completions.jsonl"
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    usual = {"prompt": "What is 1 + 1?", "completion": "2", "reward": 1.0, "finished": True}
    valid = [usual, {**usual, "context": turns, "messages": None, "images": None}]
    file.touch()
    config = load_config(None, [f"model.path={model}", f"sft.completions={file}"])
    reader = GoldReader(config, load_tokenizer(model), None)
    rows = st.lists(changed_json(valid[0]) | changed_json(valid[1]), max_size=3)
    lines = b"\n".join(map(dumped, valid))

    def feed(value: bytes) -> None:
        file.write_bytes(value)
        reader.of_file()

    return mutated([lines]) | rows.map(lambda found: b"\n".join(map(dumped, found))), feed, lines


def difficulty(folder: Path) -> Made:
    """The file of data.difficulty, and the estimates that a run makes of it."""
    file = folder / "made.difficulty.jsonl"
    examples = [Example(({"role": "user", "content": text},), text, (1,), "", {}, (), 0) for text in "abc"]
    valid = [{"prompt": prompt_id(each), "samples": 8, "passes": 3, "reward": 0.5} for each in examples]
    rows = st.lists(st.sampled_from(valid).flatmap(changed_json), max_size=3)
    lines = b"".join(dumped(line) + b"\n" for line in valid)
    config = DataConfig(curriculum="adaptive", difficulty=str(file))

    def feed(value: bytes) -> None:
        file.write_bytes(value)
        kept, known, _ = with_difficulty(examples, config)
        assert known is not None and len(kept) == len(known.step_n)
        weights_n = draw_weights(known, 3, target=0.5, decay=0.99, size=8)
        assert ((weights_n >= 0) & (weights_n <= 1)).all()

    changed = rows.map(lambda found: b"".join(dumped(line) + b"\n" for line in found))
    return mutated([lines]) | changed, feed, lines


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


def templates(folder: Path) -> Made:
    """chat_template.jinja: real ones mutated, pieces of the language in any order, and ones without end."""
    model = make_model_folder(folder / "model", layers=1, chat_template=False)
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
    asked = ({"role": "user", "content": "How many are left?"},)

    def feed(value: bytes) -> None:
        (model / "chat_template.jinja").write_bytes(value)
        tokenizer = load_tokenizer(model)
        for messages in (asked, ({"role": "system", "content": "Be brief."}, *asked)):
            text, tokens = render(tokenizer, messages)
            assert tokens and len(text) < 1 << 21

    inputs = mutated(valid) | invented.map(lambda text: text.encode("utf-8", "surrogateescape"))
    return inputs, feed, valid[0]


_READERS = (rows, weights, checkpoint, prompt, tokenizer, adapters, peft, gguf, completions, difficulty)
TARGETS: dict[str, Callable[[Path], Made]] = {made.__name__: made for made in (*_READERS, templates)}
