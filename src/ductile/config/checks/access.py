"""What keeps a server from being reached, or its key from staying a secret."""

import ipaddress
from collections.abc import Iterator

from ductile.config.finding import Finding
from ductile.config.schema.http_server import MIN_KEY_CHARS, HttpServerConfig
from ductile.config.schema.orchestrator import ClientConfig
from ductile.config.schema.secrets import has_userinfo, secret_of


def is_loopback(host: str) -> bool:
    """Whether only this machine can mean itself by it: an address of 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def client_findings(config: ClientConfig, at: str) -> Iterator[Finding]:
    yield from _key(config, at)
    if any(map(has_userinfo, config.urls)):
        what = "holds a user or a password, which would be written into files. Leave it out, and write api_key_var"
        yield Finding((f"{at}.base_url",), what)


def server_findings(config: HttpServerConfig, at: str) -> Iterator[Finding]:
    yield from _key(config, at)
    long_enough = f"a key of at least {MIN_KEY_CHARS} characters"
    if config.api_key is not None and len(config.api_key) < MIN_KEY_CHARS:
        yield Finding((f"{at}.api_key",), f"must be {long_enough}")
    elif config.api_key is None and 0 < len(secret_of(None, config.api_key_var) or "") < MIN_KEY_CHARS:
        yield Finding((f"{at}.api_key_var",), f"must name an environment variable with {long_enough}")
    if not is_loopback(config.host) and config.api_key is None and config.api_key_var is None:
        yield Finding(
            (f"{at}.host", f"{at}.api_key"),
            f"can be reached from other machines, so {at}.api_key_var must be set, which names an environment variable "
            f"(or {at}.api_key). Set it, or write 127.0.0.1",
        )


def _key(config: ClientConfig | HttpServerConfig, at: str) -> Iterator[Finding]:
    variable = config.api_key_var
    if variable is not None and config.api_key is not None:
        yield Finding((f"{at}.api_key_var", f"{at}.api_key"), f"contradicts {at}.api_key. Leave one of them out")
    elif variable is not None and not secret_of(None, variable):
        yield Finding((f"{at}.api_key_var",), f"names an environment variable that is not set: export {variable}=...")
