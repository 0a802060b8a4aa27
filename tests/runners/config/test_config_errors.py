"""Faulty configs: each fault is one line with the file, the key, the expected and the found value."""

import pytest

from runners.config.conditions import Condition
from runners.config.loading import SECTIONS, ConfigError, load_config
from runners.config.reading import preset_names

MODEL = 'model.path = "embedded"\n'
PACKED = 'beta = 0.1, ref_quantization = "affine-4"'


@pytest.fixture
def faults(load):
    """Returns the error lines for the text of train.toml and overrides."""

    def lines(text, *overrides):
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        assert str(caught.value) == "\n".join(caught.value.problems)
        return list(caught.value.problems)

    return lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rollout.num_generation = 4", "unknown key; did you mean rollout.num_generations?"),
        ("watch.zzz = 1", "unknown key; watch contains patience, min_entropy, max_kl"),
        ("rolout.top_p = 1.0", "rolout: unknown key; did you mean rollout?"),
        ("lora.rank = 1", "lora: unknown key; did you mean model.lora.rank?"),
        ("model.zzz = 1", "unknown key; model contains path, tune, lora.rank, lora.scale"),
        ("rollout.num_generations = 1", "expected an integer >= 2, found 1"),
        ("rollout.temperature = nan", "expected a finite number, found nan"),
        ("rollout.max_new_tokens = 3_000_000_000", "an integer of at most 31 bits, found 3000000000"),
        ('rollout.stop = [""]', 'expected a list of strings: no empty string, found [""]'),
        ('rollout.stop = "</a>"', 'expected a list of strings, found "</a>"'),
        ('rollout.quantization = "affine4"', "did you mean affine-4?"),
        ("rollout.group_size = 16", "expected an integer: 0 or 32 or 64 or 128, found 16"),
        ("optim.batch_size = 1.0", "expected an integer, found 1.0"),
        ('optim.learning_rate = "3"', 'expected a number, found "3"'),
        ("optim.betas = [0.9, 1]", "expected a list of 2 numbers, each: 0 <= x < 1, found [0.9, 1]"),
        ("rollout.bits_budget = 5.0", 'expected 0, or "affine-4" (or -3, -6) in rollout.quantization'),
        ("rollout.first_stage = 8", "expected less than rollout.num_generations, found 8"),
        ("optim.minibatches = 9", "expected at most 8, the completions of a batch step, found 9"),
        ("optim = 3", "optim: expected a table, found 3"),
        ("loss.sequence_range = [2, 1]", "expected a list of 2 numbers: 0 <= low < high, found [2, 1]"),
        ("loss.overlong.buffer = 513", "expected at most rollout.max_new_tokens = 512, found 513"),
        ("loss.surrogate = 'cipso'", "expected one of clip, dual_clip, cispo, sapo, dppo_tv, "),
        ("reward.functions = []", "one entry, or an env.factory whose class has get_reward, found []"),
        ('reward.functions = ["a.py:f", "a.py:f"]', "expected a list of strings: none twice, found"),
        ("data.chat_template_kwargs = {a = [1]}", "expected a table of strings, numbers, true or false"),
        ('data.answer = ""', "expected a column, your own reward in reward.functions, or an env.factory"),
        ('data.answer = ""\nanswer.form = "boxed"', 'expected "none" with data.answer = "", found "boxed"'),
        ('answer.form = "boxd"', 'file.py:function, found "boxd"; did you mean boxed?'),
        ('answer.form = "nowhere.py:read"', 'no such file: "nowhere.py"'),
        ('env.tools = ["tools.py"]', 'no such file: "tools.py"'),
        ("num_generation = 4", "unknown key; did you mean rollout.num_generations?"),
        ("model.lora.rnak = 1", "unknown key; did you mean model.lora.rank?"),
        ("loss.preset = 'dpao'", "did you mean dapo?"),
        ('env.shedule = "arrival"', "did you mean env.schedule?"),
        ("model.path = 'models\\qwen'", "is a Windows path"),
        ("reward.weights = [1.0, 2]", "expected a list of 5, one for each of reward.functions, found"),
        ('reward.functions = ["int_reward"]', "did you mean int_reward_func?"),
        ('reward.functions = ["a-b:c"]', "expected a built-in reward, package.module:function or path/to"),
        ('data.source = "rows.jsonl"', 'no such file or folder: "rows.jsonl"'),
        ('data.source = "two words"', 'expected "embedded", a file or folder'),
        ("data.image_max_pixels = 1000", "expected 0, or data.image, found 1000"),
        ("sft.min_reward = 0.5", "expected 1.0, or sft.completions, found 0.5"),
        ("teacher.task_weight = 0", "expected 1.0, or teacher.path, found 0.0"),
        ('teacher.hint = "x"\nenv.factory = "a:A"', 'expected "", or teacher.path, found "x"'),
        ('teacher.path = "t/t"\nrollout.first_stage = 2', 'expected 0 with teacher.path = "t/t", found 2'),
        ("data.pass_reward = 0.5", "expected 1.0 with correctness_reward_func, where right answers pass"),
        ('data.image = "p"\ndata.image_folder = "pisc"', 'no such folder: "pisc"'),
        ('run.name = "../up"', "expected a string: a relative folder name, no `..`, found"),
        (f"run.seed = {10**400}", "found an integer of 1329 bits"),
        (f"optim.eps = {10**400}", "expected a finite number, found an integer of 1329 bits"),
        ('stop.when = ["kl"]', 'expected "METRIC < NUMBER" or "METRIC < NUMBER for READINGS"'),
        ('stop.when = ["klx > 1"]', 'found "klx > 1"; did you mean kl?'),
        ('stop.when = ["rewards/int_reward/mean > 1"]', "did you mean rewards/int_reward_func/mean?"),
        ("data.image = 'p'\nenv.factory = 'a:A'", 'expected "" with data.image = "p", found "a:A"'),
        (
            'rollout.quantization = "mxfp4"\nrollout.group_size = 64',
            "expected 0 with mxfp4, whose group size is",
        ),
        (f'loss = {{{PACKED}}}\nmodel.tune = "lora"', 'expected "none" with model.tune = "lora", where the'),
        (f"loss = {{{PACKED}, ref_sync_every = 8}}", "expected 1.0, or loss.ref_sync_every = 0, with loss."),
        ("learning_rate = 1e-5", "unknown key; did you mean optim.learning_rate?"),
        ('model.path = "./models/nope"', 'no such file or folder: "./models/nope"'),
        ("model.path = 'C:\\models\\qwen'", '"C:\\\\models\\\\qwen" is a Windows path; expected a macOS'),
        ('model.path = "https://hf.co/Qwen/Q2.5"', 'is a Hub address; expected the name, "Qwen/Q2.5"'),
        ('model.path = "huggingface.co/Qwen/Q/tree/main"', 'Hub address; expected the name, "Qwen/Q"'),
        ('data.source = "hf://datasets/openai/gsm8k"', 'Hub address; expected the name, "openai/gsm8k"'),
        ('data.source = "s3://bucket/rows.jsonl"', "is an address; expected a folder, or a name on the Hub"),
        ('teacher.path = "Qwen/Q@v1"', '"Qwen/Q@v1" is a name with a revision; expected only Qwen/Q, or a'),
        ('model.path = ""', 'expected a string: one line, not empty, found ""'),
        ('model.path = "a b"', 'expected "embedded", a model folder or a name on the Hugging Face'),
        ('model_name = "a"', "unknown key; MLX-GRPO's keys have other names in sections: docs/migrating.md"),
    ],
)
def test_one_fault_is_one_line(faults, text, line):
    """The line starts with the file and the key, and says what is expected."""
    found = faults(text if text.startswith("model.path") else MODEL + text)
    assert len(found) == 1 and line in found[0], found
    keys = [part.split(" = ")[0].split(".")[0] for part in text.split("\n")]
    assert found[0].startswith(tuple(f"train.toml: {key}" for key in keys))


