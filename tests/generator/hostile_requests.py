"""What strangers send: bodies that are too much or no request, and bytes that are no HTTP."""

import json
from collections.abc import Callable
from typing import Any

MIB = 2**20
COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "1+1=", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    TOKENS: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
}


def big(**fields: Any) -> bytes:
    return json.dumps(GOOD[COMPLETIONS] | fields).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps(GOOD[CHAT] | fields).encode()


MANY_LISTS = b'{"prompt": ' + b"[" * 65_537 + b'"'
"""So many that the strings are looked at, to tell which of them count. The last string is open."""

BOMBS: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "131072 sequences in 682 bytes": (COMPLETIONS, lambda: big(prompt=[[1]] * 128, n=1024), 400),
    "prompts without number": (COMPLETIONS, lambda: big(prompt=[[5]] * 60_000), 400),
    "a prompt of 10 MB": (COMPLETIONS, lambda: big(prompt="x" * 10 * MIB), 413),
    "a prompt of 4 MB": (COMPLETIONS, lambda: big(prompt="x" * (4 * MIB - 100)), 400),
    "prompts of 4 MB": (COMPLETIONS, lambda: big(prompt=["x" * 5000] * 800), 400),
    "a million prompts": (COMPLETIONS, lambda: json.dumps({"prompt": ["x"] * 830_000}).encode(), 400),
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
    "lists, and a string of quotes that never ends": (COMPLETIONS, lambda: MANY_LISTS + rb"\"" * 2_000_000, 400),
    "lists, and a string that ends in a backslash": (COMPLETIONS, lambda: MANY_LISTS + rb"\"" * 2_000_000 + b"\\", 400),
    "lists, and strings without number": (COMPLETIONS, lambda: MANY_LISTS + b'","' * 1_300_000, 400),
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
        400,
    ),
    "names of the template's own": (CHAT, lambda: chat(chat_template_kwargs={"self": 1}), 400),
    "escapes of the template": (
        CHAT,
        lambda: chat(messages=[{"role": "user", "name": "{{ 9 ** 9 ** 9 }}", "content": "{% x %}"}]),
        200,
    ),
    "escapes of the template as a role": (
        CHAT,
        lambda: chat(messages=[{"role": "{{ 9 ** 9 ** 9 }}", "content": "x"}]),
        400,
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
    "likely tokens without number": (COMPLETIONS, lambda: big(logprobs=20, n=1024, max_tokens=200), 400),
    "echoes without number": (COMPLETIONS, lambda: big(prompt=["x" * 200] * 600, echo=True, logprobs=20), 400),
    "thoughts without number": (
        CHAT,
        lambda: chat(messages=[{"role": "assistant", "content": "x", "reasoning": "y"}] * 20_000),
        400,
    ),
    "tools without number": (CHAT, lambda: chat(tools=[{"type": "function", "function": {"name": "f"}}] * 30_000), 400),
    "n = 0": (COMPLETIONS, lambda: big(n=0), 400),
    "n = 1e9": (COMPLETIONS, lambda: big(n=10**9), 400),
    "max_tokens = 1e9": (COMPLETIONS, lambda: big(max_tokens=10**9), 400),
}
"""Its route, its body, and the status that it gets."""

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /liveness HTTP/1.1\r\nHost: localhost\r\n"
CRUMBS = b"1\r\n[\r\n" * 300_000

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
"""What is sent, and the statuses that may come."""
