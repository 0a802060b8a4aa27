"""200 clients, a fifth of them bad, at one server: every good request is answered, and memory stays flat.

GRPO_FN_LOAD_SECONDS and GRPO_FN_LOAD_CLIENTS say how long (60) and how many (200).
"""

import concurrent.futures
import json
import os
import random
import resource
import socket
import time

import httpx2

from runners.serve.service import Limits
from tests.runners.serve.test_wire import CHAT, TEXT
from tests.support.serving import Client, embedded, served, serving

SECONDS = float(os.environ.get("GRPO_FN_LOAD_SECONDS", "60"))
CLIENTS = int(os.environ.get("GRPO_FN_LOAD_CLIENTS", "200"))


def good(client, chance, counts):
    """A normal request; it must be answered, at the latest when there is room again."""
    body = {"max_tokens": chance.randint(1, 24), "seed": chance.randrange(2**40)}
    streams = chance.random() < 0.5
    path = chance.choice([CHAT, TEXT])
    text = f"{chance.randint(1, 99)}+{chance.randint(1, 99)}="
    body |= {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    while True:
        if streams:
            with client.http.stream("POST", path, json={**body, "stream": True}) as answer:
                lines = [line for line in answer.iter_lines() if line]
                whole = answer.status_code != 200 or lines[-1] == "data: [DONE]"
        else:
            answer = client.http.post(path, json=body)
            whole = True
        if answer.status_code not in (429, 503):
            counts["good"] += 1
            counts["answered"] += answer.status_code == 200 and whole
            return
        counts["waited"] += 1
        time.sleep(float(answer.headers.get("retry-after", "1")) * chance.random())


def bad(client, chance, counts):
    """A wrong request, or one whose client leaves or does not read."""
    body = json.dumps({"messages": [{"role": "user", "content": "7+5"}], "max_tokens": 200, "stream": True})
    kinds = ["junk", "wrong", "leave", "half", "stall"]
    kind = chance.choice(kinds)
    counts[kind] += 1
    if kind in ("junk", "wrong"):
        content = chance.randbytes(300) if kind == "junk" else b'{"messages": 5, "temprature": 1}'
        assert client.http.post(CHAT, content=content).status_code == 400
        return
    with socket.create_connection(client.server._socket.getsockname(), timeout=30) as connection:
        length = len(body) * (3 if kind == "half" else 1)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}"
        connection.sendall(head.encode())
        if kind == "leave":
            connection.recv(10)
        else:
            time.sleep(chance.random() * 2)


def test_no_request_is_lost_and_memory_is_flat():
    """The engine, the sessions and the threads hold no more at the end than after the first tenth."""
    loaded = embedded()
    counts = dict.fromkeys(("good", "answered", "waited", "junk", "wrong", "leave", "half", "stall"), 0)
    limits = Limits(turns=64, connections=2 * CLIENTS, idle=20.0)
    end = time.monotonic() + SECONDS
    sizes = []
    lost = []

    def work(number):
        chance = random.Random(number)
        client = Client(clients.server)
        while time.monotonic() < end:
            act = bad if number % 5 == 0 else good
            try:
                act(client, chance, counts)
            except (httpx2.HTTPError, OSError) as error:
                if act is good:
                    counts["good"] += 1
                    lost.append(repr(error))
                client = Client(clients.server)

    with serving(loaded.engine, served(loaded), limits=limits) as clients:
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            done = [pool.submit(work, number) for number in range(CLIENTS)]
            while not all(each.done() for each in done):
                time.sleep(SECONDS / 10)
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            for each in done:
                each.result()
        service = clients.service
        patience = time.monotonic() + 30
        while not service.idle and time.monotonic() < patience:
            time.sleep(0.05)
        assert service.idle and len(clients.session.rows) <= limits.rows
        assert all(row.turn is None for row in clients.session.rows)
        assert service._room._value == limits.turns
        assert len(loaded.engine._jobs) == 0 and len(loaded.engine._kept) <= limits.rows
    print(counts, sizes, lost)  # kB
    assert counts["good"] == counts["answered"] > CLIENTS / 4
    assert sizes[-1] < 1.15 * sizes[len(sizes) // 3] + 20_000
