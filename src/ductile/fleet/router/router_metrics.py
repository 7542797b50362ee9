"""Metrics of a router, for Prometheus: its own counts, by server. What servers count they tell themselves."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ductile.fleet.router.routed_servers import RoutedServer

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class RouterMetrics:
    def __init__(self, servers: Callable[[], Iterable[RoutedServer]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServerCollector(servers))
        self.attempts = Counter(
            "ductile_router_attempts",
            "Requests that a server was asked, by what became of them: done, refused, failed, gone (the client was).",
            ["replica", "outcome"],
            registry=self._registry,
        )
        self.carried = Counter(
            "ductile_router_carried",
            "Requests that another server was asked again, or went on with, after this one had failed.",
            ["replica"],
            registry=self._registry,
        )
        self.prefills = Counter(
            "ductile_router_prefills",
            "Prompts that a server computed for others: done, or failed.",
            ["replica", "outcome"],
            registry=self._registry,
        )
        self.unserved = Counter(
            "ductile_router_unserved", "Requests for which there was no server.", registry=self._registry
        )
        self.request_s = Histogram(
            "ductile_router_request_seconds",
            "From a request's arrival to the last byte of its response.",
            buckets=SECONDS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _ServerCollector(Collector):
    """Asks the books when Prometheus asks us."""

    def __init__(self, servers: Callable[[], Iterable[RoutedServer]]) -> None:
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("ductile_router_replica_up", "1 for a server that gets requests.", labels=["replica"])
        running = GaugeMetricFamily("ductile_router_sequences", "At a server now.", labels=["replica"])
        tokens = GaugeMetricFamily(
            "ductile_router_outstanding_tokens",
            "Predicted tokens that a server still has to sample.",
            labels=["replica"],
        )
        for each in self._servers():
            up.add_metric([each.url], float(each.is_serving))
            running.add_metric([each.url], each.num_sequences)
            tokens.add_metric([each.url], each.remaining_tokens)
        yield from (up, running, tokens)
