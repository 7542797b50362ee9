"""What keeps a server from being reached, or its key from staying a secret."""

import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path

from ductile.config.finding import Finding
from ductile.config.schema.http_server import MIN_KEY_CHARS, HttpServerConfig
from ductile.config.schema.orchestrator import ClientConfig
from ductile.config.schema.secrets import has_userinfo, secret_of


def is_loopback(host: str) -> bool:
    """Return whether only this machine can mean itself by it: an address of 127.0.0.0/8, ::1 or localhost."""
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
    yield from _certificate(config, at)


def plain_http_notes(config: HttpServerConfig, at: str) -> Iterator[str]:
    if not is_loopback(config.host) and config.ssl_certfile is None:
        yield (
            f"{at}.host = {config.host!r} is reached by HTTP, which is not encrypted: whoever is on the way reads the "
            f"key, prompts and weights. Write {at}.ssl_certfile and {at}.ssl_keyfile, or have a proxy before it"
        )


def _certificate(config: HttpServerConfig, at: str) -> Iterator[Finding]:
    cert, key = f"{at}.ssl_certfile", f"{at}.ssl_keyfile"
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        given, missing = (cert, key) if config.ssl_keyfile is None else (key, cert)
        yield Finding((given, missing), f"is of no use without {missing}. Write both, or neither")
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    try:
        if Path(config.ssl_keyfile).stat().st_mode & 0o077:
            yield Finding((key,), f"can be read by others: chmod 600 {config.ssl_keyfile}")
        no_password = ""  # else OpenSSL would ask for one on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, lambda: no_password
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        what = f"cannot be used with {key} = {config.ssl_keyfile!r}: {error}. Write PEM files of one pair"
        yield Finding((cert, key), what)


def _key(config: ClientConfig | HttpServerConfig, at: str) -> Iterator[Finding]:
    variable = config.api_key_var
    if variable is not None and config.api_key is not None:
        yield Finding((f"{at}.api_key_var", f"{at}.api_key"), f"contradicts {at}.api_key. Leave one of them out")
    elif variable is not None and not secret_of(None, variable):
        yield Finding((f"{at}.api_key_var",), f"names an environment variable that is not set: export {variable}=...")
