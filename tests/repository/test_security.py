"""What SECURITY.md promises, beyond the tests of each file format."""

import json
from pathlib import Path

import pytest

from runners.config.loading import load_config
from runners.conversion.export import open_source
from runners.data.rendering import render
from runners.errors import UserError, one_line
from runners.models import model_reader
from runners.models.folders import resolve_model
from runners.models.model_reader import load_tokenizer
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.processes.new_process import python
from tests.support.tiny_models import make_model_folder

PLANTED = "hf_planted4Zq8wTest"


WATCHED = """
import os, sys
sent = []
def watch(event, arguments):
    if event.startswith("socket.") and event != "socket.__new__":
        sent.append((event, str(arguments)))
        raise OSError("no network here")
sys.addaudithook(watch)
from runners.cli import main
try:
    main(sys.argv[1:])
finally:
    print("SENT", sent, file=sys.stderr)
"""
QUICK = ["data.max_samples=64", "optim.max_steps=3", "optim.batch_size=2", "eval.samples=4"]
QUICK.append("rollout.max_new_tokens=16")


def watched(folder, *arguments, **environ):
    """A command in a new process in which every socket is refused and recorded."""
    done = python("-c", WATCHED, *arguments, cwd=folder, code=None, HF_TOKEN=PLANTED, **environ)
    return done, done.stderr.rpartition("SENT ")[2].strip()


LEAK = """
import os
def leak(completions, **_):
    raise ValueError('cannot log in with ' + os.environ['HF_TOKEN'])
"""


def test_a_run_needs_no_network_and_tells_no_secret(tmp_path):
    """The quickstart opens no socket, and planted secrets reach no file and no message."""
    (tmp_path / "leak.py").write_text(LEAK)
    secrets = {"WANDB_API_KEY": "w" + PLANTED, "MY_PASSWORD": "p" + PLANTED}
    values = [*QUICK, f"run.output_dir={tmp_path}", "checkpoint.every=2", "reward.stop_if_all_fail=false"]
    values.append('reward.functions=["leak.py:leak", "correctness_reward_func"]')
    sets = [part for value in values for part in ("--set", value)]
    done, sent = watched(tmp_path, "run", "quickstart", *sets, **secrets)
    assert done.returncode == 0, done.stderr
    assert sent == "[]"
    assert "failed: leak.py, line 4: ValueError: cannot log in with $HF_TOKEN" in done.stdout
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.resolved.json", "training_log.jsonl", "model.safetensors"} <= {
        file.name for file in files
    }
    for text in (done.stdout, done.stderr, *(path.read_bytes().decode("latin-1") for path in files)):
        assert PLANTED not in text


def test_a_name_on_the_hub_does_open_a_socket(tmp_path):
    """So the test above can fail; the error has no secret either."""
    done, sent = watched(
        tmp_path, "generate", "nobody/nothing", "hello", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0"
    )
    assert done.returncode == 2 and "socket.getaddrinfo" in sent
    assert PLANTED not in done.stdout + done.stderr


def test_secrets_are_known_by_their_names():
    """Tokens, keys, passwords and proxies; short values, which may be words, stay."""
    environ = {"HF_TOKEN": "abcdefgh1", "https_proxy": "http://me:pw@proxy", "KEY": "short"}
    environ["HOME"] = "/home/anyone"
    text = one_line("abcdefgh1 via http://me:pw@proxy in /home/anyone\nshort", environ)
    assert text == "$HF_TOKEN via $https_proxy in /home/anyone\\nshort"


@pytest.fixture(name="folder")
def _folder(tmp_path):
    return make_model_folder(tmp_path / "model")


def test_a_config_in_a_model_folder_is_never_read(folder, tmp_path, monkeypatch):
    """Only the run's own config counts, and no reward of the folder's runs."""
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\ndef f(completions, **_):\n    return []\n")
    planted = {"run": {"name": "evil"}, "reward": {"functions": ["evil.py:f"]}}
    for name in ("config.resolved.json", "trainer_state.json"):
        (folder / name).write_text(json.dumps(planted))
    for name in ("train.toml", "quickstart.toml"):
        (folder / name).write_text('run.name = "evil"\nreward.functions = ["evil.py:f"]\n')
    monkeypatch.chdir(tmp_path)
    overrides = [*QUICK, f"model.path={folder}", "run.output_dir=out", "eval.at_start=false", "run.name=mine"]
    result = run_training(load_config("quickstart", overrides), report=Quiet())
    assert result.folder == Path("out/mine") and not ran.exists()
    assert [path.name for path in Path("out").iterdir()] == ["mine"]
    left = {path.name for path in (result.folder / "final").iterdir()}
    assert not left & {"config.resolved.json", "trainer_state.json"}
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load_config(str(folder))


TEMPLATES = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ messages.__init__.__globals__ }}",
    "a function's code": "{{ (raise_exception).__globals__['os'].system('touch ran') }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('touch ran') }}",
    "import": "{% import 'os' as os %}{{ os.system('touch ran') }}",
    "include": "{% include '/etc/passwd' %}",
    "changing the messages": "{% set _ = messages.append(1) %}{{ messages }}",
    "a range without end": "{% for i in range(1000000000) %}x{% endfor %}",
    "format": "{{ '{0.__class__.__mro__}'.format(1) }}",
}


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_chat_templates_are_rendered_in_a_sandbox(folder, tmp_path, monkeypatch, template, place):
    """A template that reaches for Python, the disk or forever is refused in one line."""
    monkeypatch.chdir(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if place == "tokenizer_config.json":
        config["chat_template"] = template
    else:
        monkeypatch.setattr(model_reader, "check_tokenizer", lambda *_: None)
        del config["chat_template"]
        (folder / place).write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    with pytest.raises(UserError, match="chat template fails") as caught:
        render(tokenizer, ({"role": "user", "content": "hi"},))
    assert "\n" not in str(caught.value)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "name", ["notes.txt", "additional_chat_templates", "additional_chat_templates/a.jinja"]
)
def test_no_link_of_a_model_takes_a_file_of_the_user_along(folder, tmp_path, name):
    """Export copies files beside the weights, and may upload them."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text(PLANTED)
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "secret" if link.suffix == "" else tmp_path / "secret" / "key")
    with pytest.raises(UserError, match=f"{name} is a link to a file outside the folder"):
        open_source(str(folder), tmp_path / "out")


def test_links_of_the_hubs_cache_lead_to_its_blobs(folder, tmp_path):
    """Links within the folder are followed too, and the folder may be a link."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "notes.txt").symlink_to("tokenizer_config.json")
    (tmp_path / "alias").symlink_to(snapshot)
    assert resolve_model(str(tmp_path / "alias")) == snapshot
