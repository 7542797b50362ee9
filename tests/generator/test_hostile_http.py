"""Whatever comes over HTTP, the server answers in OpenAI's form or closes the connection by its own deadline, spends at
most a CPU second on it, keeps its memory, and serves a good client beside it.

The real process, with a deadline of a second and few files to open.
"""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
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

from ductile.generator.openai_api import NEUTRAL, ChatRequest, CompletionRequest, TokenRequest
from tests.generator.conftest import Family
from tests.generator.test_serve import metric, server, wait_for

pytestmark = pytest.mark.slow

MIB = 2**20
MAX_CPU_S = 1.0
MAX_GROWTH_BYTES = 200 * MIB
TIMEOUT_S = 1.0
"""The server's, for a client that is slow."""
PATIENCE_S = 30.0
"""Ours, on a busy machine."""
COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"


FEW_FILES = """
import resource, sys
from ductile.generator.serve import main

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.exit(main())
"""


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
                    answer = client.completions.create(model="letters", prompt="1+1=", max_tokens=2, temperature=0)
                    assert answer.choices[0].finish_reason in ("length", "stop")
                    self.num_served += 1
                except Exception as error:
                    self.failures.append(f"{type(error).__name__}: {error}")


@pytest.fixture(scope="module")
def hostile(qwen3: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings: dict[str, Any] = {"server": {"timeout_s": TIMEOUT_S, "served_model_name": "letters"}, "block_size": 16}
    model = {"name": str(qwen3.folder), "max_model_len": 256}
    with server(qwen3.folder, tmp_path_factory.mktemp("hostile"), main=FEW_FILES, model=model, **settings) as (
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
        assert process.wait(30) == 0
        assert process.stdout is not None
        log = process.stdout.read()
        assert log == ""


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


def has_openais_form(answer: httpx.Response) -> bool:
    body = answer.json()
    if answer.status_code == 200:
        return "error" not in body
    error = body["error"]
    well_formed = error.keys() == {"message", "type", "param", "code"} and len(error["message"]) < 1100
    return well_formed and answer.headers["content-type"] == "application/json"


def post(server: Server, route: str, body: bytes, **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json", **headers}
    return httpx.post(server.url + route, content=body, headers=headers, timeout=PATIENCE_S)


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
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "1+1=", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    TOKENS: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.sampled_from(list(GOOD)), st.dictionaries(FIELDS, VALUES, min_size=1, max_size=3), st.booleans())
def test_any_json(hostile: Server, route: str, fields: dict[str, Any], within: bool) -> None:
    body = GOOD[route] | fields if within else fields
    if route == TOKENS and within:
        body = GOOD[route] | {"sampling_params": GOOD[route]["sampling_params"] | fields}
    before = hostile.cpu_s()
    answer = post(hostile, route, json.dumps(body).encode())
    hostile.num_hostile += 1
    assert hostile.cpu_s() - before < MAX_CPU_S
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert has_openais_form(answer)
    assert answer.status_code in (200, 400, 404)


def big(**fields: Any) -> bytes:
    return json.dumps(GOOD[COMPLETIONS] | fields).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps(GOOD[CHAT] | fields).encode()


BOMBS: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "131072 sequences in 682 bytes": (COMPLETIONS, lambda: big(prompt=[[1]] * 128, n=1024), 400),
    "prompts without number": (COMPLETIONS, lambda: big(prompt=[[5]] * 60_000), 400),
    "a prompt of 10 MB": (COMPLETIONS, lambda: big(prompt="x" * 10 * MIB), 413),
    "a prompt of 4 MB": (COMPLETIONS, lambda: big(prompt="x" * (4 * MIB - 100)), 400),
    "prompts of 4 MB": (COMPLETIONS, lambda: big(prompt=["x" * 5000] * 800), 400),
    "a million token ids": (COMPLETIONS, lambda: big(prompt=[5] * 1_300_000), 400),
    "a million token ids that are none": (COMPLETIONS, lambda: big(prompt=[1.5] * 800_000), 400),
    "a million ids for the token route": (TOKENS, lambda: json.dumps({"token_ids": [5] * 1_300_000}).encode(), 400),
    "a million floats as ids": (
        TOKENS,
        lambda: json.dumps({"token_ids": [0.5] * 800_000, "sampling_params": {}}).encode(),
        400,
    ),
    "a stop string of 1 MB": (COMPLETIONS, lambda: big(stop="x" * MIB, stream=True), 400),
    "a hundred thousand stop strings": (COMPLETIONS, lambda: big(stop=["x"] * 100_000), 400),
    "a million stop ids": (COMPLETIONS, lambda: big(stop_token_ids=[5] * 1_000_000, n=1024), 400),
    "half a character to stop at": (COMPLETIONS, lambda: big(stop="\ud800", max_tokens=8, ignore_eos=True), 400),
    "half a character as the prompt": (COMPLETIONS, lambda: big(prompt="\udfff"), 400),
    "half a character in a message": (CHAT, lambda: chat(messages=[{"role": "user", "content": "\ud83d"}]), 400),
    "half a character in a field's name": (COMPLETIONS, lambda: big(**{"\ud800": 1}), 400),
    "a seed of 4300 nines": (COMPLETIONS, lambda: b'{"prompt": "x", "n": 2, "seed": ' + b"9" * 4300 + b"}", 400),
    "a priority of 4300 nines": (COMPLETIONS, lambda: b'{"prompt": "x", "priority": ' + b"9" * 4300 + b"}", 400),
    "a token id of 4300 nines": (COMPLETIONS, lambda: b'{"prompt": [' + b"9" * 4300 + b"]}", 400),
    "a number of a million digits": (COMPLETIONS, lambda: b'{"prompt": "x", "seed": ' + b"9" * MIB + b"}", 400),
    "depth": (COMPLETIONS, lambda: b'{"prompt": ' + b"[" * 2 * MIB, 400),
    "closed depth": (COMPLETIONS, lambda: b'{"prompt": ' + b"[" * MIB + b"]" * MIB + b"}", 400),
    "objects in depth": (COMPLETIONS, lambda: b'{"user":' * 400_000, 400),
    "a million lists": (COMPLETIONS, lambda: b'{"user": [' + b"[]," * 1_300_000 + b"[]]}", 400),
    "a million objects": (COMPLETIONS, lambda: b'{"user": [' + b"{}," * 1_300_000 + b"{}]}", 400),
    "four hundred thousand fields": (
        COMPLETIONS,
        lambda: json.dumps({f"f{number}": 1 for number in range(300_000)}).encode(),
        400,
    ),
    "three hundred thousand parameters": (
        TOKENS,
        lambda: json.dumps({"token_ids": [5], "sampling_params": {f"f{n}": 1 for n in range(250_000)}}).encode(),
        400,
    ),
    "a field with a name of 3 MB": (COMPLETIONS, lambda: big(**{"x" * 3 * MIB: 1}), 400),
    "tools of 3 MB": (CHAT, lambda: chat(tools=["x" * 3 * MIB]), 400),
    "a model of 3 MB": (COMPLETIONS, lambda: big(model="x" * 3 * MIB), 404),
    "a role of 3 MB": (CHAT, lambda: chat(messages=[{"role": "x" * 3 * MIB, "content": ""}]), 400),
    "sixty thousand messages": (CHAT, lambda: chat(messages=[{"role": "user", "content": "x"}] * 60_000), 400),
    "messages that are none": (CHAT, lambda: chat(messages=[{}] * 60_000), 400),
    "parts without number": (
        CHAT,
        lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 60_000}]),
        400,
    ),
    "a message of any shape": (
        CHAT,
        lambda: chat(messages=[{"role": "user", "content": None, "tool_calls": [{}] * 9}]),
        400,
    ),
    "template variables without number": (
        CHAT,
        lambda: chat(chat_template_kwargs={f"v{number}": number for number in range(150_000)}, max_tokens=1),
        200,
    ),
    "names of the template's own": (CHAT, lambda: chat(chat_template_kwargs={"self": 1}), 400),
    "escapes of the template": (
        CHAT,
        lambda: chat(messages=[{"role": "{{ 9 ** 9 ** 9 }}", "content": "{% x %}"}]),
        200,
    ),
    "an empty body": (COMPLETIONS, lambda: b"", 400),
    "null": (COMPLETIONS, lambda: b"null", 400),
    "a list": (COMPLETIONS, lambda: b"[" + b"1," * 1_000_000 + b"1]", 400),
    "UTF-16": (COMPLETIONS, lambda: json.dumps({"prompt": "x"}).encode("utf-16"), 400),
    "wrong UTF-8": (COMPLETIONS, lambda: b'{"prompt": "\xff\xfe"}', 400),
    "two values": (COMPLETIONS, lambda: b'{"prompt": "x"} {"prompt": "y"}', 400),
    "not a number": (COMPLETIONS, lambda: b'{"prompt": "x", "temperature": NaN}', 400),
    "infinity": (COMPLETIONS, lambda: b'{"prompt": "x", "top_p": -Infinity}', 400),
    "1e999": (COMPLETIONS, lambda: b'{"prompt": "x", "temperature": 1e999}', 400),
    "heat": (COMPLETIONS, lambda: big(temperature=1e300, max_tokens=50), 200),
    "cold": (COMPLETIONS, lambda: big(temperature=1e-300), 400),
    "a thin top_p": (COMPLETIONS, lambda: big(top_p=1e-320), 200),
    "all the log-probs": (COMPLETIONS, lambda: big(logprobs=100_000), 400),
    "n = 0": (COMPLETIONS, lambda: big(n=0), 400),
    "n = 1e9": (COMPLETIONS, lambda: big(n=10**9), 400),
    "max_tokens = 1e9": (COMPLETIONS, lambda: big(max_tokens=10**9), 400),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(frugal: Server, name: str) -> None:
    route, body, status = BOMBS[name]
    answer = post(frugal, route, body())
    assert (answer.status_code, has_openais_form(answer)) == (status, True), answer.text[:500]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_web_page_may_send_is_not_read(frugal: Server, kind: str) -> None:
    answer = post(frugal, COMPLETIONS, b'{"prompt": "x"}', **{"content-type": kind})
    assert (answer.status_code, has_openais_form(answer)) == (415, True)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "x" * 5000])
