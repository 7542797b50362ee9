"""Keys of whatever serves HTTP to clients: a server that generates, and a router before several."""

from pydantic import Field

from ductile.config.schema.section import FilePath, Section

MIN_KEY_CHARS = 8
"""Least length of an API key; a shorter one can be guessed."""


class HttpServerConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free port and prints it."""
    api_key: str | None = None
    """Key of the server, at least 8 characters: requests need `Authorization: Bearer <api_key>`. Required for a host
    that is not loopback."""
    api_key_var: str | None = None
    """The environment variable that holds the key: what is typed as `api_key` others on the machine can see."""
    ssl_certfile: FilePath | None = None
    """The server's certificate (PEM), with those of its issuers behind it: it speaks HTTPS then, and nothing else.
    Clients must find its address in it. Absent: HTTP, which whoever is on the way can read and change."""
    ssl_keyfile: FilePath | None = None
    """The certificate's key (PEM), without a password. Only the server's user may read it."""
    max_connections: int = Field(default=1024, ge=1)
    """Connections that are open at a time. One more takes the place of the connection that has waited longest without a
    whole request."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Largest body of a request, in bytes."""
    timeout_s: float = Field(default=30.0, gt=0)
    """A client has this long to send a request's headers, again for its body, and to take what was sent to it."""