def test_all_faults_are_reported_at_once_in_the_order_of_the_file(faults):
    """Each line has its source; a path that does not exist is reported last."""
    text = "optim.lr = 1\noptim.batch_size = 0\nrollout.top_p = true\ndata.source = 'x.csv'\n"
    found = faults(f"{text}model.tune = 'full'", "eval.samples=-1", "eval.every=1")
    keys = [f"train.toml: {key}" for key in ("optim.lr", "optim.batch_size", "rollout.top_p", "model.path")]
    keys += ["--set: eval.samples", "train.toml: data.source"]
    assert [line.startswith(f"{key}: ") for line, key in zip(found, keys, strict=True)] == [True] * 6
    assert found[3] == (
        'train.toml: model.path: expected a string: "embedded", a model folder or a name on the '
        "Hugging Face Hub, found nothing"
    )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optim.learning_rate", "--set: expected section.key=value, found optim.learning_rate"),
        ("optim.learning_rate=fast", '--set: optim.learning_rate: expected a number, found "fast"'),
        ("optim.learning_rate=1\nx=2", '--set: optim.learning_rate: expected a number, found "1\\nx=2"'),
        ("optim.lerning_rate=1", "--set: optim.lerning_rate: unknown key; did you mean optim.learning_rate?"),
        ("optin.eps=1", "--set: optin.eps: unknown key; did you mean optim.eps?"),
        ("chekpoint.z=1", "--set: chekpoint.z: unknown key; did you mean checkpoint?"),
        ("num_generations=1", "--set: num_generations: unknown key; did you mean rollout.num_generations?"),
        ("optim=3", "--set: optim: expected a table, found 3"),
        ("env=3", "--set: env: expected a table, found 3"),
        ("zzz=3", f"--set: zzz: unknown key; the sections are {', '.join(SECTIONS)}"),
        ("model.path=./nope", '--set: model.path: no such file or folder: "./nope"'),
    ],
)
def test_a_faulty_set_option_is_reported_as_such(faults, override, line):
    """The line names --set, not the file."""
    assert faults(MODEL, override) == [line]
    assert faults(MODEL + "optim.eps = 1e-6", override) == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[model\npath = 1", "(at line 1, column 7)"),
        ("seed = 1\nseed = 2\n", "(at line 2, column 9)"),
        (f"a = {'1' * 5000}", "5000 digits"),
    ],
)
def test_a_syntax_error_names_its_place(faults, text, line):
    """One line contains the file and the position from Python's parser."""
    (found,) = faults(text)
    assert found.startswith("train.toml: not TOML: ") and line in found


