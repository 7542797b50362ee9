"""Who gives the live weights to a slot that joins the generators or scorers. They never come from disk.

    a slot of the same role        its copy is in the form that the joiner wants
    for a generator: a scorer
    the trainer                    as long as its weights are the live version, at a boundary
    for a scorer: a generator      last, since its copy may be of a smaller dtype

Each in turn, until the joiner has made the version live. Joiners that come at the same time share what is offered; the
last of them gives it back.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from ductile.records import Manifest
from ductile.roles import Late, Refused, SlotLost
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Lend, Published, Receive, TakeBack

Serving = Literal["generate", "score"]
"""Roles in which each slot works for itself, with a whole model."""

FAILURES = (SlotLost, Late, Refused)


class WeightSource(Protocol):
    """Where weights come from in the first place: `ductile.wire.trainer`."""

    def can_lend(self, version: int) -> bool: ...

    async def lend(self, version: int) -> Manifest: ...

    async def withdraw(self, version: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Holder:
    """A slot that has weights, as a generator or as a scorer."""

    role: Serving
    slot: int


_Source = _Holder | None
"""Where weights are fetched from: a slot that has them, or the trainer (None)."""


@dataclass(slots=True, eq=False)
class _Offer:
    version: int
    manifest: "asyncio.Task[Manifest]"
    num_users: int = 0


class Lender:
    """Knows which slot has which version, and has them lend it."""

    def __init__(self, mailbox: Mailbox, trainer: WeightSource, timeout_s: float) -> None:
        self._mailbox, self._trainer, self._timeout_s = mailbox, trainer, timeout_s
        self._versions: dict[_Holder, int] = {}
        self._offers: dict[_Source, _Offer] = {}
        self._taking_back: set[asyncio.Task[None]] = set()

    def note(self, role: Serving, slot: int, version: int) -> None:
        """The slot has this version live."""
        self._versions[_Holder(role, slot)] = version

    def forget(self, role: Serving, slot: int) -> None:
        """The slot does not hold the role any more."""
        self._versions.pop(_Holder(role, slot), None)

    async def give(self, role: Serving, slot: int, version: int) -> bool:
        """Have `slot`, which has the role and no weights, make this version live. False: no source has it any more.

        Raises SlotLost when `slot` is lost, and the first failure when no source could give the weights.
        """
        failures: list[Exception] = []
        for source in self._sources(role, version):
            try:
                async with self._offered(source, version) as manifest:
                    await self._mailbox.ask(slot, Receive(role, manifest), self._timeout_s)
            except FAILURES as error:
                if slot in self._mailbox.lost:
                    raise SlotLost(self._mailbox.lost[slot]) from error
                # A trainer that has gone on meanwhile has no more to lend: the next version is on its way.
                if source is not None or self._trainer.can_lend(version):
                    failures.append(error)
            else:
                self.note(role, slot, version)
                return True
        if not failures:
            return False
        for later in failures[1:]:
            failures[0].add_note(str(later))
        raise failures[0]

    def _sources(self, role: Serving, version: int) -> list[_Source]:
        holders = sorted((h for h, held in self._versions.items() if held == version), key=lambda h: h.slot)
        own: list[_Source] = [holder for holder in holders if holder.role == role]
        others: list[_Source] = [holder for holder in holders if holder.role != role]
        trainer: list[_Source] = [None] if self._trainer.can_lend(version) else []
        return [*own, *others, *trainer] if role == "generate" else [*own, *trainer, *others]

    @asynccontextmanager
    async def _offered(self, source: _Source, version: int) -> AsyncIterator[Manifest]:
        offer = self._offers.get(source)
        if offer is None:
            offer = self._offers[source] = _Offer(version, asyncio.create_task(self._lend(source, version)))
        elif offer.version != version:
            raise Refused(f"{self._name(source)} lends version {offer.version} at the moment, not {version}")
        offer.num_users += 1
        try:
            yield await asyncio.shield(offer.manifest)
        finally:
            offer.num_users -= 1
            if not offer.num_users:
                del self._offers[source]
                # Not waited for: what this source lends from now on is asked for after this.
                taking_back = asyncio.create_task(self._take_back(source, offer))
                self._taking_back.add(taking_back)
                taking_back.add_done_callback(self._taking_back.discard)

    async def _lend(self, source: _Source, version: int) -> Manifest:
        if source is None:
            return await self._trainer.lend(version)
        reply = await self._mailbox.ask(source.slot, Lend(source.role), self._timeout_s)
        manifest = reply.manifest if isinstance(reply, Published) else None
        if manifest is None or manifest.version != version:
            lends = "nothing" if manifest is None else f"version {manifest.version}"
            raise Refused(f"{self._name(source)} was to lend version {version} and lends {lends}")
        return manifest

    async def _take_back(self, source: _Source, offer: _Offer) -> None:
        with suppress(*FAILURES):  # the joiners have heard of a failure; what a lost slot lent is gone with it
            if source is not None:
                await self._mailbox.ask(source.slot, TakeBack(source.role), self._timeout_s)
            else:
                await offer.manifest
                await self._trainer.withdraw(offer.version)

    def _name(self, source: _Source) -> str:
        return "the trainer" if source is None else self._mailbox.describe(source.slot)
