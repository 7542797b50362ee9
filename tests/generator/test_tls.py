"""A server with a certificate of its own: who trusts it is served, and gives it weights; nobody on the way reads it."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ductile.config.checks.access import server_findings
from ductile.config.schema.http_server import HttpServerConfig
from ductile.generator.server.weight_donor import content_of
from ductile.messages.updates import Receiver
from ductile.model.checkpoint import load_model
from ductile.transport import http_client
from ductile.weights.carriers.http import HttpSender
from tests.cluster.strangers import Strangers, recorded
from tests.generator.conftest import Family
from tests.generator.test_serve import complaints, server
from tests.generator.weight_giver import Giver, perturbed

KEY = "a-key-that-nobody-sees"
JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no `openssl` makes a certificate here")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody has signed but its own key, and the key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=ductile", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=60)
    key.chmod(0o600)
    return cert, key


@pytest.fixture(scope="module")
def url(qwen3: Family, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cert, key = map(str, pair)
    settings = {"api_key": KEY, "ssl_certfile": cert, "ssl_keyfile": key, "timeout_s": 5}
    with server(qwen3.folder, tmp_path_factory.mktemp("server"), scheme="https", server=settings) as (url, process):
        yield url
        process.terminate()
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert not [line for line in complaints(process.stdout.read()) if " WARNING refused: " not in line]


def trusts(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


def test_who_trusts_the_certificate_is_served_and_nobody_on_the_way_reads_it(url: str, pair: tuple[Path, Path]) -> None:
    host, _, port = url.removeprefix("https://").partition(":")
    with recorded((host, int(port))) as ((its_host, its_port), session):
        asked = {"prompt": "a-secret-prompt", "max_tokens": 2, "ignore_eos": True}
        before_it = f"https://{its_host}:{its_port}/v1/completions"
        reply = httpx.post(before_it, json=asked, headers=JSON, timeout=60, verify=trusts(pair[0]))
        assert reply.json()["usage"]["completion_tokens"] == 2
        seen = session.of("client") + session.of("server")
        assert len(seen) > 500
        for secret in (KEY, "a-secret-prompt", "completion_tokens"):
            assert secret.encode() not in seen
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/liveness", timeout=60)
    with socket.create_connection((host, int(port)), 60) as replaying:
        replaying.settimeout(60)
        replaying.sendall(session.of("client"))
        replaying.shutdown(socket.SHUT_WR)
        heard = b""
        while piece := replaying.recv(1 << 16):
            heard += piece
    assert len(heard) < len(session.of("server")), "a session has keys of its own, so the request is none in another"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_strangers_get_nothing(url: str) -> None:
    host, _, port = url.removeprefix("https://").partition(":")
    with Strangers(7) as strangers:
        requests = [("POST", "/weights/prepare", b"{}"), ("GET", "/v1/models", b"")]
        strangers.try_http((host, int(port)), requests, [KEY, "another-key"])


def test_a_rank_gives_weights_to_a_server_that_it_trusts(
    url: str, pair: tuple[Path, Path], qwen3: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SSL_CERT_FILE` says whom it trusts: without it, nothing is sent."""
    weights = {name: each.data for name, each in load_model(qwen3.folder).named_parameters()}
    with httpx.Client(base_url=url, headers=JSON, timeout=60, verify=trusts(pair[0])) as client:
        giver = Giver(client, perturbed(weights, 1), 1, settings={"bucket_timeout_s": 60.0})
        assert giver.prepare()[0] == 200
        (offer,) = giver.offers

        def sent() -> str:
            http_client.trusted.cache_clear()
            sender = HttpSender(giver.update, offer.sender, (Receiver("it", "http", url, KEY),))
            for bucket in offer.buckets:
                sender.send(bucket, 0, content_of(giver.held, bucket), "")
                sender.wait(bucket)
            return sender.close().get("it", "")

        assert "CERTIFICATE_VERIFY_FAILED" in sent()
        monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
        assert sent() == ""
        http_client.trusted.cache_clear()
        assert giver.end("verify")[1]["phase"] == "verified"
        assert giver.end("commit")[1]["phase"] == "committed"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ssl_keyfile": None}, "is of no use without server.ssl_keyfile"),
        ({"ssl_certfile": "/nowhere/cert.pem"}, "No such file"),
        ({"ssl_keyfile": "cert"}, "Write PEM files of one pair"),
    ],
)
def test_what_is_no_pair_is_refused(pair: tuple[Path, Path], change: dict[str, str | None], says: str) -> None:
    cert, key = map(str, pair)
    given = {"ssl_certfile": cert, "ssl_keyfile": key, **change}
    config = HttpServerConfig(**{name: cert if value == "cert" else value for name, value in given.items()})
    assert any(says in finding.what for finding in server_findings(config, "server"))
    assert list(server_findings(HttpServerConfig(ssl_certfile=cert, ssl_keyfile=key), "server")) == []


def test_a_key_that_others_can_read_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    open_key = tmp_path / "key.pem"
    open_key.write_bytes(pair[1].read_bytes())
    open_key.chmod(0o644)
    (finding,) = server_findings(HttpServerConfig(ssl_certfile=str(pair[0]), ssl_keyfile=str(open_key)), "server")
    assert finding.what == f"can be read by others: chmod 600 {open_key}"
