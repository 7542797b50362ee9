"""The servers that a run of `ductile rl` has among its generators, besides its slots or instead of them.

`orchestrator.client.base_url` names them, and `inference.registry` is where the others are found. An address that is
the run's own (loopback, at `inference.server.port`) means its generate slots where it has any: configs of systems that
start a server for each run have it, so that two of them run side by side on one machine.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from ductile.config.checks.access import is_loopback
from ductile.config.checks.asked_placement import placement_of
from ductile.config.finding import Finding
from ductile.config.schema.fleet import CustomRegistry, FileRegistry, HttpRegistry, StaticRegistry
from ductile.config.schema.run import RLConfig
from ductile.config.schema.trainer import NcclBroadcast, WeightBroadcastConfig
from ductile.config.server_address import is_address, root_of
from ductile.core.instances.placement import PlacementError

EXAMPLE = "http://127.0.0.1:8000/v1"
KEY = "orchestrator.client.base_url"


class AskedServers(NamedTuple):
    """Addresses, each without a slash or /v1 at its end."""

    urls: tuple[str, ...]
    own: tuple[str, ...]
    """Addresses that mean the run's own generate slots."""


def asked_servers(config: RLConfig) -> AskedServers:
    """Return the servers that the config names. Those of a registry are not known before the run looks there."""
    try:
        has_slots = bool(placement_of(config).generate)
    except PlacementError:
        has_slots = False
    named = [root_of(url) for url in config.orchestrator.client.urls]
    own = [url for url in named if has_slots and _is_at(url, config.inference.server.port)]
    return AskedServers(tuple(url for url in named if url not in own), tuple(own))


def servers_in_words(config: RLConfig) -> list[str]:
    """Return what `ductile check` says of a run's servers; nothing where it has none."""
    urls, registry = asked_servers(config).urls, config.inference.registry
    if not urls and registry is None:
        return []
    said = [f"{', '.join(urls)} ({KEY})"] if urls else []
    if registry is not None:
        match registry:
            case FileRegistry(folder=place) | HttpRegistry(url=place) | CustomRegistry(import_path=place):
                pass
            case StaticRegistry(urls=urls):
                place = ", ".join(urls)
        when = "while the run goes on" if config.inference.enable_topology_discovery else "at its start"
        said.append(f"those that are found {when} in {place} (inference.registry)")
    broadcast = config.trainer.weight_broadcast
    carriers = {"filesystem": "files in the run's folder", "nccl": "connections to the ranks, made for each version"}
    how = "the fastest way that each has in common with the trainer" if broadcast is None else carriers[broadcast.type]
    beside = "beside the generate slots" if placement_of(config).generate else "and no slot generates"
    return [
        *said,
        f"they generate, {beside}; each version of the weights goes to them by {how}",
        "not asked by this check: whether they are there, have this model and take the key shows when the run begins",
    ]


def server_findings(config: RLConfig) -> Iterator[Finding]:
    """Yield what cannot be of the servers that the config names, and of how they get their weights."""
    urls = config.orchestrator.client.urls
    for url in urls:
        if not is_address(url):
            yield Finding((KEY,), f"has {url!r}; write the address of a server, or a list of them, such as {EXAMPLE}")
    roots = [root_of(url) for url in urls]
    if twice := sorted({url for url in roots if roots.count(url) > 1}):
        yield Finding((KEY,), f"names {twice[0]} twice. Name each server once")
    if not urls and config.orchestrator.client.base_url is not None:
        yield Finding((KEY,), f"is empty: write the address of a server, such as {EXAMPLE}, or leave it out")


def server_notes(config: RLConfig) -> Iterator[str]:
    """Yield what is accepted and does nothing, or says to others what is for servers alone."""
    servers = asked_servers(config)
    port = config.inference.server.port
    for url in servers.own:
        yield (
            f"{KEY} = {url} is taken for this run's own generate slots, as it has their port (inference.server.port "
            f"{port}): no server there is asked. For a server beside them, write --inference.server.port {port + 1}; "
            "for a server instead of them, give no slot the role rollout"
        )
    if not servers.urls and config.inference.registry is None and config.trainer.weight_broadcast is not None:
        yield (
            "trainer.weight_broadcast has no effect here: it is for servers, and this run has none "
            f"({KEY}, inference.registry). Its slots read new weights from shared memory"
        )
    yield from _plain_notes(servers.urls, config.trainer.weight_broadcast)


def _plain_notes(urls: Sequence[str], broadcast: WeightBroadcastConfig | None) -> Iterator[str]:
    """Yield where weights go over the network as they are."""
    plain = [url for url in urls if url.startswith("http://") and not is_loopback(urlsplit(url).hostname or "")]
    if plain:
        yield (
            f"{KEY} has {', '.join(plain)}: HTTP is not encrypted, and whoever is on the way reads the key, prompts "
            "and weights. Have servers speak HTTPS (server.ssl_certfile of `ductile inference`), or their own network"
        )
    if isinstance(broadcast, NcclBroadcast) and not is_loopback(broadcast.host):
        yield (
            f"trainer.weight_broadcast.host = {broadcast.host!r}: its connections prove who is there, and are not "
            "encrypted. Leave trainer.weight_broadcast out, and servers of other hosts get weights as they are asked "
            "for rollouts (https://), or have a network of their own"
        )


def _is_at(url: str, port: int) -> bool:
    try:
        parts = urlsplit(url)
        return is_loopback(parts.hostname or "") and parts.port == port
    except ValueError:
        return False
