"""Has a run ask for as many nodes as it could use, as seen after each step (`ductile.core.scheduling.node_demand`)."""

import time
from collections.abc import Callable, Mapping

from ductile.config.schema.cluster import ClusterConfig
from ductile.core.scheduling.facts.ledger import IdleCause, Ledger
from ductile.core.scheduling.node_demand import NodeDemand, lacked_share, node_demand
from ductile.observe import Listener


class NodeDemands(Listener):
    def __init__(
        self,
        config: ClusterConfig,
        ledger: Callable[[], Ledger],
        num_there: Callable[[], int],
        want: Callable[[NodeDemand], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ledger: the run's, which begins anew when its slots have their roles. num_there: nodes that the run has now.
        want: told after each step; it must return at once. clock: the ledger's."""
        self._config, self._ledger, self._clock = config, ledger, clock
        self._num_there, self._want = num_there, want
        self._num_asked = config.num_nodes
        self._known: tuple[object, float, Mapping[IdleCause, float]] = None, 0.0, {}
        """The ledger that was looked at, what there was to spend in it, and what was idle."""

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        config = self._config
        lacked, there = self._lacked() if step else None, self._num_there()
        most = config.max_nodes or config.num_nodes
        demand = node_demand(config.num_nodes, most, there, config.auto_scheduler, lacked, self._num_asked)
        self._num_asked = demand.num_nodes
        self._want(demand)

    def _lacked(self) -> float | None:
        """Return the share of the slots' time since the last call in which they lacked work."""
        ledger, now_s = self._ledger(), self._clock()
        before, spent_before_s, idle_before_s = self._known
        spent_s, idle_s = ledger.slot_seconds(now_s), ledger.idle(now_s)
        self._known = ledger, spent_s, idle_s
        if before is not ledger:
            return lacked_share(idle_s, spent_s)
        since: dict[IdleCause, float] = {
            cause: all_s - idle_before_s.get(cause, 0.0) for cause, all_s in idle_s.items()
        }
        return lacked_share(since, spent_s - spent_before_s)
