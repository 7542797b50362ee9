"""Addresses of HTTP servers, as people, configs and leases write them."""

from urllib.parse import urlsplit


def is_address(url: str) -> bool:
    """Return whether it is the address of an HTTP server, with a path behind it or without one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def root_of(url: str) -> str:
    """Return the root of a server's routes: "http://10.0.0.7:8000" of "http://10.0.0.7:8000/v1/"."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def with_scheme(address: str) -> str:
    """Return the root of a server's routes for an address that may lack its scheme: "http://10.0.0.7:8000" of
    "10.0.0.7:8000"."""
    return root_of(address if "://" in address else f"http://{address}")


def is_root(url: str) -> bool:
    """Return whether it is the root of a server's routes: scheme, host, port, and nothing else."""
    if not is_address(url):
        return False
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return parts.port is not None and url == f"{parts.scheme}://{host}:{parts.port}"
