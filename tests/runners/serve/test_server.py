"""A server as an outsider meets it: other sites' pages, wrong keys, bodies and readers without end."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from runners.serve.service import Limits
from tests.runners.serve.test_wire import CHAT, MESSAGES
from tests.support.serving import Client, ScriptedEngine, served, serving, soon

LIMITS = Limits(body=20_000, idle=1.0, connections=40, seconds=3.0)


@pytest.fixture
def client(loaded):
    """A client of a server with tight limits, whose model speaks for a while."""
    with serving(
        ScriptedEngine(loaded.tokenizer, ["1+" * 100] * 50), served(loaded), limits=LIMITS
    ) as client:
        yield client


@pytest.fixture
def keyed(loaded):
    """A client with the key of a server that requires one."""
    with serving(ScriptedEngine(loaded.tokenizer, ["yes"] * 50), served(loaded), key="the-key") as client:
        yield client


def connect(client):
    """A bare connection."""
    return socket.create_connection(tuple(client.server._socket.getsockname()), timeout=20)


def request(body=b"", *, length=None, path=CHAT, headers=()):
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length or len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def is_free(client):
    """Whether the engine and the service are idle again soon."""
    return soon(lambda: client.service.idle and not client.service.engine.jobs, 10.0)


HOSTS = [
    "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:8000", "",
    "[::1].evil",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nothing"])
def test_a_name_that_was_made_to_point_here_gets_nothing(client, host, path):
    """DNS rebinding: requests with another Host are refused on every path."""
    answer = client.http.get(path, headers={"Host": host})
    assert answer.status_code in (400, 403) and "tiny" not in answer.text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:4", "[::1]"])
def test_this_machine_s_names_are_answered(client, host):
    """Any port is accepted, because a tunnel may have another one."""
    assert client.http.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1", "file://", "http://localhost.evil"]
)
def test_pages_of_other_sites_are_refused(client, origin):
    """A request from a page of another site (Origin) is refused, and no header allows it."""
    answer = client.http.post(CHAT, json={"messages": MESSAGES}, headers={"Origin": origin})
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert client.service.engine.requests == []


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Bearer the-ke", "Bearer the-key2", "the-key", "Basic the-key"]
)
def test_without_the_key_nothing_is_answered(keyed, header):
    """Every wrong key gets 401."""
    for method, path in (("GET", "/v1/models"), ("POST", CHAT)):
        answer = keyed.http.request(method, path, headers={"Authorization": header})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert keyed.service.engine.requests == []


def test_with_the_key_everything_is(keyed):
    """The server's key works, and each session has a key that ends with it."""
    assert keyed.http.get("/v1/models").status_code == 200
    session = keyed.service.open()
    guest = Client(keyed.server, session.key)
    assert guest.chat("?")["choices"][0]["message"]["content"] == "yes"
    keyed.service.close(session)
    assert guest.post(CHAT, {"messages": MESSAGES})[0] == 401


def test_a_body_that_is_too_large_is_not_read(client):
    """A large body gets 413, with or without a Content-Length."""
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 30_000}]})
    assert client.http.post(CHAT, content=large).status_code == 413
    pieces = (b"x" * 1000 for _ in range(100_000))
    try:
        assert client.http.post(CHAT, content=pieces).status_code == 413
    except Exception as error:  # the connection may be gone before all of it was sent
        assert "ead" in type(error).__name__ or "rite" in type(error).__name__


def test_a_request_that_does_not_come_is_not_waited_for(client):
    """After the idle time, the server closes connections with half a header, half a body, or nothing."""
    for begun in (b"", b"POST /v1/chat", request(b"{", length=500)):
        with connect(client) as connection:
            began = time.monotonic()
            connection.sendall(begun)
            while connection.recv(4096):
                pass
            assert time.monotonic() - began < 15
    assert client.http.get("/health").status_code == 200


def test_a_reader_that_does_not_read_frees_its_row(client):
    """A stream whose buffers are full is cancelled; other clients are answered meanwhile."""
    body = json.dumps({"messages": MESSAGES, "stream": True, "n": 40, "logprobs": True}).encode()
    with connect(client) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(request(body))
        assert client.http.get("/health").status_code == 200
        assert is_free(client)


def test_a_call_has_an_end(client):
    """After the time limit, the call gets 408 and its row is freed."""
    engine = client.service.engine
    engine.collect = lambda least=1, **options: time.sleep(0.01) or {}
    answer = client.http.post(CHAT, json={"messages": MESSAGES})
    assert answer.status_code == 408
    del engine.collect
    assert is_free(client) and engine.freed


def test_more_connections_than_there_may_be(client):
    """Connections beyond the limit get 503; after the others close, the server answers again."""
    opened = [connect(client) for _ in range(60)]
    with pytest.raises(AssertionError):
        for _ in range(5):
            fresh = Client(client.server)
            assert fresh.http.get("/health").status_code == 200
    for connection in opened:
        connection.close()
    time.sleep(0.3)
    assert Client(client.server).http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n",
        b"GET http://evil/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"\r\n" * 50_000,
    ],
)
def test_bytes_that_are_no_request(client, sent):
    """The server answers with an error or closes the connection, and still answers other clients."""
    with connect(client) as connection:
        try:
            connection.sendall(sent)
            answer = connection.recv(4096)
        except OSError:
            answer = b""
    assert not answer or answer.split()[1] in (b"400", b"403", b"404", b"431")
    assert client.http.get("/health").status_code == 200


def test_clients_do_not_see_one_another(loaded):
    """Each client gets its own answer, although the rows of all clients decode together."""
    with serving(loaded.engine, served(loaded)) as client, ThreadPoolExecutor(12) as pool:
        texts = [f"{n}+{n}=" for n in range(24)]
        body = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
        alone = [client.post("/v1/completions", {"prompt": text, **body})[1] for text in texts]

        def ask(text):
            return Client(client.server).post("/v1/completions", {"prompt": text, **body})[1]

        beside = list(pool.map(ask, texts))
        for one, other in zip(alone, beside, strict=True):
            assert one["prompt_token_ids"] == other["prompt_token_ids"]
        same = sum(one["choices"] == other["choices"] for one, other in zip(alone, beside, strict=True))
        assert same >= 20  # the rounding of batched products may turn a near tie


def test_errors_tell_nothing_of_the_machine(client):
    """Errors contain no path, no traceback and no server name."""
    bad = [client.http.post(CHAT, content=b"{"), client.http.post(CHAT, json={"tools": 1})]
    for answer in (*bad, client.http.get("/x")):
        assert "/work" not in answer.text and "Traceback" not in answer.text
        assert "server" not in answer.headers
