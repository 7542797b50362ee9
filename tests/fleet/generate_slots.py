"""Generate slots in memory that know the rules: the double of `ductile.generator.generate_role` behind its messages.

A token says whose it is and where it stands, so that one which is lost, doubled or somebody else's shows. Commands that
come at the wrong moment fail the test, not the slot. Caches and offered weights are in books of their own: what is left
in them at the end has leaked.
"""

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ductile.core.instances.instances import Instance, instance_on
from ductile.messages.workers import (
    Abort,
    AssignRole,
    Command,
    Done,
    EndOffer,
    EngineStats,
    Failed,
    Finished,
    Forget,
    Generate,
    MigratedOut,
    MigrateOut,
    OfferWeights,
    OptimStep,
    Publish,
    Published,
    Receive,
    ReleaseRole,
    Reply,
    Stepped,
    Withdraw,
)
from ductile.records import GenerateRequest, Generation, KVHandle, Manifest, StepReport
from ductile.roles import NotTaken
from tests.transport.memory_transport import MemoryTransport

TOKEN_S = 0.1


def generator(slot: int, birth: int = 0) -> Instance:
    """The generator that begins on this slot in the change of this number."""
    return instance_on("generate", (slot,), birth)


def base(name: str) -> str:
    """The request's own name: a second attempt has another on the wire."""
    return name.partition("~")[0]


def token(name: str, position: int) -> int:
    """What any slot samples there for this request."""
    return zlib.crc32(f"{base(name)}/{position}".encode()) >> 1  # a token id has 31 bits


def completion_of(name: str, length: int) -> tuple[int, ...]:
    return tuple(token(name, position) for position in range(length))


@dataclass
class Slot:
    number: int
    version: int | None = None
    """None: it has no weights."""
    holds: bool = False
    live: dict[str, GenerateRequest] = field(default_factory=dict)
    caches: dict[str, int] = field(default_factory=dict)
    """Kept for others: tokens by request."""
    offered: str = ""
    waiting: list[str] = field(default_factory=list)
    num_sampled: int = 0


