"""Which servers `ductile inference` starts on this machine, and what is before them. What cannot be is a finding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from pydantic import ValidationError

from ductile.config.checks.access import server_findings
from ductile.config.checks.fleet_findings import health_findings, url_findings
from ductile.config.finding import Finding
from ductile.config.reading.errors import did_you_mean, listed
from ductile.config.schema.cluster import (
    ClusterConfig,
    DisaggregatedServing,
    LlmdRouter,
    MultiNodeServing,
    RouterConfig,
    RouterPolicy,
    VllmRouter,
)
from ductile.config.schema.fleet import HealthCheckConfig
from ductile.config.schema.inference import EngineConfig
from ductile.config.schema.run import InferenceRunConfig, RouterRunConfig

LAST_PORT = 65535
OVERRIDDEN = frozenset(EngineConfig.model_fields) - {"model", "server", "parallel", "engine"}
"""Keys that servers which compute prompts may have otherwise than those that go on with them: no key of the model."""

ServerRole = Literal["any", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """One server of `ductile inference`, a process on a device of its own."""

    number: int
    """Number of its device, from 0."""
    role: ServerRole
    port: int
    """0 takes a free one."""
    overrides: dict[str, Any]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class NodeServers:
    """Servers of one role on some nodes of a job, equally many on each."""

    role: ServerRole
    num_nodes: int
    each: int
    """Servers of a node, each on a device of its own."""
    port: int
    """Port of a node's first one; the others have those after it."""
    overrides: dict[str, Any]
    environment: dict[str, str]


def router_of(config: InferenceRunConfig) -> RouterConfig | None:
    """Return the router that is before all the servers; None where a single server is asked itself, or one of each
    node."""
    deployment = config.deployment
    if deployment.router is not None:
        return deployment.router
    # A node of a job that has no router has its own where it has several servers.
    is_one = deployment.type == "single_node" and config.parallel.dp in (None, 1)
    return None if is_one or deployment.type == "multi_node" else VllmRouter()


def router_port(config: InferenceRunConfig, router: RouterConfig) -> int:
    return config.server.port if router.port is None else router.port


def policy_of(router: RouterConfig) -> RouterPolicy:
    return "least_tokens" if isinstance(router, LlmdRouter) else router.policy


def non_cached_tokens(router: RouterConfig) -> int:
    return router.non_cached_tokens if isinstance(router, LlmdRouter) else 0


def servers_on_nodes(config: InferenceRunConfig) -> tuple[NodeServers, ...]:
    """Return the servers of a job that are behind one router, by the nodes that they are on; none where all are on this
    machine, or each node is for itself."""
    deployment = config.deployment
    if isinstance(deployment, MultiNodeServing) and deployment.router is not None:
        return (NodeServers("any", deployment.num_nodes, config.parallel.dp or 1, deployment.backend_port, {}, {}),)
    if not isinstance(deployment, DisaggregatedServing) or config.slurm is None:
        return ()
    prefill = NodeServers(
        "prefill",
        deployment.num_prefill_nodes,
        _each_node(deployment, "prefill"),
        deployment.prefill_port,
        deployment.prefill_vllm_overrides,
        deployment.prefill_env_overrides,
    )
    decode = NodeServers(
        "decode",
        deployment.num_decode_nodes,
        _each_node(deployment, "decode"),
        deployment.decode_port,
        deployment.decode_vllm_overrides,
        deployment.decode_env_overrides,
    )
    return prefill, decode