def test_a_byte_order_mark_is_accepted(load):
    """Some editors write one before UTF-8 text."""
    assert load("\ufeff" + MODEL).model.path == "embedded"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("quickstrat", "quickstrat: no such file or preset; did you mean the preset quickstart?"),
        ("zzzzzz.toml", f"zzzzzz.toml: no such file or preset; the presets are {', '.join(preset_names())}"),
        (".", ".: cannot be read: Is a directory"),
        ("a\0b", "a\\x00b: no such file or preset; the presets are"),
        ("x" * 5000, "x" * 5000 + ": no such file or preset; the presets are"),
        ("large.toml", "large.toml: expected at most 131,072 bytes, found more"),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, monkeypatch, name, line):
    """An unknown name is answered with the nearest preset or all presets; the file size is limited."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large.toml").write_text("#" * 200_000)
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert caught.value.problems[0].startswith(line)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("loss.delta=1.1", "loss.delta: "),
        ("loss.surrogate='dual_clip'", "loss."),
        ("loss.correction='sequence_mask'", "loss.correction: "),
        ("loss.aggregation='sequence_sum_norm'", "loss.aggregation: "),
        ("loss.ref_quantization='mxfp8'", 'loss.ref_quantization: expected "none", or loss'),
        ("loss.ref_sync_every=2", "loss.ref_sync_every: expected 0, or loss.beta > 0"),
        ("system.disable=['shared_prefi']", "system.disable: no mechanism 'shared_prefi'; the nearest name"),
    ],
)
def test_check_refuses_a_loss_without_meaning(load, text, start):
    """Faults that only the core detects become a ConfigError with the key and its source."""
    for source, config in (("train.toml", load(MODEL + text)), ("--set", load(MODEL, text))):
        with pytest.raises(ConfigError) as caught:
            config.check()
        (line,) = caught.value.problems
        assert line.startswith(f"{source}: {start}")


def test_a_name_that_utf_8_cannot_represent_is_refused(tmp_path):
    """The resolved config, which contains the names of a table, is written as text."""
    (tmp_path / "c.json").write_text(
        '{"model": {"path": "embedded"}, "data": {"chat_template_kwargs": {"\\ud800": true}}}'
    )
    with pytest.raises(ConfigError, match="text that UTF-8 can represent"):
        load_config(str(tmp_path / "c.json"))


def test_a_condition_may_have_a_number_with_underscores():
    """As in TOML."""
    condition = Condition.parse("completions/mean_length > 1_000")
    assert condition is not None and condition.limit == 1000
