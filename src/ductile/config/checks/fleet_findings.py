"""Findings about how a fleet is watched and found: deadlines that cannot be kept, places that cannot be asked."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from ductile.config.checks.access import is_loopback
from ductile.config.checks.on_disk import import_findings
from ductile.config.finding import Finding
from ductile.config.schema.fleet import (
    CustomRegistry,
    FleetConfig,
    HealthCheckConfig,
    HttpRegistry,
    RegistryConfig,
    StaticRegistry,
)
from ductile.config.schema.inference import ServerConfig
from ductile.config.schema.orchestrator import ClientConfig
from ductile.config.schema.secrets import has_userinfo, secret_of
from ductile.config.server_address import is_address


def fleet_findings(config: FleetConfig, at: str) -> Iterator[Finding]:
    """`at` stands before the keys: "inference."."""
    yield from health_findings(config, at)
    if config.update_bucket_timeout_seconds > config.update_total_timeout_seconds:
        yield Finding(
            (f"{at}update_bucket_timeout_seconds", f"{at}update_total_timeout_seconds"),
            f"must be at most update_total_timeout_seconds ({config.update_total_timeout_seconds:g}): an update has "
            "at least one bucket",
        )
    if config.flap_backoff_seconds > config.flap_window_seconds:
        yield Finding(
            (f"{at}flap_backoff_seconds", f"{at}flap_window_seconds"),
            f"must be at most flap_window_seconds ({config.flap_window_seconds:g}), which is the longest quarantine",
        )
    yield from registry_findings(config.registry, f"{at}registry")


def health_findings(config: HealthCheckConfig, at: str) -> Iterator[Finding]:
    interval_s = config.health_check_interval_seconds
    if config.probe_timeout_seconds >= interval_s:
        yield Finding(
            (f"{at}probe_timeout_seconds", f"{at}health_check_interval_seconds"),
            f"must be less than health_check_interval_seconds ({interval_s:g}), or a hung server is found later than "
            f"its keys say. Write {0.8 * interval_s:.3g} or less, or a longer interval",
        )


def registry_findings(config: RegistryConfig | None, at: str) -> Iterator[Finding]:
    """`at` names the table: "inference.registry"."""
    if isinstance(config, StaticRegistry):
        for url in config.urls:
            yield from url_findings(url, f"{at}.urls")
        if len({*config.urls}) < len(config.urls):
            yield Finding((f"{at}.urls",), "names a server twice. Name each once")
    elif isinstance(config, HttpRegistry):
        yield from url_findings(config.url, f"{at}.url")
        if config.token_var is None and not is_loopback(urlsplit(config.url).hostname or ""):
            what = "can be reached from other machines, so token_var must name an environment variable with its token"
            yield Finding((f"{at}.url", f"{at}.token_var"), what)
        elif config.token_var is not None and not secret_of(None, config.token_var):
            what = f"names an environment variable that is not set: export {config.token_var}=..."
            yield Finding((f"{at}.token_var",), what)
    elif isinstance(config, CustomRegistry):
        yield from import_findings(f"{at}.import_path", config.import_path)


def registry_key_findings(
    config: RegistryConfig | None, at: str, key_of: ClientConfig | ServerConfig, key_at: str
) -> Iterator[Finding]:
    """A registry must not be anybody's where an API key goes to those that it lists. `key_at` names the key's table."""
    if isinstance(config, HttpRegistry) and config.token_var is None and secret_of(key_of.api_key, key_of.api_key_var):
        yield Finding(
            (f"{at}.token_var", f"{key_at}.api_key_var"),
            f"must name an environment variable with the registry's token, as there is an API key ({key_at}): without "
            "one, whoever announces a server there is sent the key and the prompts",
        )


def url_findings(url: str, key: str) -> Iterator[Finding]:
    if has_userinfo(url):
        yield Finding((key,), "holds a user or a password, which would be written into files. Leave them out")
    elif not is_address(url):
        yield Finding((key,), f'has {url!r}; write an address with http:// or https://, such as "http://10.0.0.7:8000"')
