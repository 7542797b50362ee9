"""Keys of [inference] that say how a fleet of servers is watched, found, and given weights.

A fleet has the servers of `orchestrator.client.base_url` and of `inference.registry`. Every wait has a finite default:
a deadline that somebody has to set first is one that nobody has.
"""

from typing import Annotated, Literal

from pydantic import Field

from ductile.config.schema.section import FilePath, ImportPath, Section


class StaticRegistry(Section):
    type: Literal["static"] = "static"
    urls: list[str] = Field(min_length=1)
    """The servers, such as "http://10.0.0.7:8000". One that comes back joins again; others are not looked for."""


class FileRegistry(Section):
    type: Literal["file"] = "file"
    folder: FilePath
    """A folder that the servers and the run see. Each server keeps a lease there, one file; nobody else may own it."""
    ttl_seconds: float = Field(default=15.0, gt=0)
    """A server that has not renewed its lease for so long is not joined. It renews three times as often."""


class HttpRegistry(Section):
    type: Literal["http"] = "http"
    url: str
    """Address of the registry, such as "http://10.0.0.1:8500"."""
    serve: bool = False
    """`ductile rl` serves the registry itself, at `url`, as long as it runs; servers announce themselves there again
    when a run begins. Otherwise somebody else serves it (`ductile.fleet.registry.registry_server`)."""
    token_var: str | None = None
    """The environment variable that holds the registry's token; default: it asks for none."""
    ttl_seconds: float = Field(default=15.0, gt=0)
    """A server that has not renewed its lease for so long is not joined. It renews three times as often."""


class CustomRegistry(Section):
    type: Literal["custom"] = "custom"
    import_path: ImportPath
    """A function that returns a `ductile.fleet.registry.registries.Registry`; called with `kwargs`."""
    kwargs: dict[str, object] = {}


RegistryConfig = Annotated[StaticRegistry | FileRegistry | HttpRegistry | CustomRegistry, Field(discriminator="type")]


class HealthCheckConfig(Section):
    """How servers are watched: by a run that has them as generators, and by a router."""

    health_check_interval_seconds: float = Field(default=5.0, gt=0)
    """Seconds from the beginning of a server's probe to that of its next one; all servers are probed side by side. One
    that falls silent is found after at most `health_check_failure_threshold` times this, plus `probe_timeout_seconds`;
    one whose port is closed, at the next probe."""
    probe_timeout_seconds: float = Field(default=2.0, gt=0)
    """Longest that a server may take to answer a probe, whole answer included. Less than
    `health_check_interval_seconds`, as a server's next probe begins when this one has ended."""
    health_check_failure_threshold: int = Field(default=3, ge=1)
    """Failures in a row after which a server is taken out: probes and requests are counted apart, and only a
    completion ends a row of failed requests."""
    progress_timeout_seconds: float = Field(default=120.0, gt=0)
    """A server that answers probes, has requests and samples no token for so long is taken out."""

    @property
    def detection_bound_s(self) -> float:
        """Longest time, in seconds, until a server that falls silent is taken out."""
        return self.health_check_failure_threshold * self.health_check_interval_seconds + self.probe_timeout_seconds


class FleetConfig(HealthCheckConfig):
    registry: RegistryConfig | None = None
    """Place where servers are found. `ductile inference` announces itself there, and `ductile rl` looks there for
    generators besides its slots."""
    enable_health_monitor: bool = True
    """Probe every server in the background and take out those that do not answer. Without it only those are probed that
    are about to join or have failed, and a server is lost when a request finds its port closed, or runs into its
    deadline."""
    enable_topology_discovery: bool = True
    """Join the servers that `registry` finds while the run goes on. Otherwise those that it lists at the start are all,
    and later ones join only when they are named (`ductile fleet join`)."""
    topology_change_cooldown_seconds: float = Field(default=30.0, ge=0)
    """A server that comes waits for others, at most so long, and all that have come then join in one change. Removals
    never wait, and nor do joins when no server is left. 0: each joins at once."""
    join_transport: Literal["auto", "shared_memory", "point_to_point", "http", "disk"] = "auto"
    """Way that a server which joins gets its weights, and only this. Servers give theirs over http, the trainer in any
    way that the joiner takes. auto: a server's, so that training goes on, or else the trainer's."""
    min_healthy_servers: int = Field(default=1, ge=0)
    """Generators that must be there, slots that generate included. With fewer, an update of the weights waits for
    servers to join, at most `cluster.patience_timeout_s`, and the run then ends, with its state saved."""
    drain_timeout_seconds: float = Field(default=60.0, gt=0)
    """A server that leaves has so long to finish what it generates; what is left is carried over to others."""
    max_rejoins: int = Field(default=10, ge=0)
    """Times that an address may join again after its server was lost; `ductile fleet join` begins anew."""
    flap_window_seconds: float = Field(default=600.0, gt=0)
    """An address that loses its server `flap_limit` times within this is in quarantine; each span without a loss takes
    one loss off."""
    flap_limit: int = Field(default=3, ge=1)
    flap_backoff_seconds: float = Field(default=30.0, gt=0)
    """First quarantine of an address; each later one is twice as long, up to `flap_window_seconds`."""
    update_bucket_timeout_seconds: float = Field(default=10.0, gt=0)
    """A server that does not acknowledge a bucket of weights for so long is left behind."""
    update_total_timeout_seconds: float = Field(default=300.0, gt=0, le=3600)
    """Longest that one attempt at an update of the weights may take."""
    update_max_attempts: int = Field(default=2, ge=1)
    """Attempts at an update, each with the servers that are left."""
    pipeline_slots: int = Field(default=4, ge=1)
    """Buckets that a sender has under way at a time; 1: one pending bucket."""
    bucket_bytes: int = Field(default=4 * 2**20, ge=1)
    """Bytes of a bucket of weights at most; a row of a tensor that is larger is a bucket of its own."""
    verify: Literal["none", "sum", "crc"] = "sum"
    """Proof that a server has a version before it changes over: none; the sum over all its bytes; that, and a checksum
    of each bucket."""
    pause_mode: Literal["abort", "keep", "drain"] = "keep"
    """Treatment of running requests while a server changes over: they end, stay where they are, or finish first. Those
    that have not finished after `update_bucket_timeout_seconds` and three probes stay where they are."""
