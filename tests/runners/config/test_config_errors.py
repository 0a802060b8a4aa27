"""Faulty configs: one line for each fault: file, key, what was found, what is wanted, what is near."""

import attrs
import pytest

from runners.config import sections
from runners.config.loading import SECTIONS, ConfigError, load_config
from runners.config.reading import preset_names
from runners.config.rules import Mismatch

MODEL = 'model.path = "embedded"\n'


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """The lines that a config's text (in train.toml, in the current folder) and overrides bring."""
    monkeypatch.chdir(tmp_path)

    def load(text, *overrides):
        (tmp_path / "train.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigError) as caught:
            load_config("train.toml", overrides)
        assert str(caught.value) == "\n".join(caught.value.problems)
        return list(caught.value.problems)

    return load


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rollout.num_generation = 4", "unknown key; did you mean rollout.num_generations?"),
        ("rollout.batch_size = 4", "unknown key; did you mean optim.batch_size?"),
        ("rollout.clip_eps = 0.2", "unknown key; did you mean loss.epsilon_low?"),
        ("eval.zzz = 1", "unknown key; eval takes every, samples, max_new_tokens, at_start"),
        ("rolout.top_p = 1.0", "rolout: unknown key; did you mean rollout?"),
        ("model.lora.rnak = 1", "unknown key; did you mean model.lora.rank?"),
        ("loss.overlong.bufer = 1", "unknown key; did you mean loss.overlong.buffer?"),
        ("rollout.num_generations = 1", "found 1, want an integer of at least 2"),
        ("rollout.temperature = 0", "found 0, want a number above 0"),
        ("rollout.temperature = nan", "found nan, want a finite number"),
        ("rollout.max_new_tokens = 3_000_000_000", "found 3000000000, want an integer of at least 1"),
        ("rollout.top_p = 1.5", "found 1.5, want a number above 0 and at most 1"),
        ("rollout.min_p = 1.0", "found 1.0, want a number of at least 0 and below 1"),
        ('rollout.stop = [""]', 'found [""], want a list of strings that are not empty'),
        ('rollout.stop = "</a>"', 'found "</a>", want a list of strings'),
        ('rollout.quantization = "affine4"', "did you mean affine-4?"),
        ("rollout.group_size = 16", "found 16, want 0, 32, 64 or 128"),
        ("rollout.group_size = -1", "found -1, want 0, 32, 64 or 128"),
        ("rollout.mismatch_limit = -0.1", "found -0.1, want a number of at least 0"),
        ('rollout.quantization = "auto"', "want one of none, affine-8"),
        ("optim.batch_size = 0", "found 0, want an integer of at least 1"),
        ("optim.batch_size = 1.0", "found 1.0, want an integer"),
        ("optim.batch_size = true", "found true, want an integer"),
        ('optim.learning_rate = "3"', 'found "3", want a number'),
        ("optim.learning_rate = -1e-6", "found -1e-06, want a number of at least 0"),
        ("optim.warmup_ratio = 2", "found 2, want a number of at least 0 and at most 1"),
        ("optim.betas = [0.9]", "found [0.9], want a list of 2 numbers"),
        ("optim.betas = [0.9, 1]", "found [0.9, 1], want two numbers of at least 0 and below 1"),
        ("optim.minibatches = 9", "found 9, want at most 8, the completions of a batch step"),
        ("optim = 3", "optim: found 3, want a table"),
        ("model.lora = true", "model.lora: found true, want a table"),
        ("model.lora.layers = 0", "found 0, want -1 (all) or an integer of at least 1"),
        ("loss.sequence_range = [2, 1]", "found [2, 1], want [low, high] with 0 <= low < high"),
        ("loss.correction_range = [1, 1]", "found [1, 1], want [low, high] with 0 <= low < high"),
        ("loss.overlong.buffer = 513", "found 513, want at most rollout.max_new_tokens = 512"),
        ("loss.delta = 1", "found 1, want a number above 1"),
        (
            "reward.functions = []",
            "found [], want at least one entry, or an env.factory whose class has get_reward",
        ),
        ('reward.functions = ["a.py:f", "a.py:f"]', "want a list with no entry twice"),
        ("data.chat_template_kwargs = {a = [1]}", "want a table of strings, numbers, true or false"),
        ("data.chat_template_kwargs = {a = nan}", "found {a = nan}, want finite numbers"),
        ("env.timeout = 1e300", "found 1e+300, want a number of at least 0 and at most 1e+09"),
        ("system.collective_timeout = 1e10", "found 10000000000.0, want a number above 0 and at most 1e+09"),
        ("system.memory_limit_gb = 1e300", "found 1e+300, want a number of at least 0 and at most 1e+09"),
        ('data.answer = ""', 'found "", want a column, or an env.factory whose class has get_reward'),
        ('data.answer = ""\nenv.factory = "calculator"', 'found "", want a column, or an env.factory'),
        ('env.factory = {a = "a.py:A"}', "want a string"),
        ("env.max_turns = 0", "found 0, want an integer of at least 1"),
        ('env.shedule = "arrival"', "did you mean env.schedule?"),
        ("reward.weights = [1.0, 2]", "found 2, want 5: one for each of reward.functions"),
        ("reward.weights = [0, 0, 0, 0, 0]", "found [0.0, 0.0, 0.0, 0.0, 0.0], want one that is not 0"),
        ('reward.functions = ["int_reward"]', "did you mean int_reward_func?"),
        (
            'reward.functions = ["a-b:c"]',
            'found "a-b:c", want a built-in reward, package.module:function or path',
        ),
        (
            'reward.functions = ["a.b:"]',
            'found "a.b:", want a built-in reward, package.module:function or path',
        ),
        ('reward.functions = ["mine.py:f"]', 'no such file: "mine.py"'),
        ('data.source = "rows.jsonl"', 'no such file or folder: "rows.jsonl"'),
        ('data.source = "three/part/name"', 'no such file or folder: "three/part/name"'),
        ('data.source = "two words"', 'found "two words", want "embedded", a file or folder'),
        ('run.name = "../up"', 'found "../up", want a folder\'s name'),
        ('run.name = "/abs"', 'found "/abs", want a folder\'s name'),
        ('run.output_dir = ""', 'found "", want a name on one line'),
        ('run.output_dir = "train.toml"', "found the file train.toml, want a folder"),
        ("run.seed = -1", "found -1, want an integer of at least 0"),
        (f"run.seed = {10**400}", "found an integer of 1329 bits, want an integer of at least 0"),
        (f"optim.eps = {10**400}", "found an integer of 1329 bits, want a number that float64 can hold"),
        ('stop.when = ["kl"]', 'found "kl", want "METRIC < NUMBER" or "METRIC < NUMBER for READINGS"'),
        ('stop.when = ["klx > 1"]', 'found "klx > 1", want a number of the log; did you mean kl?'),
        (
            'stop.when = ["qqqq > 1"]',
            'found "qqqq > 1", want a number of the log, as training_log.jsonl has them: em',
        ),
        ('stop.when = ["rewards/int_reward/mean > 1"]', "did you mean rewards/int_reward_func/mean?"),
        ("learning_rate = 1e-5", "found MLX-GRPO's keys (learning_rate) and sections ([model])"),
    ],
)
def test_one_fault_is_one_line(faults, text, line):
    """Every fault is told in a line that starts with the file and the key and says what to do."""
    found = faults(MODEL + text)
    assert len(found) == 1 and line in found[0]
    key = text.split(" = ")[0]
    section_is_known = key.split(".")[0] in SECTIONS
    assert found[0].startswith(f"train.toml: {key}: " if section_is_known else "train.toml: ")


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("./models/nope", 'train.toml: model.path: no such file or folder: "./models/nope"'),
        ("models/nope/", 'train.toml: model.path: no such file or folder: "models/nope/"'),
        ("/no/such/folder", 'train.toml: model.path: no such file or folder: "/no/such/folder"'),
        ("train.toml", "train.toml: model.path: found the file train.toml, want the folder of a model"),
        ("", 'train.toml: model.path: found "", want a name on one line'),
        ("a b", 'train.toml: model.path: found "a b", want "embedded", a model folder or a name on the'),
    ],
)
def test_a_model_that_cannot_be_is_refused(faults, path, line):
    """A path without a folder behind it ends before anything is loaded."""
    assert [found.startswith(line) for found in faults(f'model.path = "{path}"')] == [True]


