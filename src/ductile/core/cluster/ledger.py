"""Which slot did what for how long. Every second of a slot belongs to exactly one activity."""

from dataclasses import dataclass, replace
from typing import Literal

Activity = Literal["train", "generate", "score", "publish", "switch", "idle"]


@dataclass(frozen=True, slots=True)
class SlotLedger:
    """One slot's account. Times are seconds on any one clock; the caller passes them in."""

    slot: int
    since_s: float
    activity: Activity = "idle"
    opened_s: float = 0.0
    seconds: tuple[tuple[Activity, float], ...] = ()
    """Closed entries, one an activity."""

    @staticmethod
    def opened(slot: int, now_s: float) -> "SlotLedger":
        return SlotLedger(slot=slot, since_s=now_s, opened_s=now_s)

    def switch(self, activity: Activity, now_s: float) -> "SlotLedger":
        """The account after the slot turned to `activity` at `now_s`. A clock that runs backwards adds nothing."""
        if activity == self.activity:
            return self
        now_s = max(now_s, self.since_s)
        return replace(self, activity=activity, since_s=now_s, seconds=tuple(self.totals(now_s).items()))

    def totals(self, now_s: float) -> dict[Activity, float]:
        """Seconds by activity until `now_s`; their sum is `now_s - opened_s`."""
        totals = dict(self.seconds)
        totals[self.activity] = totals.get(self.activity, 0.0) + max(0.0, now_s - self.since_s)
        return totals