@pytest.mark.parametrize(
    "route", [COMPLETIONS, "/v1/../../etc/passwd", "/%00%ff%ed%a0%80", "/" + "x" * 8000, "//evil.example"]
)
def test_wrong_methods_and_routes(frugal: Server, method: str, route: str) -> None:
    frugal.num_hostile += 1
    answer = httpx.request(method, frugal.url + route, headers={"host": "localhost"}, timeout=PATIENCE_S)
    assert answer.status_code in (404, 405)
    assert has_openais_form(answer)


# -- Connections ----------------------------------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /liveness HTTP/1.1\r\nHost: localhost\r\n"
CRUMBS = b"1\r\n[\r\n" * 300_000


def until_closed(connection: socket.socket) -> bytes:
    """What the server says until it closes the connection, which it must."""
    said = b""
    with connection, suppress(ConnectionError):
        while part := connection.recv(65536):
            said += part
    return said


def statuses(said: bytes) -> list[int]:
    return [int(line.split()[1]) for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


SLOW: dict[str, tuple[bytes, set[int]]] = {
    "nothing": (b"", set()),
    "half a request line": (b"POST /v1/comple", set()),
    "half the headers": (HEAD, set()),
    "no body": (HEAD + b"Content-Length: 100\r\n\r\n", {408}),
    "half a body": (HEAD + b"Content-Length: 100\r\n\r\n" + b'{"prompt": ', {408}),
    "half a chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{", {408}),
    "a body that waits to be asked for": (HEAD + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n", {100, 408}),
    "a body of the wrong kind that does not come": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
        {415},
    ),
    "a body that is announced too large": (HEAD + b"Content-Length: 99999999999\r\n\r\n", {413}),
    "one after another that never is": ((GET + b"\r\n") + b"GET /live", {200}),
}
WIRE: dict[str, tuple[Callable[[], bytes], set[int]]] = {
    "a body that is too large": (lambda: HEAD + b"Content-Length: 9999999\r\n\r\n" + b"x" * 9_999_999, {413, 400}),
    "chunks without end": (
        lambda: HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 400,
        {413, 400},
    ),
    "a body in crumbs": (lambda: HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CRUMBS, {400}),
    "a body for a probe that goes on": (
        lambda: GET + b"Content-Length: 99999999\r\n\r\n" + b"x" * 30_000_000,
        {200, 400},
    ),
    "two lengths": (lambda: HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}", {400}),
    "a negative length": (lambda: HEAD + b"Content-Length: -1\r\n\r\n", {400}),
    "a length and chunks": (
        lambda: HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        {400},
    ),
    "a chunk that is none": (lambda: HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", {400}),
    "a header of 100 kB": (lambda: GET + b"X: " + b"x" * 100_000 + b"\r\n\r\n", {200, 400}),
    "a hundred thousand headers": (lambda: GET + b"X: y\r\n" * 100_000 + b"\r\n", {400}),
    "no host": (lambda: b"GET /liveness HTTP/1.1\r\n\r\n", {400}),
    "another host": (lambda: b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403}),
    "a host that is none": (lambda: b"GET /v1/models HTTP/1.1\r\nHost: [[\r\n\r\n", {403}),
    "HTTP/1.0": (lambda: b"GET /liveness HTTP/1.0\r\n\r\n", {200}),
    "HTTP/2": (lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {404, 400}),
    "TLS": (lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500, {400}),
    "zeros": (lambda: b"\0" * MIB, {400}),
    "line ends": (lambda: b"\r\n" * 500_000, {400}),
    "a header in two lines": (lambda: GET + b" X: y\r\n\r\n", {403}),
    "a web socket": (lambda: GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n", {200}),
    "many at once": (lambda: (GET + b"\r\n") * 300, {200}),
}


@pytest.mark.parametrize("name", WIRE)
def test_what_is_no_request_is_answered_or_closed(frugal: Server, name: str) -> None:
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


def test_answers_that_nobody_takes_end_at_the_deadline(frugal: Server) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_S)
        connection.connect(frugal.address)
        with pytest.raises(ConnectionError):
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100_000)


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
    [b"", HEAD, HEAD + b"Content-Length: 4000000\r\n\r\n" + b"x" * 300_000],
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