def test_a_missing_file_is_looked_for_beside_the_config_too(tmp_path, monkeypatch):
    """The message says where a relative path was looked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cfg").mkdir()
    (tmp_path / "cfg" / "a.toml").write_text(MODEL + 'data.source = "rows.csv"')
    with pytest.raises(ConfigError) as caught:
        load_config("cfg/a.toml")
    assert caught.value.problems == (
        'cfg/a.toml: data.source: no such file or folder: "rows.csv", neither here nor in cfg',
    )


def test_all_faults_are_told_at_once_in_the_order_of_the_file(faults):
    """Four faults of the file, then one of the command line, each with its source; the missing model last."""
    text = (
        "optim.lr = 1\noptim.batch_size = 0\nrollout.top_p = true\ndata.source = 'x.csv'\nmodel.tune = 'full'"
    )
    found = faults(text, "eval.samples=-1", "eval.every=1")
    keys = [line.split(": ")[:2] for line in found]
    assert keys == [
        ["train.toml", "optim.lr"],
        ["train.toml", "optim.batch_size"],
        ["train.toml", "rollout.top_p"],
        ["train.toml", "model.path"],
        ["--set", "eval.samples"],
        ["train.toml", "data.source"],
    ]
    assert found[3] == (
        'train.toml: model.path: missing, want a string: "embedded", a model folder or a name on the '
        "Hugging Face Hub"
    )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optim.learning_rate", "--set optim.learning_rate: want section.key=value"),
        ("=3", "--set =3: want section.key=value"),
        ("optim.learning_rate=fast", '--set: optim.learning_rate: found "fast", want a number'),
        ("optim.learning_rate=1\nx=2", '--set: optim.learning_rate: found "1\\nx=2", want a number'),
        ("optim.lerning_rate=1", "--set: optim.lerning_rate: unknown key; did you mean optim.learning_rate?"),
        ("optin.eps=1", "--set: optin.eps: unknown key; did you mean optim.eps?"),
        ("num_generation=1", "--set: num_generation: unknown key; did you mean num_generations?"),
        ("num_generations=1", "--set: num_generations: found 1, want an integer of at least 2"),
        ("num_generations=two", '--set: num_generations: found "two", want an integer'),
        ("optim=3", "--set: optim: found 3, want a table"),
        ("optim.eps.x=3", "--set: optim.eps.x: unknown key; optim.eps is not a table"),
        ("optim.eps={x=3}", "--set: optim.eps: found {x = 3}, want a number"),
        ("zzz=3", f"--set: zzz: unknown key; the sections are {', '.join(SECTIONS)}"),
        ("model.path=./nope", '--set: model.path: no such file or folder: "./nope"'),
    ],
)
def test_faults_of_the_command_line_are_named_so(faults, override, line):
    """A bad --set is told as one, not as a fault of the file."""
    assert faults(MODEL, override) == [line]
    assert faults(MODEL + "optim.eps = 1e-6", override) == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            'rollout.quantization = "mxfp4"\nrollout.group_size = 64',
            "rollout.group_size: found 64, want 0: a group of mxfp4 has one size, which is part of the "
            "format",
        ),
        (
            'loss = {beta = 0.1, ref_quantization = "affine-4"}\nmodel.tune = "lora"',
            'loss.ref_quantization: found "affine-4" with model.tune = "lora", where the reference is the '
            'base itself, without its adapters, at no cost; want "none"',
        ),
        (
            'loss = {beta = 0.1, ref_quantization = "affine-4", ref_sync_every = 8}',
            'loss.ref_mixup: found 0.6 with loss.ref_quantization = "affine-4", which keeps no full-'
            "precision reference to mix with; want 1.0, or loss.ref_sync_every = 0",
        ),
    ],
)
def test_quantized_roles_without_meaning_are_refused(faults, text, line):
    """A group that a format does not have, a rounded reference that costs more, one that cannot be mixed."""
    assert faults(MODEL + text) == [f"train.toml: {line}"]


@pytest.mark.parametrize("more", ["ref_mixup = 1.0, ref_sync_every = 8", "ref_sync_every = 0"])
def test_a_quantized_reference_may_move_as_a_whole(tmp_path, more):
    """With ref_mixup = 1 nothing is mixed, and without ref_sync_every nothing moves."""
    (tmp_path / "a.toml").write_text(
        MODEL + f'loss = {{beta = 0.1, ref_quantization = "affine-4", {more}}}\nrollout.group_size = 32'
    )
    load_config(str(tmp_path / "a.toml")).check()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[model\npath = 1", "train.toml:1:7: not TOML: expected ']' at the end of a table declaration"),
        ("a = 1\nb = [1,\n", "train.toml:3:1: not TOML: invalid value"),
        ("seed = 1\nseed = 2\n", "train.toml:2:9: not TOML: cannot overwrite a value"),
        (b"a = 1\nb = '\xff'", "train.toml:2: found the byte 0xff, want UTF-8 text"),
        (f"a = {'1' * 5000}", "train.toml: not TOML: an integer of too many digits"),
        (f"a = {'[' * 5000}", "train.toml: not TOML: nested too deeply"),
    ],
)
def test_a_syntax_error_names_its_place(faults, text, line):
    """File, line and column, as editors take them."""
    (found,) = faults(text)
    assert found.startswith(line)


def test_a_byte_order_mark_is_no_fault(tmp_path):
    """Some editors put one before UTF-8 text."""
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf" + MODEL.encode())
    assert load_config(str(tmp_path / "a.toml")).model.path == "embedded"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("quickstrat", "quickstrat: no such file or preset; did you mean the preset quickstart?"),
        (
            "configs/quickstart.toml",
            "configs/quickstart.toml: no such file or preset; did you mean the preset",
        ),
        ("zzzzzz.toml", f"zzzzzz.toml: no such file or preset; the presets are {', '.join(preset_names())}"),
        (".", ".: found a folder, want a TOML file"),
        ("", "CONFIG: found an empty name, want a TOML file or a preset"),
        ("a\0b", "a\\x00b: no such file or preset; the presets are"),
        ("x" * 5000, "x" * 5000 + ": no such file or preset; the presets are"),
    ],
)
def test_a_config_that_is_not_there(tmp_path, monkeypatch, name, line):
    """An unknown name lists the nearest preset, or all."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert caught.value.problems[0].startswith(line)


