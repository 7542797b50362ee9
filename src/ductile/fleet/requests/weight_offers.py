"""Offers of the live weights, for instances that join the generators or scorers. They never come from disk, but from

    an instance of the same role   its copy is in the form that the joiner wants
    for a generator: a scorer
    the trainer                    as long as its weights are the live version, at a boundary
    for a scorer: a generator      last, since its copy may be of a smaller dtype

Each in turn, until the joiner has made the version live. Joiners that come at the same time share an offer; the last of
them ends it.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from ductile.concurrency.background import start
from ductile.core.instances.instances import sort_key
from ductile.fleet.requests.instance_port import InstancePort, SlotsPort
from ductile.messages.workers import EndOffer, OfferWeights, Published
from ductile.records import Manifest
from ductile.roles import Failure, Late, Refused, SlotLost


class WeightSource(Protocol):
    """First source of all weights: the trainer of `ductile.fleet.trainer.remote_trainer`."""

    def can_offer(self, version: int) -> bool: ...

    async def offer(self, version: int) -> Manifest: ...

    async def withdraw(self, version: int) -> None: ...

    def want_whole(self) -> None: ...


_Source = InstancePort | None
"""Source of an offer: an instance that has the weights, or the trainer (None)."""


@dataclass(slots=True, eq=False)
class _Offer:
    """What one source offers, shared by all joiners that read it at the same time."""

    version: int
    manifest: "asyncio.Task[Manifest]"
    num_users: int = 0


class WeightOffers:
    """Knows which instance has which version, and has it offered by one of them for an instance that joins."""

    def __init__(self, trainer: WeightSource) -> None:
        self._trainer = trainer
        self._versions: dict[InstancePort, int] = {}
        self._offers: dict[_Source, _Offer] = {}

    def note(self, holder: InstancePort, version: int) -> None:
        """Note that the instance has this version live. A server's gets to other servers alone
        (`ductile.fleet.updates.donor`)."""
        if holder.instance.slots:
            self._versions[holder] = version

    def forget(self, holder: InstancePort) -> None:
        """Forget an instance that is none any more."""
        self._versions.pop(holder, None)

    def want_whole(self) -> None:
        """Have the next version be published as a whole: an instance waits for it that has no weights."""
        self._trainer.want_whole()

    async def give(self, joiner: SlotsPort, version: int) -> bool:
        """Have `joiner`, which has the role and no weights, make this version live. False: no source has it any more.

        Raises SlotLost when the joiner is lost, and the first failure when no source could give the weights.
        """
        failures: list[Exception] = []
        for source in self._sources(joiner, version):
            receiving = False
            try:
                async with self._offered(source, version) as manifest:
                    receiving = True
                    await joiner.receive(manifest, joining=True)
            except Failure as error:
                if receiving and isinstance(error, Late):
                    raise  # it would be as late with the weights of another source
                if why := joiner.why_lost:
                    raise SlotLost(why) from error
                # A trainer that has gone on meanwhile offers it no more: the next version is on its way. And that a
                # source is lost says nothing of the joiner.
                if self._trainer.can_offer(version) if source is None else not isinstance(error, SlotLost):
                    failures.append(error)
            else:
                self.note(joiner, version)
                return True
        if not failures:
            return False
        for later in failures[1:]:
            failures[0].add_note(str(later))
        raise failures[0]

    def _sources(self, joiner: SlotsPort, version: int) -> list[_Source]:
        held = [port for port, held in self._versions.items() if held == version]
        holders, role = sorted(held, key=lambda port: sort_key(port.instance)), joiner.instance.role
        own: list[_Source] = [holder for holder in holders if holder.instance.role == role]
        others: list[_Source] = [holder for holder in holders if holder.instance.role != role]
        trainer: list[_Source] = [None] if self._trainer.can_offer(version) else []
        return [*own, *others, *trainer] if role == "generate" else [*own, *trainer, *others]

    @asynccontextmanager
    async def _offered(self, source: _Source, version: int) -> AsyncGenerator[Manifest]:
        offer = self._offers.get(source)
        if offer is None:
            offer = self._offers[source] = _Offer(version, asyncio.create_task(self._begin(source, version)))
        elif offer.version != version:
            raise Refused(f"{self._name(source)} offers version {offer.version} at the moment, not {version}")
        offer.num_users += 1
        try:
            yield await asyncio.shield(offer.manifest)
        finally:
            offer.num_users -= 1
            if not offer.num_users:
                del self._offers[source]
                # Not waited for: a later offer of this source is asked for after this.
                start(self._end(source, offer))

    async def _begin(self, source: _Source, version: int) -> Manifest:
        if source is None:
            return await self._trainer.offer(version)
        reply = await source.ask(OfferWeights(source.instance.role))
        manifest = reply.manifest if isinstance(reply, Published) else None
        if manifest is None or manifest.version != version:
            offered = "nothing" if manifest is None else f"version {manifest.version}"
            raise Refused(f"{self._name(source)} was asked for version {version} and offers {offered}")
        return manifest

    async def _end(self, source: _Source, offer: _Offer) -> None:
        with suppress(Failure):  # the joiners have heard of a failure; what a lost slot offered is gone with it
            if source is not None:
                await source.ask(EndOffer(source.instance.role))
            else:
                await offer.manifest
                await self._trainer.withdraw(offer.version)

    def _name(self, source: _Source) -> str:
        return "the trainer" if source is None else source.describe()
