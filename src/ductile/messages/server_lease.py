"""A server's lease in a registry: where it is, and that it still renews it."""

from urllib.parse import urlsplit

import msgspec

from ductile.config.server_address import is_root

MOST_BYTES = 16 << 10
"""Largest lease that is read."""


class ServerLease(msgspec.Struct, frozen=True):
    """One server's entry. It holds no secret."""

    url: str
    """Root of its HTTP routes, without /v1: "http://10.0.0.7:8000"."""
    incarnation: str
    model: str = ""
    """Fingerprint of its model's tensors."""
    token_file: str = ""
    """File, of the server's user alone, with the token of its control routes; "" where its API key is that."""
    pid: int = 0
    host: str = ""
    """Identity of its machine (boot id)."""
    workers: int = 1
    version: int = 0
    renewed_at: float = 0.0
    """Unix time by the server's clock."""
    beat: int = 0
    """Goes up with each renewal: a reader need not trust the server's clock."""
    is_leaving: bool = False
    """It finishes what it has, and takes nothing new."""


class LeaseError(ValueError):
    """No lease of a server of ours. The text goes on after its subject."""


def lease_from(content: bytes) -> ServerLease:
    """Return the lease that is written there. Raises LeaseError."""
    if len(content) > MOST_BYTES:
        raise LeaseError(f"has more than {MOST_BYTES} bytes")
    try:
        lease = msgspec.json.decode(content, type=ServerLease)
    except (msgspec.DecodeError, ValueError) as error:
        raise LeaseError(f"is no lease of a server: {error}") from None
    if not is_root(lease.url):
        raise LeaseError(f"has {lease.url!r} where a server's address would be")
    if not lease.incarnation:
        raise LeaseError("says nothing of the server's incarnation")
    return lease


def lease_file(url: str) -> str:
    """Return the name of the server's file in a folder of leases: "10.0.0.7-8000.json"."""
    parts = urlsplit(url)
    return f"{(parts.hostname or '').replace(':', '_')}-{parts.port}.json"
