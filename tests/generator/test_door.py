"""Who gets in, and with what, before anything is read."""

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ductile.config.schema.inference import ServerConfig
from ductile.generator.server.server import create_app
from ductile.messages.control_token import ControlToken, UnsafeFolder, control_token, token_of
from ductile.transport.http_server.middleware import BODIES_AT_ONCE, RequestGuard
from tests.generator.conftest import Family
from tests.generator.test_server import Client, local


@pytest.fixture(scope="module")
def client(qwen3: Family) -> Iterator[Client]:
    with local(create_app(qwen3.engine(), qwen3.tokenizer, "tiny")) as client:
        yield client


def test_only_json_of_a_modest_size_is_read(client: Client) -> None:
    response = client.post("/v1/completions", content="{}", headers={"content-type": "text/plain"})
    assert (response.status_code, response.json()["error"]["message"]) == (
        415,
        "the body must be JSON: Content-Type: application/json",
    )
    response = client.post("/v1/completions", json={"prompt": "x" * 5 * 2**20})
    assert response.status_code == 413
    assert "more than 4194304 bytes; raise server.max_body_bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[2001:db8::1]:80", ""]
)
def test_without_a_key_only_names_of_this_machine_are_served(client: Client, host: str) -> None:
    for route in ("/v1/models", "/health", "/metrics"):
        response = client.get(route, headers={"host": host})
        assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "127.0.0.1", "127.8.9.1:1", "[::1]:8000"])
def test_names_of_this_machine(client: Client, host: str) -> None:
    assert client.get("/v1/models", headers={"host": host}).status_code == 200


def test_the_api_key_is_asked_for(qwen3: Family) -> None:
    with local(create_app(qwen3.engine(), qwen3.tokenizer, "tiny", ServerConfig(api_key="s3cret-s3cret"))) as client:
        body = {"prompt": "x", "max_tokens": 1}
        for headers in (
            {},
            {"Authorization": "Bearer other"},
            {"Authorization": "s3cret-s3cret"},
            {"Authorization": b"Bearer \xe9"},
        ):
            for response in (
                client.get("/v1/models", headers=headers),
                client.post("/v1/completions", json=body, headers=headers),
            ):
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["type"] == "authentication_error"
                assert "s3cret" not in response.text
        right = {"Authorization": "Bearer s3cret-s3cret"}
        assert client.post("/v1/completions", json=body, headers=right).status_code == 200
        assert client.post("/v1/completions", json=body, headers={"authorization": "bearer s3cret-s3cret"}).is_success
        assert client.get("/health").status_code == 200
        assert client.get("/health", headers={"host": "any.example"}).status_code == 200


def test_the_api_key_opens_the_control_routes_and_nothing_else_does(qwen3: Family) -> None:
    control, key = ControlToken(), {"Authorization": "Bearer s3cret-s3cret"}
    app = create_app(qwen3.engine(), qwen3.tokenizer, "tiny", ServerConfig(api_key="s3cret-s3cret"), control=control)
    with local(app) as client:
        for headers in ({}, {"Authorization": f"Bearer {control.text}"}):
            assert client.post("/pause", json={"epoch": 1}, headers=headers).status_code == 401
            assert client.get("/fleet/state", headers=headers).status_code == 401
        assert client.post("/pause", json={"epoch": 1}, headers=key).json()["paused"] is True
        assert client.post("/resume", json={}, headers=key).json()["paused"] is False
        bad = client.post("/pause", json={"epoch": "one"}, headers=key)
        assert bad.status_code == 400
        assert "the body is no PauseServer: Expected `int`, got `str` - at `$.epoch`" in bad.json()["error"]["message"]
        wrong = client.post("/weights/buckets/u/s/0", json={}, headers=key)
        assert wrong.status_code == 415


def test_a_token_is_kept_in_a_folder_of_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with control_token("::1", 8000) as token:
        assert token.file is not None
        assert stat.S_IMODE(token.file.stat().st_mode) == 0o600
        assert token_of("http://[::1]:8000") == token.text
        assert token.text not in repr(token)
    assert token_of("http://[::1]:8000") is None
    token.file.parent.chmod(0o777)
    with pytest.raises(UnsafeFolder, match="can be written by others"), control_token("::1", 8000):
        pass


def test_the_key_is_asked_for_before_a_body_is_looked_at(qwen3: Family) -> None:
    with local(create_app(qwen3.engine(), qwen3.tokenizer, "tiny", ServerConfig(api_key="s3cret-s3cret"))) as client:
        for content in ("{", "x" * 5 * 2**20):
            assert client.post("/v1/completions", content=content).status_code == 401
            assert client.post("/health", content=content).status_code == 401
            assert client.post("/liveness", json={"x": content}).status_code == 401


class _Buckets:
    """A server whose door alone is real, and bodies that come piece by piece."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.num_open = self.most_open = 0
        self.control = ControlToken()
        config = ServerConfig(timeout_s=timeout_s)
        self.guard = RequestGuard(self._load, config, self.control, lambda: PIECES)

    async def _load(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert len(scope["state"]["body"]) == PIECES
        await asyncio.sleep(0)
        self.num_open -= 1
        await Response()(scope, receive, send)

    async def post(self, is_stuck: bool = False) -> int:
        """The status of the response; 0 for one that never ends."""
        left, said = [1] * PIECES, [0]
        token = f"Bearer {self.control.text}".encode()
        headers = [(b"content-type", b"application/octet-stream"), (b"authorization", token)]
        scope = {"type": "http", "path": "/weights/buckets/u/s/0", "method": "POST", "headers": headers}

        async def receive() -> dict[str, Any]:
            if len(left) == PIECES:
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
            await asyncio.sleep(60 if is_stuck else 0)
            return {"type": "http.request", "body": b"x" * left.pop(), "more_body": bool(left)}

        async def send(message: Any) -> None:
            said[0] = message.get("status", said[0])

        await self.guard(scope, receive, send)
        return said[0]


PIECES = 16
"""Of a bucket, of a byte each."""


def test_as_many_ranks_as_there_are_send_buckets_and_a_few_of_them_lie_in_memory() -> None:
    async def story() -> None:
        server = _Buckets()
        assert await asyncio.gather(*(server.post() for _ in range(40))) == [200] * 40
        assert server.most_open == BODIES_AT_ONCE

    asyncio.run(asyncio.wait_for(story(), 100))


def test_a_bucket_waits_for_its_turn_no_longer_than_any_body_may_take() -> None:
    async def story() -> None:
        server = _Buckets(timeout_s=0.2)
        stuck = [asyncio.create_task(server.post(is_stuck=True)) for _ in range(BODIES_AT_ONCE)]
        await asyncio.sleep(0.01)
        late = asyncio.create_task(server.post(is_stuck=True))
        assert await asyncio.gather(*stuck) == [408] * BODIES_AT_ONCE
        assert await server.post() == 200
        assert await late in (408, 503)

    asyncio.run(asyncio.wait_for(story(), 100))
