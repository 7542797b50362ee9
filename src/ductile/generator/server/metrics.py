"""Metrics of a server, for Prometheus. A registry of its own, so that several servers fit into one process."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ductile.messages.workers import EngineStats

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    def __init__(self, stats: Callable[[], EngineStats], peak_bytes: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, peak_bytes))
        self.prompt_tokens = Counter("ductile_prompt_tokens", "Tokens of prompts taken.", registry=self._registry)
        self.finished = Counter(
            "ductile_requests_finished", "Sequences that ended, by reason.", ["reason"], registry=self._registry
        )
        self.kv_transfers = Counter(
            "ductile_kv_transfers",
            "Prompts whose keys and values were kept for another server, taken over from one, or computed again.",
            ["outcome"],
            registry=self._registry,
        )
        self.first_token_s = Histogram(
            "ductile_time_to_first_token_seconds",
            "From a streamed request's arrival to its first token.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.request_s = Histogram(
            "ductile_request_seconds",
            "From a request's arrival to its last token.",
            buckets=SECONDS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Asks the engine when Prometheus asks us."""

    def __init__(self, stats: Callable[[], EngineStats], peak_bytes: Callable[[], float]) -> None:
        self._stats, self._peak_bytes = stats, peak_bytes

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("ductile_sequences_running", "In the batch now.", stats.num_running)
        yield GaugeMetricFamily("ductile_sequences_waiting", "Waiting for a place.", stats.num_waiting)
        yield GaugeMetricFamily("ductile_cache_used", "Share of the KV blocks in use, 0 to 1.", stats.cache_used)
        yield GaugeMetricFamily("ductile_weight_version", "That tokens are sampled from.", stats.version)
        most = "The most memory so far: of a GPU what tensors took, else what the process had resident."
        yield GaugeMetricFamily("ductile_peak_memory_bytes", most, self._peak_bytes())
        yield CounterMetricFamily("ductile_generated_tokens", "Tokens sampled.", stats.num_tokens)
        yield CounterMetricFamily("ductile_preemptions", "Sequences that lost their blocks.", stats.num_preempted)
