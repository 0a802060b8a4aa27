"""Real clients, each in an environment of its own, as their pins differ.

This one has openai 3. GRPO_FN_CLIENTS names a folder with others (`python -m venv CLIENTS/openai2` and
`pip install 'openai<3'`). A test is skipped if its client is in none.
"""

import subprocess
from pathlib import Path

import pytest

from tests.support.serving import embedded, python_with, served, serving

SCRIPTS = Path(__file__).parents[2] / "support" / "clients"
CLIENTS = [
    ("openai_chat", "openai>=2,<3"),
    ("openai_chat", "openai>=3"),
    ("renderers_generate", "renderers"),
    ("openenv_probe", "openenv"),
]


@pytest.mark.parametrize(("script", "client"), CLIENTS)
def test_a_real_client(script, client):
    """The client's own checks pass."""
    python = python_with(client)
    loaded = embedded()
    with serving(loaded.engine, served(loaded)) as ours:
        command = [python, SCRIPTS / f"{script}.py", ours.server.url, loaded.path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("fine\n"), done.stdout + done.stderr
