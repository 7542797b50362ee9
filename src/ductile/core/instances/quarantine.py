"""Quarantine of addresses that lose their server again and again. Each loss adds one to the address's score, each span
of `window_s` without a loss takes one off. From `limit` on an address waits before it joins again: `backoff_s`, then
twice as long with each loss, up to `window_s`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class FlapRules:
    window_s: float = 600.0
    limit: int = 3
    backoff_s: float = 30.0
    max_rejoins: int = 10


@dataclass(frozen=True, slots=True)
class _Record:
    score: int
    at: float
    until: float
    losses: int
    """All losses since somebody last vouched for the address."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Losses by address. Every method returns what is known after it."""

    rules: FlapRules = FlapRules()
    records: Mapping[str, _Record] = field(default_factory=dict[str, _Record])

    def lost(self, address: str, now: float) -> "Quarantine":
        before = self.records.get(address, _Record(0, now, now, 0))
        score = self._score(before, now) + 1
        over = score - self.rules.limit
        wait_s = min(self.rules.backoff_s * 2.0 ** min(over, 60), self.rules.window_s) if over >= 0 else 0.0
        after = _Record(score, now, now + wait_s, before.losses + 1)
        return replace(self, records={**self.records, address: after})

    def vouched(self, address: str) -> "Quarantine":
        """Let an address that somebody has asked for by hand begin anew."""
        others = {each: record for each, record in self.records.items() if each != address}
        return replace(self, records=others)

    def why_not(self, address: str, now: float) -> str:
        """Return why the address may not join now, a sentence; "" when it may."""
        record = self.records.get(address)
        if record is None:
            return ""
        if record.losses > self.rules.max_rejoins:
            return (
                f"{address} has lost its server {record.losses} times, and may join again {self.rules.max_rejoins} "
                "times (inference.max_rejoins); `ductile fleet join` begins anew"
            )
        if now < record.until:
            return (
                f"{address} has lost its server {record.score} times lately; it may join in {record.until - now:.0f} s"
            )
        return ""

    def _score(self, record: _Record, now: float) -> int:
        return max(0, record.score - int((now - record.at) / self.rules.window_s))
