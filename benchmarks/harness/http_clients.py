"""Clients of a server, in a separate process: `python -m benchmarks.harness.http_clients PORT`.

For each line on standard input, a JSON list of [path, body], it sends all requests at once and
reads their streams to the end. It prints the seconds until the last one has ended and until each
one's first token, and the number of tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Any

TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


async def stream(port: int, path: str, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds until the first token, and the number of tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    first = 0.0
    events = 0
    end = b""
    while chunk := await reader.read(1 << 16):
        events += chunk.count(b"data: {")
        if not first and events > ("messages" in body):  # a chat's first event has no token
            first = time.perf_counter() - began
        end = (end + chunk)[-4096:]
        if b"[DONE]" in end:
            break
    writer.close()
    found = TOKENS.findall(end)
    if not found:
        raise RuntimeError(end.decode(errors="replace"))
    return first, int(found[-1])


async def serve_line(port: int, line: str) -> dict[str, Any]:
    """The results of one line's requests."""
    began = time.perf_counter()
    found = await asyncio.gather(*(stream(port, path, body) for path, body in json.loads(line)))
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "first": [each[0] for each in found],
        "tokens": sum(each[1] for each in found),
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(serve_line(int(sys.argv[1]), line))), flush=True)
