"""Addresses at which a fleet looks for servers: those that were named, those that a registry lists, without those that
are kept out. A level, not an edge: it is asked for anew each time, so nothing that is missed is lost."""

import threading
import time
from collections.abc import Callable, Collection, Iterable

from ductile.config.schema.fleet import FleetConfig
from ductile.core.instances.quarantine import FlapRules, Quarantine
from ductile.fleet.registry.registries import Leases, Registry, RegistryDown


class Discovery:
    """May be told by any thread whom to look for. `poll` is for one at a time."""

    def __init__(
        self,
        config: FleetConfig,
        registry: Registry,
        named: Iterable[str] = (),
        tell: Callable[[str], None] = lambda sentence: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._tell, self._clock = registry, tell, clock
        self._goes_on = config.enable_topology_discovery
        self._lock = threading.Lock()
        self._named = frozenset(named)
        self._urgent: frozenset[str] = frozenset()
        """Addresses whose servers join without waiting for others."""
        self._struck: frozenset[str] = frozenset()
        """Addresses that somebody has taken out: they stay out until somebody names them."""
        self._rejected: dict[str, tuple[str, str]] = {}
        """Address, and of it the incarnation that cannot be a member, with a sentence."""
        self._seen: dict[str, str] = {}
        """What the last probe of an address has found instead of a server, a sentence."""
        self._leases: Leases = {}
        self._is_down = self._has_answered = False
        rules = FlapRules(
            config.flap_window_seconds, config.flap_limit, config.flap_backoff_seconds, config.max_rejoins
        )
        self._quarantine = Quarantine(rules)

    @property
    def wanted(self) -> frozenset[str]:
        """Addresses where a server may be that may join now."""
        return frozenset(address for address in self._known - self._struck if not self.why_not(address))

    @property
    def kept_out(self) -> dict[str, str]:
        """Addresses that are known and may not join now, each with a sentence."""
        return {address: why for address in self._known if (why := self.why_not(address))}

    def absent(self, living: Collection[str]) -> dict[str, str]:
        """Return the addresses that are known and not among those of living servers, each with a sentence on why no
        server is there; "" where nothing is known of it."""
        return {
            address: self.why_not(address) or self._seen.get(address) or self._rejected.get(address, ("", ""))[1]
            for address in sorted(self._known)
            if address not in living
        }

    @property
    def _known(self) -> frozenset[str]:
        found = (url for url, lease in self._leases.items() if not lease.is_leaving)
        return self._named.union(found)

    def name(self, address: str, at_once: bool = False) -> None:
        """Look there from now on, whatever was before. at_once: its server waits for no others as it joins."""
        with self._lock:
            self._named |= {address}
            self._urgent |= {address} if at_once else frozenset()
            self._struck -= {address}
            self._rejected.pop(address, None)
            self._quarantine = self._quarantine.vouched(address)

    def is_urgent(self, address: str) -> bool:
        return address in self._urgent

    def joins(self, address: str) -> None:
        """Note that the server there is given weights."""
        with self._lock:
            self._urgent -= {address}

    def saw(self, address: str, instead: str) -> None:
        """Note what a probe of the address has found instead of a server, a sentence; "" for a server."""
        self._seen[address] = instead

    def strike(self, address: str) -> None:
        """Look there no more, also where a registry lists it."""
        with self._lock:
            self._named -= {address}
            self._struck |= {address}

    def lost(self, address: str) -> None:
        """Note that the address has lost its server, or could not give it weights."""
        with self._lock:
            self._quarantine = self._quarantine.lost(address, self._clock())

    def reject(self, address: str, incarnation: str, why: str) -> bool:
        """Keep the process there out; the next one may join. incarnation: "" where it does not say, and no lease does:
        then nobody looks there until somebody names the address. Returns whether that is news."""
        lease = self._leases.get(address)
        rejected = (incarnation or (lease.incarnation if lease else ""), why)
        with self._lock:
            is_news = self._rejected.get(address) != rejected
            self._rejected[address] = rejected
        return is_news

    def why_not(self, address: str, incarnation: str | None = None) -> str:
        """Return why the server at the address may not join now; "" when it may. incarnation: what it says it is; None:
        it is not known."""
        if address in self._struck:
            return f"{address} has been taken out; `ductile fleet join` takes it back"
        lease = self._leases.get(address)
        if incarnation and lease is not None and lease.is_leaving and lease.incarnation == incarnation:
            return f"{address} is leaving"
        rejected, why = self._rejected.get(address, ("", ""))
        leased = lease.incarnation if lease is not None else ""
        if why and (not rejected or (incarnation or leased) == rejected):
            return why
        return self._quarantine.why_not(address, self._clock())

    async def poll(self) -> tuple[str, ...]:
        """Ask the registry. Return the addresses of servers that say that they are leaving. While it cannot be asked,
        or lists nobody, what it said before holds."""
        try:
            leases = await self._registry.servers()
        except RegistryDown as error:
            if not self._is_down:
                self._tell(f"{error}; the servers that are known are kept")
            self._is_down = True
            return ()
        self._is_down = False
        if not self._goes_on and self._has_answered:  # it found whom it found at the start
            leases = {url: lease for url, lease in leases.items() if url in self._leases}
        self._has_answered = True
        if leases:
            self._leases = leases
        return tuple(url for url, lease in leases.items() if lease.is_leaving)

    async def close(self) -> None:
        await self._registry.close()
