"""Which server a session stays at.

Each server has a weight for each session, by a hash of both names, and the heaviest one that can be used has the
session (rendezvous hashing): any number of routers agree without asking each other, and when a server comes or goes
only the sessions that it has, or gets, move.
"""

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from ductile.core.instances.instances import InstanceId


def home_of(session: str, instances: Iterable[InstanceId]) -> InstanceId:
    """Return the instance that a session stays at. Raises ValueError where there is none."""
    return max(instances, key=lambda instance: (_weight(session, instance), instance))


def _weight(session: str, instance: InstanceId) -> bytes:
    return blake2b(f"{session}\0{instance}".encode(errors="surrogatepass"), digest_size=8).digest()


class RecentSessions:
    """Instances at which the latest sessions were, so that they find what is cached of them there."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: OrderedDict[str, InstanceId] = OrderedDict()

    def note(self, session: str, instance: InstanceId) -> None:
        if session:
            self._at[session] = instance
            self._at.move_to_end(session)
            if len(self._at) > self._most:
                self._at.popitem(last=False)

    def of(self, session: str) -> InstanceId | None:
        return self._at.get(session)
