"""A barrier of slots that prepare something together, and may be told to stop at any time.

    barrier = AbortableBarrier(store, prefix, slot, members, timeout_s)
    barrier.enter()
    barrier.all_or_none(go_on)      raises unless all are here and go on
    ...                               what cannot be interrupted: make groups
    barrier.leave()                 always, at the end

Who makes a group reads the others' addresses from the store and waits for them to connect. If one of them leaves then,
the others wait until their timeout; and an address that is taken down while it is read is read as nothing, which ends
the process (gloo takes what it gets for an address). So all of them begin, or none does; and the last one out takes the
notes down, when no slot is left that could read them. A slot that dies inside never leaves: its change's notes stay,
some hundred bytes a slot.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch._C._distributed_c10d import Store

from ductile.fabric import rendezvous
from ductile.fabric.carrier import TransferFailed
from ductile.fabric.exchange import FIRST_PAUSE_S, LAST_PAUSE_S

_GO = "go"


class AbortableBarrier:
    def __init__(
        self,
        store: Store,
        prefix: str,
        slot: int,
        members: Sequence[int],
        timeout_s: float,
        others: Sequence[str] = (),
    ) -> None:
        """Notes lie under `prefix`. The last member to leave deletes them and what lies under the `others`."""
        self._store, self._prefix, self._slot, self._members = store, prefix, slot, tuple(members)
        self._prefixes = (prefix, *others)
        self._timeout_s = timeout_s
        self._verdict = f"{prefix}verdict"
        self._is_inside = False

    def enter(self) -> None:
        self._store.add(f"{self._prefix}inside", 1)
        self._is_inside = True

    def leave(self) -> None:
        """Leaving twice changes nothing."""
        if not self._is_inside:
            return
        self._is_inside = False
        with suppress(RuntimeError):  # the store ends with the run
            if self._store.add(f"{self._prefix}inside", -1) == 0:
                for prefix in self._prefixes:
                    rendezvous.forget(self._store, prefix)

    def all_or_none(self, go_on: Callable[[], None]) -> None:
        """Returns on all members, or on none; once it has, again at once.

        `go_on` raises when this slot is to stop. Then no member goes on, unless all have come already: then this slot
        goes on as well. Raises `TransferFailed` when another slot has stopped or does not come within the timeout.
        """
        try:
            said = self._until_decided(go_on)
        except Exception as error:
            if self._decide(f"slot {self._slot} does not go on: {error}") == _GO:
                return
            raise
        if said != _GO:
            raise TransferFailed(said)

    def _until_decided(self, go_on: Callable[[], None]) -> str:
        here = {member: f"{self._prefix}here/{member}" for member in self._members}
        self._store.set(here[self._slot], "")
        deadline, pause_s = time.monotonic() + self._timeout_s, FIRST_PAUSE_S
        while not self._store.check(list(here.values())):
            if self._store.check([self._verdict]):
                break
            if time.monotonic() >= deadline:
                awaited = [member for member, key in here.items() if not self._store.check([key])]
                raise TransferFailed(f"slots {awaited} did not come within {self._timeout_s:g} s", *awaited[:1])
            go_on()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return self._decide(_GO)

    def _decide(self, wanted: str) -> str:
        """The verdict of the member that decided first."""
        return self._store.compare_set(self._verdict, "", wanted).decode()
