"""Who can reach a server: one decision, for the check and for the server itself."""

import pytest

from ductile.config.checks.access import is_loopback, server_findings
from ductile.config.schema.inference import ServerConfig


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("localhost", True),
        ("LocalHost.", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.168.1.4", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
    ],
)
def test_only_an_address_of_this_machine_alone_needs_no_key(host: str, inside: bool) -> None:
    assert is_loopback(host) == inside
    found = [finding.keys[0] for finding in server_findings(ServerConfig(host=host), "server")]
    assert found == ([] if inside else ["server.host"])
    assert not list(server_findings(ServerConfig(host=host, api_key="a long key"), "server"))
