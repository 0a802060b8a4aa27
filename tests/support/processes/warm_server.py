"""The server of `warm_process`: it imports the package once, and answers each request with a fork of itself.

    python -m tests.support.processes.warm_server SOCKET

A request on the Unix socket is one byte with four file descriptors: the new process's standard input, output
and error, and a file with the rest as JSON. The answers on the same connection are two lines: the process's
number, and how it ended, as `os.waitpid` reports it. The server ends at the end of its standard input.
"""

from __future__ import annotations

import gc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import Any

LOADED = (  # nothing of it computes when it is imported: MLX works in a process that was forked before
    "grpo_fn",
    "runners.cli",
    "runners.commands.chat",
    "runners.commands.check",
    "runners.commands.eval",
    "runners.commands.generate",
    "runners.training.train",
    "mlx_lm",
    "mlx_lm.tuner.utils",
    "datasets",
)


def serve(path: str) -> dict[str, Any] | None:
    """Forks for each request until standard input ends; in such a fork it returns the request."""
    for name in LOADED:
        try:
            __import__(name)
        except ImportError:  # of an extra, or renamed: the process imports what it needs
            continue
    gc.collect()
    gc.freeze()
    running: dict[int, socket.socket] = {}
    ended, wake = os.pipe()
    for number in (ended, wake):
        os.set_blocking(number, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(path)
        listener.listen()
        for source in (listener, ended, 0):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj == ended:
                    os.read(ended, 4096)
                    _report(running)
                    continue
                connection, _ = listener.accept()
                _, streams, _, _ = socket.recv_fds(connection, 1, 4)
                with os.fdopen(streams.pop(), encoding="utf-8") as file:
                    request = json.load(file)
                child = os.fork()
                if child == 0:
                    for other in (connection, listener, *running.values()):
                        other.close()
                    selector.close()
                    signal.set_wakeup_fd(-1)
                    for number in (ended, wake):
                        os.close(number)
                    _become(request, streams)
                    return request
                for number in streams:
                    os.close(number)
                connection.sendall(f"{child}\n".encode())
                running[child] = connection


def _report(running: dict[int, socket.socket]) -> None:
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with running.pop(child) as connection:
            try:
                connection.sendall(f"{status}\n".encode())
            except OSError:  # whoever asked has gone
                continue


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Streams, signals, folder, environment and arguments of a process that has just begun."""
    for place, number in enumerate(streams):
        os.dup2(number, place)
    for number in streams:
        if number > 2:
            os.close(number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    if request["terminal"]:  # so that Ctrl-C typed into it becomes a signal
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
    sys.stdout = sys.__stdout__ = _writer(1)
    sys.stderr = sys.__stderr__ = _writer(2)
    sys.path[0] = "" if request["arguments"][0] == "-c" else request["folder"]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = request["arguments"][1:]


def _writer(number: int) -> Any:
    """A stream as Python makes it for standard output and error."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = io.FileIO(number, "w")
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # pyright: ignore[reportArgumentType]
        encoding="utf-8",
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=number == 2 or raw.isatty(),
        write_through=unbuffered,
    )


def _run(request: dict[str, Any]) -> None:
    kind, program = request["arguments"][:2]
    if kind == "-m":
        sys.modules.pop(program, None)  # it runs as __main__, as if it had not been imported
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.argv[0] = "-c"
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    exec(compile(program, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    asked = serve(sys.argv[1])
    if asked is not None:
        _run(asked)