class GenerateSlots:
    """All slots of a run; those in `generating` begin as generators with the first weights."""

    def __init__(self, num_slots: int, generating: tuple[int, ...], length: Callable[[str], int]) -> None:
        self.slots = {number: Slot(number) for number in range(num_slots)}
        for number in generating:
            self.slots[number].holds, self.slots[number].version = True, 0
        self.carrier = MemoryTransport(dict.fromkeys(self.slots, self.respond))
        self.length = length
        self.wrong: list[str] = []
        """What should not have been asked."""
        self.with_cache: list[str] = []
        """Requests that went on from a cache that another slot had kept."""
        self.offers: dict[str, int] = {}
        """Manifests that are good, with their versions, by location."""
        self.published: dict[tuple[int, bool], Manifest] = {}
        """Manifests by version, and whether they are whole."""
        self.adapted = False
        """The model has adapters: versions are published without what is not trained, where they are asked for so."""
        self.dead: set[int] = set()
        self.reply_s: Callable[[int, Command], float] = lambda number, command: 0.0
        self._delays: list[tuple[int, type, float]] = []
        self._turns = {number: asyncio.Lock() for number in self.slots}
        self._count = 0

    async def respond(self, number: int, command: Command) -> Reply:
        slot = self.slots[number]
        async with self._turns[number]:  # a slot executes its commands in order
            await asyncio.sleep(self.reply_s(number, command) + self._delay_s(number, command))
            try:
                return self._respond(slot, command)
            except AssertionError as error:
                self.wrong.append(f"slot {slot.number}: {type(command).__name__}: {error}")
                return Failed(str(error))

    def delay(self, number: int, on: type, seconds: float) -> None:
        """The next such command takes so long, and what comes after it waits: unlike a fault of the carrier's, it does
        not change the order."""
        self._delays.append((number, on, seconds))

    def _delay_s(self, number: int, command: Command) -> float:
        for delay in self._delays:
            if delay[0] == number and isinstance(command, delay[1]):
                self._delays.remove(delay)
                return delay[2]
        return 0.0

    async def decode(self) -> None:
        """Every slot samples a token of each of its requests, again and again."""
        while True:
            await asyncio.sleep(TOKEN_S)
            for slot in self.slots.values():
                if slot.number not in self.dead and slot.live:
                    self._step(slot)

    def kill(self, number: int, mailbox) -> None:
        """As kill -9 does: what the slot kept or lent is gone."""
        slot = self.slots[number]
        self.dead.add(number)
        slot.live.clear()
        slot.caches.clear()
        self.offers.pop(slot.offered, None)
        mailbox.lose(number, f"slot {number} was killed by SIGKILL")

    def leaks(self) -> list[str]:
        alive = [slot for slot in self.slots.values() if slot.number not in self.dead]
        return [
            *(f"slot {slot.number} still generates {sorted(slot.live)}" for slot in alive if slot.live),
            *(f"slot {slot.number} keeps caches of {sorted(slot.caches)}" for slot in alive if slot.caches),
            *(f"slot {slot.number} offers {slot.offered}" for slot in alive if slot.offered),
            *(f"version {version} is published" for version, _ in self.published),
        ]

    def _step(self, slot: Slot) -> None:
        ended: list[Generation] = []
        for name, request in list(slot.live.items()):
            assert slot.version is not None
            position = len(request.generated)
            slot.num_sampled += 1
            slot.live[name] = replace(
                request,
                generated=(*request.generated, token(name, position)),
                logprobs=(*request.logprobs, -0.5),
                versions=(*request.versions, slot.version),
            )
            if position + 1 >= self.length(base(name)):
                ended.append(self._end(slot, name, "stop"))
        if ended:
            self.carrier.emit(slot.number, Finished(tuple(ended)))
        self.carrier.emit(slot.number, self._stats(slot))

    def _stats(self, slot: Slot) -> EngineStats:
        generated = {name: len(request.generated) for name, request in slot.live.items()}
        return EngineStats(len(slot.live), 0, slot.num_sampled, 0, 0.0, slot.version or 0, generated)

    def _end(self, slot: Slot, name: str, reason) -> Generation:
        request = slot.live.pop(name)
        return Generation(name, request.generated, request.logprobs, request.versions, reason)

    def _respond(self, slot: Slot, command: Command) -> Reply:
        if isinstance(command, Publish | Withdraw):
            return self._publish(slot, command)
        if isinstance(command, OptimStep):
            return Stepped(StepReport(1, 0.0, 0.0, 0.0, 1))
        if not isinstance(command, AssignRole) and not slot.holds:
            assert isinstance(command, ReleaseRole | Abort | OfferWeights | EndOffer | Forget), "does not generate"
            return Failed("does not generate")
        match command:
            case AssignRole(joining=joining):
                assert joining, "would read weights from disk"
                assert not slot.holds, "holds the role already"
                slot.holds, slot.version = True, None
            case ReleaseRole():
                slot.live.clear()  # only aborted ones may be left, as the replies show
                slot.holds, slot.version = False, None
                slot.caches.clear()
                self.offers.pop(slot.offered, None)
                slot.offered = ""
            case Generate(requests, caches):
                assert slot.version is not None, "has no weights"
                for request in requests:
                    assert request.id not in slot.live, f"has {request.id} already"
                    assert request.generated == completion_of(request.id, len(request.generated)), (
                        "somebody else's tokens"
                    )
                    slot.live[request.id] = request
                for name, handle in caches.items():
                    kept = self.slots[int(handle.location)].caches
                    if name in kept:
                        assert kept[name] == handle.num_tokens
                        self.with_cache.append(name)
            case Abort(ids):
                ended = [self._end(slot, name, "abort") for name in ids or () if name in slot.live]
                if ended:
                    self.carrier.emit(slot.number, Finished(tuple(ended)))
            case MigrateOut(ids, with_cache):
                return self._migrate_out(slot, ids, with_cache)
            case Forget(ids):
                for name in ids:
                    slot.caches.pop(name, None)
            case OfferWeights():
                assert slot.version is not None, "has no weights"
                assert not slot.offered, "offers them already"
                slot.offered = self._offer(slot.version)
                return Published(Manifest(slot.version, "shared_memory", slot.offered, 0, 0, ()))
            case EndOffer():
                self.offers.pop(slot.offered, None)
                slot.offered = ""
            case Receive(manifest=manifest):
                if self.offers.get(manifest.location) != manifest.version:
                    return Failed(f"the weights at {manifest.location} are gone")
                if slot.version is None and not manifest.is_whole:
                    return Failed("has no weights yet", code=NotTaken.code)
                assert slot.version is None or manifest.version >= slot.version, "goes back to an older version"
                slot.version = manifest.version
        return Done()

    def _migrate_out(self, slot: Slot, ids: tuple[str, ...], with_cache: tuple[str, ...]) -> MigratedOut:
        assert set(with_cache) <= set(ids)
        given = [slot.live.pop(name) for name in ids if name in slot.live]
        handles: dict[str, KVHandle] = {}
        for request in given:
            if request.id in with_cache:
                num_tokens = len(request.prompt) + len(request.generated)
                slot.caches[request.id] = num_tokens
                handles[request.id] = KVHandle(str(slot.number), num_tokens, 0, slot.version or 0, 0)
        return MigratedOut(tuple(given), handles)

    def _publish(self, slot: Slot, command: Publish | Withdraw) -> Reply:
        """As a trainer of one slot."""
        if isinstance(command, Publish):
            is_whole = command.with_frozen or not self.adapted
            assert (command.version, is_whole) not in self.published, "is published already"
            location = self._offer(command.version)
            manifest = Manifest(command.version, "shared_memory", location, 0, 0, (), is_whole=is_whole)
            self.published[command.version, is_whole] = manifest
            return Published(manifest)
        for key in [key for key in self.published if key[0] <= command.version]:
            del self.offers[self.published.pop(key).location]
        return Done()

    def _offer(self, version: int) -> str:
        self._count += 1
        self.offers[f"segment {self._count}"] = version
        return f"segment {self._count}"
