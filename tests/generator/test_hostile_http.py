"""Whatever comes over HTTP, the server replies in OpenAI's form or closes the connection by its own deadline, spends at
most a CPU second on it, keeps its memory, and serves a good client beside it.

The real process, with a deadline of a second and few files to open.
"""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ductile.generator.server.openai_api import NEUTRAL, ChatRequest, CompletionRequest, TokenRequest
from tests.generator.conftest import Family
from tests.generator.hostile_requests import BOMBS, COMPLETIONS, GOOD, HEAD, MIB, SLOW, TOKENS, WIRE, big
from tests.generator.test_serve import complaints, metric, server, wait_for
from tests.nightly import examples, mostly_nightly

pytestmark = pytest.mark.slow

MAX_CPU_S = 1.0
MAX_GROWTH_BYTES = 200 * MIB
TIMEOUT_S = 1.0
"""The server's, for a client that is slow."""
PATIENCE_S = 100.0
"""Ours, on a busy machine."""


@dataclass
class Server:
    url: str
    pid: int
    failures: list[str] = field(default_factory=list[str])
    num_served: int = 0
    num_hostile: int = 0
    most_memory_bytes: int = 0

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def cpu_s(self) -> float:
        user, system = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def connect(self, payload: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=PATIENCE_S)
        with suppress(ConnectionError):  # it may be closed in the middle
            connection.sendall(payload)
        return connection

    def serve_well(self, stop: threading.Event) -> None:
        """A good client, at work all the time."""
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
            while not stop.wait(0.05):
                self.most_memory_bytes = max(self.most_memory_bytes, self.memory_bytes())
                try:
                    response = client.completions.create(model="letters", prompt="1+1=", max_tokens=2, temperature=0)
                    assert response.choices[0].finish_reason in ("length", "stop")
                    self.num_served += 1
                except Exception as error:
                    self.failures.append(f"{type(error).__name__}: {error}")


@pytest.fixture(scope="module")
def hostile(qwen3: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings: dict[str, Any] = {"server": {"timeout_s": TIMEOUT_S, "served_model_name": "letters"}, "block_size": 16}
    model = {"name": str(qwen3.folder), "max_model_len": 256}
    with server(qwen3.folder, tmp_path_factory.mktemp("hostile"), fault="few_files", model=model, **settings) as (
        url,
        process,
    ):
        one = Server(url, process.pid)
        stop = threading.Event()
        good = threading.Thread(target=one.serve_well, args=(stop,))
        good.start()
        wait_for(lambda: one.num_served > 3)
        before = one.memory_bytes()
        yield one
        stop.set()
        good.join(PATIENCE_S)
        assert one.failures == []
        assert one.num_hostile >= 300
        assert one.most_memory_bytes < before + MAX_GROWTH_BYTES
        wait_for(lambda: metric(url, "sequences_running") == metric(url, "sequences_waiting") == 0)
        process.terminate()
        assert process.wait(100) == 0
        assert process.stdout is not None
        log = process.stdout.read()
        assert not [line for line in complaints(log) if " WARNING refused: " not in line]


@pytest.fixture(autouse=True)
def _the_good_client_is_served(hostile: Server) -> Iterator[None]:
    yield
    assert hostile.failures == []


@pytest.fixture
def frugal(hostile: Server) -> Iterator[Server]:
    """What a test of one request spends on it, beside some good ones."""
    before = hostile.cpu_s()
    yield hostile
    hostile.num_hostile += 1
    assert hostile.cpu_s() - before < MAX_CPU_S


def has_openais_form(response: httpx.Response) -> bool:
    body = response.json()
    if response.status_code == 200:
        return "error" not in body
    error = body["error"]
    well_formed = error.keys() == {"message", "type", "param", "code"} and len(error["message"]) < 1100
    return well_formed and response.headers["content-type"] == "application/json"


def post(server: Server, route: str, body: bytes, **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json", **headers}
    # Not verified: the certificates that a client reads for it take it longer than the request.
    return httpx.post(server.url + route, content=body, headers=headers, timeout=PATIENCE_S, verify=False)


# -- Bodies ---------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
HUGE = st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**64, 10**30, 10**4000])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | HUGE
    | st.floats()
    | TEXTS
    | st.sampled_from(["", "\0", "\ud800", "\udfff"])
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4))
FIELDS = st.sampled_from(
    [*CompletionRequest.model_fields, *ChatRequest.model_fields, *TokenRequest.model_fields, *NEUTRAL]
)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.sampled_from(list(GOOD)), st.dictionaries(FIELDS, VALUES, min_size=1, max_size=3), st.booleans())
def test_any_json(hostile: Server, route: str, fields: dict[str, Any], within: bool) -> None:
    body = GOOD[route] | fields if within else fields
    if route == TOKENS and within:
        body = GOOD[route] | {"sampling_params": GOOD[route]["sampling_params"] | fields}
    before = hostile.cpu_s()
    response = post(hostile, route, json.dumps(body).encode())
    hostile.num_hostile += 1
    assert hostile.cpu_s() - before < MAX_CPU_S
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert has_openais_form(response)
    assert response.status_code in (200, 400, 404)


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(frugal: Server, name: str) -> None:
    route, body, status = BOMBS[name]
    response = post(frugal, route, body())
    assert (response.status_code, has_openais_form(response)) == (status, True), response.text[:500]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_web_page_may_send_is_not_read(frugal: Server, kind: str) -> None:
    response = post(frugal, COMPLETIONS, b'{"prompt": "x"}', **{"content-type": kind})
    assert (response.status_code, has_openais_form(response)) == (415, True)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "x" * 5000])
