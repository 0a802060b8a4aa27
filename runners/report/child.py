"""`python -m runners.report.child FOLDER DESCRIPTOR`: the live page on an open socket."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from runners.report.server import serve

if __name__ == "__main__":
    os.nice(10)  # the run has priority
    serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), with_parent=True)
