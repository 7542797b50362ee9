"""The socket of an HTTP server, and uvicorn's settings for connections that may be anybody's."""

import os
import resource
import socket
from collections.abc import Callable
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from ductile.config.checks.access import server_findings
from ductile.config.reading.errors import dotted, show
from ductile.config.reading.key_tree import value_at
from ductile.config.schema.http_server import HttpServerConfig
from ductile.transport.http_server.connection import Crowd, crowded
from ductile.transport.http_server.log_limit import limit_logs
from ductile.transport.http_server.middleware import REFUSALS

DRAIN_S = 30
"""Seconds that responses have to end after the first signal; a second signal ends them at once."""
BACKLOG = 128
"""Connections that the kernel holds until they are accepted."""


def uvicorn_settings(
    app: ASGIApp,
    config: HttpServerConfig,
    bucket_bytes: Callable[[], int] = lambda: 0,
    lifespan: Literal["auto", "off"] = "auto",
) -> uvicorn.Config:
    """Return the settings under which uvicorn serves the app. bucket_bytes: most bytes of a body that is a bucket of
    weights, now. lifespan: "off" for an app that neither begins nor ends anything."""
    num_connections = _room_for(config.max_connections)
    limit_logs(("uvicorn.error", "asyncio", REFUSALS))
    return uvicorn.Config(
        app,
        http=crowded(Crowd(num_connections, config.timeout_s, config.max_body_bytes, bucket_bytes)),
        ws="none",
        lifespan=lifespan,
        log_level="error",
        access_log=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        # Few at once: a connection whose request follows right away must not be the one that makes room.
        backlog=max(1, min(BACKLOG, num_connections // 4)),
        timeout_graceful_shutdown=DRAIN_S,
    )


def listen(server: HttpServerConfig) -> socket.socket:
    """Return the socket that the server listens at. Raises ValueError, whose text names the key."""
    for finding in server_findings(server, "server"):  # for those who start it without the command
        path = tuple(finding.keys[0].split("."))
        raise ValueError(f"{dotted(path)} = {show(value_at(server, path[1:]), path)} {finding.what}")
    try:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        return socket.create_server((server.host, server.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror}; server.port = 0 takes a free port"
        ) from error


def url_of(listener: socket.socket, server: HttpServerConfig) -> str:
    """Return the root of the routes that are served at a socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme_of(server)}://[{host}]:{port}" if ":" in host else f"{scheme_of(server)}://{host}:{port}"


def scheme_of(server: HttpServerConfig) -> str:
    return "http" if server.ssl_certfile is None else "https"


def _room_for(num_connections: int) -> int:
    """Return `num_connections`, or a third of what the process may have open beside its other files: those that make
    room for new ones are closed a moment after these have come."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_others = len(os.listdir("/proc/self/fd")) + 16
    wanted = num_others + 3 * num_connections
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, min(num_connections, (wanted - num_others) // 3))
