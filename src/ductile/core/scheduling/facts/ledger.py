"""Which slot did what for how long, and why it did nothing.

Every second of a slot belongs to exactly one activity, and every idle second to exactly one cause. So the seconds of a
`Ledger` add up to wall time times slots, whatever happened (tests/core/scheduling/test_ledger.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Literal

from ductile.core.instances.placement import Role
from ductile.core.layout.geometry.topology import Topology

Activity = Literal["train", "generate", "score", "publish", "switch", "idle"]

IdleCause = Literal[
    "start_up", "tail", "queue_full", "queue_empty", "waiting_for_batch", "held", "no_role", "lost", "other"
]
"""start_up           the slot has not begun yet
tail               a generator without sequences, while others still decode theirs and nothing more may start
queue_full         a generator without sequences: all that may be started is completed, the trainer has to catch up
queue_empty        a generator or scorer that could work, and has been sent nothing
waiting_for_batch  a train slot without finished samples
held               a train slot that a policy makes wait, although there are samples
no_role            a slot without a role
lost               a slot whose process is gone
other              no cause was given"""


@dataclass(frozen=True, slots=True)
class Span:
    """A slot did one thing from `start_s` to `end_s`."""

    slot: int
    start_s: float
    end_s: float
    activity: Activity
    cause: IdleCause | None = None
    """Why the slot was idle; None for other activities."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


LedgerKey = tuple[Activity, IdleCause | None]


@dataclass(frozen=True, slots=True)
class SlotLedger:
    """One slot's account. Times are seconds on any one clock; the caller passes them in."""

    slot: int
    since_s: float
    activity: Activity = "idle"
    opened_s: float = 0.0
    cause: IdleCause | None = "start_up"
    """Why the slot is idle; None while it is not."""
    entries: tuple[tuple[LedgerKey, float], ...] = ()
    """Seconds of closed spans, one number for each activity and cause."""

    @staticmethod
    def opened(slot: int, now_s: float) -> "SlotLedger":
        return SlotLedger(slot=slot, since_s=now_s, opened_s=now_s)

    def switch(self, activity: Activity, now_s: float, cause: IdleCause = "other") -> "SlotLedger":
        """The account after the slot turned to `activity` at `now_s`. A clock that runs backwards adds nothing.

        cause: why the slot is idle; not looked at for other activities.
        """
        because = cause if activity == "idle" else None
        if (activity, because) == (self.activity, self.cause):
            return self
        now_s = max(now_s, self.since_s)
        entries = tuple(self.seconds(now_s).items())
        return replace(self, activity=activity, cause=because, since_s=now_s, entries=entries)

    def seconds(self, now_s: float) -> dict[LedgerKey, float]:
        """Seconds by activity and cause until `now_s`; their sum is `now_s - opened_s`."""
        seconds = dict(self.entries)
        now = (self.activity, self.cause)
        seconds[now] = seconds.get(now, 0.0) + max(0.0, now_s - self.since_s)
        return seconds

    def totals(self, now_s: float) -> dict[Activity, float]:
        """Seconds by activity until `now_s`; their sum is `now_s - opened_s`."""
        return _by_activity(self.seconds(now_s))

    def idle(self, now_s: float) -> dict[IdleCause, float]:
        """Idle seconds by cause until `now_s`."""
        return _by_cause(self.seconds(now_s))


