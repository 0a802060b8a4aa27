"""Persistent folders that other users could have filled are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runners.checkpoints.run_folder import locked
from runners.errors import UserError
from runners.files.durable import PREFIX, sweep
from runners.files.json_files import JsonLines
from runners.files.own_folder import foreign, own_folder, remember, remembers
from runners.machine.programs import gpu_programs
from runners.machine.programs.gpu_programs import keep_programs
from runners.machine.startup import separate_programs

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")


def open_to_all(path):
    path.mkdir(parents=True)
    path.chmod(0o777)


def of_nobody(path):
    path.mkdir(parents=True)
    os.chown(path, NOBODY, NOBODY)


def a_link_of_nobody(path):
    """A link to a folder of this user: the owner of a link chooses its target."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "mine").mkdir()
    path.symlink_to(path.parent / "mine")
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def a_file(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


HOSTILE = [
    open_to_all,
    a_file,
    *(pytest.param(each, marks=as_root) for each in (of_nobody, a_link_of_nobody)),
]


@pytest.mark.parametrize("made", HOSTILE)
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, made):
    """The message has path and reason; a new folder is private, whatever the umask is."""
    made(tmp_path / "bad")
    with pytest.raises(UserError, match="bad: expected a folder of this user that nobody else can"):
        own_folder(tmp_path / "bad")
    before = os.umask(0)
    try:
        assert own_folder(tmp_path / "new").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    assert not foreign(tmp_path / "link")  # this user's own


@pytest.mark.parametrize("made", HOSTILE)
@pytest.mark.parametrize("place", [".", "checked"])
def test_a_cache_that_others_can_write_to_is_not_believed(tmp_path, monkeypatch, made, place):
    """Its records do not count, nothing is recorded, and no program is loaded from it."""
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "cache"))
    remember("checked", "good")
    assert remembers("checked", "good")
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "other"))
    made(tmp_path / "other" / place)
    if (folder := tmp_path / "other" / "checked").parent.is_dir():
        folder.mkdir(exist_ok=True) if place == "." else None
        (folder / "planted").touch() if folder.is_dir() else None
    remember("checked", "new")
    assert not remembers("checked", "planted") and not remembers("checked", "new")
    for name in ("MLX_PTX_CACHE_DIR", "MLX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(gpu_programs, "_LOCKS", [])
    keep_programs("0.32.4", "sm_90")
    assert ("MLX_PTX_CACHE_DIR" in os.environ) == (place == "checked")


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("made", HOSTILE)
def test_programs_come_from_a_folder_of_this_user(tmp_path, monkeypatch, made, rank):
    """The temporary folder is shared by all users; this holds for all ranks and single processes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    environ: dict[str, str] = {}
    separate_programs(rank, environ)
    assert environ["TMPDIR"] == str(tmp_path / f"grpo-{os.getuid()}-rank-{rank}")
    separate_programs(0, environ)  # as a command that prepares once more
    assert environ["TMPDIR"].endswith(f"rank-{rank}")
    Path(environ["TMPDIR"]).rmdir()
    made(Path(environ["TMPDIR"]))
    with pytest.raises(UserError, match=f"rank-{rank}: expected a folder of this user"):
        separate_programs(rank, {})


@pytest.mark.skipif(sys.platform != "linux", reason="MLX for a CPU")
def test_mlx_loads_no_program_that_another_user_may_have_planted(tmp_path):
    """If another user creates /tmp/mlx first, a command compiles its own program elsewhere."""
    tmp_path.chmod(0o1777)
    (tmp_path / "mlx").mkdir(mode=0o777)
    code = (
        "from runners.machine import startup\nstartup.prepare()\nimport mlx.core as mx\n"
        "with mx.stream(mx.cpu):\n    mx.eval(mx.compile(lambda x: mx.exp(x) + x)(mx.ones(3)))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list((tmp_path / "mlx").rglob("*")) and list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("name", [".lock", "training_log.jsonl"])
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
def test_files_of_a_run_folder_that_are_written_again_are_no_links(tmp_path, name, kind):
    """In a folder made by somebody else, a link could make a run truncate any file of this user."""
    victim, file = tmp_path / "victim", tmp_path / "run" / name
    victim.write_text("mine")
    file.parent.mkdir()
    {"link": file.symlink_to, "hard link": file.hardlink_to, "fifo": lambda _: os.mkfifo(file)}[kind](victim)
    with pytest.raises((OSError, UserError)):
        if name == ".lock":
            with locked(file.parent, "run.name"):
                pass
        else:
            JsonLines(file, keep=0)
    assert victim.read_text() == "mine"


@as_root
def test_another_users_staging_folder_is_theirs_to_clear(tmp_path):
    """The folder that it moved aside is not restored."""
    stage = tmp_path / f"{PREFIX}{'0' * 12}-model"
    (stage / "old").mkdir(parents=True)
    (stage / "new").mkdir()
    os.chown(stage, NOBODY, NOBODY)
    sweep(tmp_path)
    assert stage.is_dir() and not (tmp_path / "model").exists()