def _each_node(deployment: DisaggregatedServing, role: str) -> int:
    """Return the servers of each node that has this role."""
    if f"num_{role}_replicas" not in deployment.model_fields_set:
        return 1
    num_servers, num_nodes = getattr(deployment, f"num_{role}_replicas"), getattr(deployment, f"num_{role}_nodes")
    return -(-num_servers // num_nodes)


def planned_servers(config: InferenceRunConfig) -> tuple[PlannedServer, ...]:
    """Return the servers behind the router, those that compute prompts first."""
    deployment = config.deployment
    if isinstance(deployment, DisaggregatedServing):
        prefill = _row("prefill", deployment.num_prefill_replicas, deployment.prefill_port, 0)
        decode = _row("decode", deployment.num_decode_replicas, deployment.decode_port, len(prefill))
        table = {
            "prefill": (deployment.prefill_vllm_overrides, deployment.prefill_env_overrides),
            "decode": (deployment.decode_vllm_overrides, deployment.decode_env_overrides),
        }
        return tuple(PlannedServer(number, role, port, *table[role]) for number, role, port in (*prefill, *decode))
    row = _row("any", config.parallel.dp or 1, deployment.backend_port, 0)
    return tuple(PlannedServer(number, role, port, {}, {}) for number, role, port in row)


def _row(role: ServerRole, size: int, first_port: int, first: int) -> list[tuple[int, ServerRole, int]]:
    return [(first + index, role, first_port + index if first_port else 0) for index in range(size)]


def serving_findings(config: InferenceRunConfig) -> Iterator[Finding]:
    deployment, router = config.deployment, router_of(config)
    if deployment.type == "multi_node" and router is None:
        return
    restarts = ClusterConfig.model_fields["max_restarts"].default
    if router is None:
        if config.cluster.max_restarts != restarts:
            what = "has no effect here: a single server is not started again. Leave it out, or write deployment.router"
            yield Finding(("cluster.max_restarts",), what)
        return
    if isinstance(deployment, DisaggregatedServing):
        if config.parallel.dp is not None:
            what = (
                "contradicts deployment.type: num_prefill_replicas and num_decode_replicas say how many. Leave it out"
            )
            yield Finding(("parallel.dp", "deployment.type"), what)
        for name in ("prefill", "decode"):
            key = f"deployment.{name}_vllm_overrides"
            yield from _override_findings(key, getattr(deployment, f"{name}_vllm_overrides"))
    yield from health_findings(config, "")
    if on_nodes := servers_on_nodes(config):
        yield from _router_port_findings(config, router)
        for group in on_nodes:
            yield from _port_findings(config, router, _of_a_node(group))
        return
    servers = planned_servers(config)
    if config.bench is not None:
        what = "asks one server of its own. Leave deployment.router out, and parallel.dp"
        yield Finding(("bench", "deployment.router"), what)
    if config.cluster.device != "cpu" and len(servers) > deployment.gpus_per_node:
        what = f"must be at least {len(servers)}: each server has a device of its own"
        yield Finding(("deployment.gpus_per_node", "parallel.dp"), what)
    yield from _router_port_findings(config, router)
    yield from _port_findings(config, router, servers)


def serving_notes(config: InferenceRunConfig) -> Iterator[str]:
    """A sentence for keys of a router that a single server does not read."""
    fields = HealthCheckConfig.model_fields
    given = [name for name in fields if getattr(config, name) != fields[name].default]
    if router_of(config) is None and given:
        has = "has" if len(given) == 1 else "have"
        yield f"{listed(given)} {has} no effect here: it is for `ductile rl` and for a router, which watch servers"


def router_findings(config: RouterRunConfig) -> Iterator[Finding]:
    if not config.urls:
        yield Finding(("urls",), "is missing: write the servers, such as http://10.0.0.7:8000 http://10.0.0.8:8000")
    for key, urls in (("urls", config.urls), ("prefill_urls", config.prefill_urls)):
        for url in urls:
            yield from url_findings(url, key)
    both = [*config.urls, *config.prefill_urls]
    if twice := sorted({url for url in both if both.count(url) > 1}):
        yield Finding(("urls", "prefill_urls"), f"names {twice[0]} twice. Name each server once")
    yield from server_findings(config.server, "server")
    yield from health_findings(config, "")


def _override_findings(key: str, overrides: dict[str, object]) -> Iterator[Finding]:
    for name, value in overrides.items():
        if name not in OVERRIDDEN:
            near = did_you_mean(name, OVERRIDDEN)
            yield Finding((key,), f"has {name!r}, which is no key that one server may have for itself.{near}")
            continue
        try:
            EngineConfig.model_validate({name: value})
        except ValidationError as problem:
            yield Finding((key,), f"has {name} = {value!r}: {problem.errors(include_url=False)[0]['msg']}")


def _of_a_node(group: NodeServers) -> tuple[PlannedServer, ...]:
    return tuple(
        PlannedServer(number, role, port, group.overrides, group.environment)
        for number, role, port in _row(group.role, group.each, group.port, 0)
    )


def _router_port_findings(config: InferenceRunConfig, router: RouterConfig) -> Iterator[Finding]:
    if router.port is not None and "port" in config.server.model_fields_set and router.port != config.server.port:
        what = f"contradicts server.port ({config.server.port}), where the router listens. Leave one of them out"
        yield Finding(("deployment.router.port", "server.port"), what)


def _port_findings(
    config: InferenceRunConfig, router: RouterConfig, servers: Sequence[PlannedServer]
) -> Iterator[Finding]:
    port = router_port(config, router)
    keys = {"any": "deployment.backend_port", "prefill": "deployment.prefill_port", "decode": "deployment.decode_port"}
    taken = [("the router", port), *((f"a {keys[each.role]} server", each.port) for each in servers)]
    by_port = sorted(((number, who) for who, number in taken if number), key=lambda pair: pair[0])
    for (number, who), (other_number, other) in pairwise(by_port):
        if number == other_number:
            key = next(key for key in keys.values() if key in f"{who} {other}")
            yield Finding((key, "server.port"), f"gives port {number} to {who} and to {other}. Write another one")
            return
    for role in dict.fromkeys(each.role for each in servers):
        if max(each.port for each in servers if each.role == role) > LAST_PORT:
            number = sum(each.role == role for each in servers)
            what = f"must be at most {LAST_PORT + 1 - number}: {number} servers have ports from there on"
            yield Finding((keys[role],), what)