class Ledger:
    """The accounts of all slots, those that left included. It has no clock: time comes in with every call."""

    def __init__(self, on_span: Callable[[Span], None] = lambda span: None) -> None:
        """on_span: told of each closed stretch of one activity, in the order in which they end."""
        self._on_span = on_span
        self._accounts: dict[int, SlotLedger] = {}
        self._closed_s: dict[int, float] = {}

    def open(self, slot: int, now_s: float) -> None:
        """Begin to count a slot, as idle for start-up. One that left may come back: its absence counts for nothing."""
        left_s = self._closed_s.pop(slot, None)
        if left_s is None:
            self._accounts[slot] = SlotLedger.opened(slot, now_s)
            return
        account = self._accounts[slot]
        self._accounts[slot] = replace(
            account,
            opened_s=account.opened_s + now_s - left_s,
            since_s=now_s,
            entries=tuple(account.seconds(left_s).items()),
            activity="idle",
            cause="start_up",
        )

    def close(self, slot: int, now_s: float) -> None:
        """The slot left: it costs nothing from now on."""
        self._tell(slot, now_s)
        self._closed_s[slot] = now_s

    def switch(self, slot: int, activity: Activity, now_s: float, cause: IdleCause = "other") -> None:
        before = self._accounts[slot]
        after = before.switch(activity, now_s, cause)
        if after is not before:
            self._tell(slot, now_s)
            self._accounts[slot] = after

    def account(self, slot: int) -> SlotLedger:
        return self._accounts[slot]

    def finish(self, now_s: float) -> None:
        """Tell of the spans that are still open."""
        for slot in self._accounts:
            if slot not in self._closed_s:
                self._tell(slot, now_s)

    def slot_seconds(self, now_s: float) -> float:
        """What there was to spend: each slot's time from `open` to now or to `close`, added up."""
        return fsum(self._until(slot, now_s) - account.opened_s for slot, account in self._accounts.items())

    def totals(self, now_s: float) -> dict[Activity, float]:
        """Seconds by activity, all slots together; their sum is `slot_seconds`."""
        return _by_activity(self._seconds(now_s))

    def idle(self, now_s: float) -> dict[IdleCause, float]:
        """Idle seconds by cause, all slots together."""
        return _by_cause(self._seconds(now_s))

    def totals_by_node(self, topology: Topology, now_s: float) -> dict[int, dict[Activity, float]]:
        """Seconds of the slots of each node by activity; together they are `totals`."""
        found: dict[int, dict[Activity, float]] = {}
        for slot, account in sorted(self._accounts.items()):
            of_node = found.setdefault(topology.node(slot), {})
            for activity, seconds in account.totals(self._until(slot, now_s)).items():
                of_node[activity] = of_node.get(activity, 0.0) + seconds
        return found

    def _seconds(self, now_s: float) -> dict[LedgerKey, float]:
        return _added(
            entry
            for slot, account in self._accounts.items()
            for entry in account.seconds(self._until(slot, now_s)).items()
        )

    def _until(self, slot: int, now_s: float) -> float:
        return self._closed_s.get(slot, now_s)

    def _tell(self, slot: int, now_s: float) -> None:
        account = self._accounts[slot]
        if now_s > account.since_s:
            self._on_span(Span(slot, account.since_s, now_s, account.activity, account.cause))


def idle_cause(
    roles: Sequence[Role], *, others_decode: bool, may_start: int, samples_ready: int, held: bool
) -> IdleCause:
    """Why a slot with these roles has nothing to do.

    others_decode: some generator has sequences. may_start: rollouts that the staleness bound admits and no generator
    has. samples_ready: samples that are finished and not trained on. held: a policy makes the trainer wait.
    """
    if not roles:
        return "no_role"
    if "train" in roles and samples_ready and held:
        return "held"
    if "generate" in roles:
        if may_start:
            return "queue_empty"
        return "tail" if others_decode else "queue_full"
    return "waiting_for_batch" if "train" in roles else "queue_empty"


def _added(entries: Iterable[tuple[LedgerKey, float]]) -> dict[LedgerKey, float]:
    total: dict[LedgerKey, float] = {}
    for entry, seconds in entries:
        total[entry] = total.get(entry, 0.0) + seconds
    return total


def _by_activity(seconds: Mapping[LedgerKey, float]) -> dict[Activity, float]:
    totals: dict[Activity, float] = {}
    for (activity, _), spent_s in seconds.items():
        totals[activity] = totals.get(activity, 0.0) + spent_s
    return totals


def _by_cause(seconds: Mapping[LedgerKey, float]) -> dict[IdleCause, float]:
    return {cause: spent_s for (_, cause), spent_s in seconds.items() if cause is not None}
