"""Real clients, each in an environment of its own, as their pins differ.

This one has openai 3. GRPO_FN_CLIENTS names a folder with others (`python -m venv CLIENTS/openai2` and
`pip install 'openai<3'`). A test is skipped if its client is in none.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serving import embedded, served, serving

SCRIPTS = Path(__file__).parents[2] / "support" / "clients"
CLIENTS = [
    ("openai_chat", "openai>=2,<3"),
    ("openai_chat", "openai>=3"),
    ("renderers_generate", "renderers"),
    ("openenv_probe", "openenv"),
]
FINDS = """
import sys
from importlib import metadata
name, *bounds = sys.argv[1].replace(">=", " >= ").replace("<", " < ").replace(" < =", " <= ").split()
found = int(metadata.version(name).split(".")[0])
rest = "".join(bounds).split(",")
sys.exit(not all(not each or eval(f"{found}{each}") for each in rest))
"""


def python_with(client):
    """An interpreter whose environment has this client; skips the test if there is none."""
    folder = os.environ.get("GRPO_FN_CLIENTS", "")
    others = sorted(Path(folder).glob("*/bin/python")) if folder else ()
    for python in (sys.executable, *others):
        if subprocess.run([python, "-c", FINDS, client], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"neither this environment nor one of GRPO_FN_CLIENTS has {client}")


@pytest.mark.parametrize(("script", "client"), CLIENTS)
def test_a_real_client(script, client):
    """It gets what it expects, by its own checks."""
    python = python_with(client)
    loaded = embedded()
    with serving(loaded.engine, served(loaded)) as ours:
        command = [python, SCRIPTS / f"{script}.py", ours.server.url, loaded.path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("fine\n"), done.stdout + done.stderr