@pytest.mark.parametrize(
    "route", [COMPLETIONS, "/v1/../../etc/passwd", "/%00%ff%ed%a0%80", "/" + "x" * 8000, "//evil.example"]
)
def test_wrong_methods_and_routes(frugal: Server, method: str, route: str) -> None:
    frugal.num_hostile += 1
    headers = {"host": "localhost"}
    response = httpx.request(method, frugal.url + route, headers=headers, timeout=PATIENCE_S, verify=False)
    assert response.status_code in (404, 405)
    assert has_openais_form(response)


# -- Connections ----------------------------------------------------------------------------------------------------


def until_closed(connection: socket.socket) -> bytes:
    """What the server says until it closes the connection, which it must."""
    said = b""
    with connection, suppress(ConnectionError):
        while part := connection.recv(65536):
            said += part
    return said


def statuses(said: bytes) -> list[int]:
    return [int(line.split()[1]) for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


@pytest.mark.parametrize("name", WIRE)
def test_what_is_no_request_is_refused_or_closed(frugal: Server, name: str) -> None:
    sent, allowed = WIRE[name]
    said = until_closed(frugal.connect(sent()))
    assert set(statuses(said)) <= allowed, said[:500]


def test_what_does_not_come_is_not_waited_for(hostile: Server) -> None:
    before = hostile.cpu_s()
    with ThreadPoolExecutor(len(SLOW)) as pool:
        everything_said = pool.map(lambda one: until_closed(hostile.connect(one[0])), SLOW.values())
        for name, said in zip(SLOW, everything_said, strict=True):
            assert set(statuses(said)) <= SLOW[name][1], (name, said[:500])
    hostile.num_hostile += len(SLOW)
    assert hostile.cpu_s() - before < len(SLOW) * MAX_CPU_S


def test_requests_in_drops_end_at_the_deadline(frugal: Server) -> None:
    """A byte now and then keeps nothing open: the deadline is that of the whole request."""
    connection = frugal.connect()
    with connection, pytest.raises(ConnectionError):
        _send_slowly(connection, HEAD * 100)


def test_responses_that_nobody_takes_end_at_the_deadline(hostile: Server) -> None:
    """How many are made, and what that costs, is up to the kernel: it takes some megabytes before the server waits."""
    hostile.num_hostile += 1
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_S)
        connection.connect(hostile.address)
        with pytest.raises(ConnectionError):
            _send_without_end(connection, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100_000)


def _send_without_end(connection: socket.socket, content: bytes) -> None:
    """How much the kernel takes for a server that reads no more differs between machines."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        connection.sendall(content)


def _send_slowly(connection: socket.socket, content: bytes) -> None:
    for byte in content:
        connection.sendall(bytes([byte]))
        time.sleep(0.1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["reset", "half"])
def test_clients_that_go_away(hostile: Server, how: str, stream: bool) -> None:
    body = big(max_tokens=200, n=8, ignore_eos=True, stream=stream)
    before = hostile.cpu_s()
    for _ in range(10):
        connection = hostile.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            connection.shutdown(socket.SHUT_WR)
        connection.close()
    hostile.num_hostile += 10
    wait_for(lambda: metric(hostile.url, "sequences_running") <= 1 and metric(hostile.url, "sequences_waiting") <= 1)
    assert hostile.cpu_s() - before < 10 * MAX_CPU_S


def test_thousands_of_sequences_whose_client_goes_away(hostile: Server) -> None:
    before = hostile.cpu_s()
    for _ in range(3):
        body = big(prompt=[[5, 6]] * 4, n=1000, max_tokens=200, ignore_eos=True)
        connection = hostile.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: metric(hostile.url, "sequences_waiting") > 1000, within_s=PATIENCE_S)
        connection.close()
        wait_for(lambda: metric(hostile.url, "sequences_waiting") <= 1, within_s=PATIENCE_S)
    hostile.num_hostile += 3
    assert hostile.cpu_s() - before < 3 * MAX_CPU_S


@pytest.mark.parametrize(
    "sent",
    mostly_nightly([b"", HEAD, HEAD + b"Content-Length: 4000000\r\n\r\n" + b"x" * 300_000], HEAD),
    ids=["nothing", "half the headers", "half of a large body"],
)
def test_floods(hostile: Server, sent: bytes) -> None:
    """More connections than the server may have open; none of them ever says what it wants."""
    before, served = hostile.cpu_s(), hostile.num_served
    with ThreadPoolExecutor(50) as pool:
        connections = [_connect_or_not(hostile, sent) for _ in range(400)]
        wait_for(lambda: hostile.num_served > served + 3 or hostile.failures != [], within_s=PATIENCE_S)
        for said in pool.map(until_closed, filter(None, connections)):
            assert set(statuses(said)) <= {408, 503}
    hostile.num_hostile += 400
    assert hostile.cpu_s() - before < 10 * MAX_CPU_S
    assert hostile.failures == []


def _connect_or_not(server: Server, sent: bytes) -> socket.socket | None:
    time.sleep(0.002)  # faster, and the kernel drops some of them, which then hear nothing at all
    with suppress(ConnectionError):
        return server.connect(sent)
    return None
