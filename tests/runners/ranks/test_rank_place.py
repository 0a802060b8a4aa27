"""What a rank does for its launcher."""

import select
import subprocess
import sys

import pytest

CODE = """
import sys
from runners.ranks.rank_place import let_launcher_sleep
let_launcher_sleep({"MLX_RANK": "0"} if sys.argv[1] == "rank" else {})
print("done", flush=True)
sys.stdout.close()
import time
time.sleep(6000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a pipe cannot be filled from its other end")
@pytest.mark.parametrize("who", ["rank", "alone"])
def test_a_launcher_finds_nothing_to_write_to(who):
    """A rank's standard input takes no more, so that `select` waits; another process's is left alone."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "done\n"
        _, takes, _ = select.select([], [process.stdin], [], 0)
        assert bool(takes) == (who == "alone")
    finally:
        process.kill()
        process.communicate()


def test_another_standard_input_than_a_pipe_is_left_alone(tmp_path):
    """Such as a file."""
    (tmp_path / "in").write_text("kept")
    with open(tmp_path / "in") as file:
        code = CODE.replace("time.sleep(6000)", "pass")
        done = subprocess.run(
            [sys.executable, "-c", code, "rank"], stdin=file, capture_output=True, check=True
        )
    assert done.stdout == b"done\n" and (tmp_path / "in").read_text() == "kept"
