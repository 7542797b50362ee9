"""Somebody outside who looks at all servers all the time, and remembers what they said of themselves.

What must hold of it, whatever a test does: an incarnation's epoch and version never go back (I7), and no digest is
shown for a version but that version's own (I2).
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import msgspec

from ductile.messages.updates import Digest, ServerState

EVERY_S = 0.03


@dataclass(frozen=True, slots=True)
class Seen:
    server: str
    incarnation: str
    version: int
    digest: Digest
    epoch: int


class Watcher:
    """A thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        """Servers to look at, by name; changed by whoever starts them."""
        self.seen: list[Seen] = []
        """Each time that something was another than before."""
        self._latest: dict[str, Seen] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(10)

    def violations(self, digests: Mapping[int, Digest]) -> list[str]:
        """digests: of all versions, by number."""
        found, last = [], dict[str, Seen]()
        for seen in self.seen:
            before = last.get(seen.incarnation)
            if before is not None and seen.epoch < before.epoch:
                found.append(f"{seen.server}: epoch {before.epoch} was followed by {seen.epoch}")
            if before is not None and seen.version < before.version:
                found.append(f"{seen.server}: version {before.version} was followed by {seen.version}")
            if seen.digest != digests.get(seen.version):
                found.append(
                    f"{seen.server}: version {seen.version} has digest {seen.digest}, the trainer's is "
                    f"{digests.get(seen.version)}"
                )
            last[seen.incarnation] = seen
        return found

    def _look(self) -> None:
        with httpx.Client(timeout=0.3, trust_env=False) as client:
            while not self._ends.wait(EVERY_S):
                for name, url in [*self.urls.items()]:
                    try:
                        reply = client.get(f"{url}/fleet/state")
                        state = msgspec.json.decode(reply.content, type=ServerState)
                    except (httpx.HTTPError, msgspec.DecodeError):
                        continue
                    if not state.serving:
                        continue
                    seen = Seen(name, state.incarnation, state.version, state.digest, state.epoch)
                    if self._latest.get(name) != seen:
                        self.seen.append(seen)
                        self._latest[name] = seen