def test_an_unreadable_file_is_told(tmp_path, monkeypatch):
    """What the operating system says, with the file."""
    (tmp_path / "a.toml").write_text(MODEL)
    monkeypatch.chdir(tmp_path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ConfigError) as caught:
        load_config("a.toml")
    assert caught.value.problems == ("a.toml: cannot be read: Permission denied",)


@pytest.mark.parametrize(
    ("text", "overrides", "start"),
    [
        ("loss.delta = 1.1", (), "train.toml: loss.delta: "),
        ("", ("loss.delta=1.1",), "--set: loss.delta: "),
        ("loss.surrogate = 'dual_clip'", (), "train.toml: loss."),
        (
            "loss.surrogate = 'cipso'",
            (),
            "train.toml: loss.surrogate: surrogate = 'cipso' is not one of clip",
        ),
        ("loss.kl = 'K3'", (), "train.toml: loss.kl: kl = 'K3' is not one of k1, k2, k3"),
        ("loss.preset = 'dpao'", (), "train.toml: loss.preset: "),
        ("loss.correction = 'sequence_mask'", (), "train.toml: loss.correction: "),
        ("loss.aggregation = 'sequence_sum_norm'", (), "train.toml: loss.aggregation: "),
        (
            "loss.ref_quantization = 'mxfp8'",
            (),
            'train.toml: loss.ref_quantization: found "mxfp8" with loss.beta',
        ),
        ("loss.ref_sync_every = 2", (), "train.toml: loss.ref_sync_every: found 2 with loss.beta = 0"),
        (
            "system.disable = ['shared_prefi']",
            (),
            "train.toml: system.disable: no mechanism 'shared_prefi'; the nearest name is 'shared_prefix'",
        ),
    ],
)
def test_a_loss_without_meaning_is_refused_by_check(tmp_path, monkeypatch, text, overrides, start):
    """What only the core can tell comes as a ConfigError that names the key and its source."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.toml").write_text(MODEL + text)
    config = load_config("train.toml", overrides)
    with pytest.raises(ConfigError) as caught:
        config.check()
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(start)


def test_values_are_checked_without_a_file_too():
    """A section that is built by hand obeys the same ranges, and the error names the field."""
    with pytest.raises(Mismatch, match="num_generations: found 1, want an integer of at least 2"):
        sections.RolloutConfig(num_generations=1)
    with pytest.raises(Mismatch, match=r"scale: found .Group., want one of group, batch, none; did you mean"):
        attrs.evolve(sections.LossConfig(), scale="Group")
