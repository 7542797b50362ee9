"""Preparation of a change of layout: what a slot does for it while it still trains in the old one.

It finds out how bytes will travel, plans which go where, and makes the new layout's groups and a trainer over empty
memory. All of it runs in a thread of its own, with groups and a connection to the store of its own, and leaves the old
trainer alone. What torch remembers of operations on tensors it remembers by thread, so a thread that fails can destroy
what it has made.

NCCL's groups may not be made beside collectives of older ones (`fabric.backend.why_not_beside`). Then they, and what
lies over them, are left to the main thread, which makes them in the pause (`Preparation.connected`).
"""

import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor

from ductile.config.schema.trainer import TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ResizeOrder
from ductile.core.transfer.plan import Plan
from ductile.error_text import error_text
from ductile.fabric import pages, rendezvous
from ductile.fabric.backend import device_id, why_not_beside
from ductile.fabric.barrier import AbortableBarrier
from ductile.fabric.carrier import Carrier
from ductile.fabric.choice import choose_reader
from ductile.fabric.exchange import StoreExchange
from ductile.fabric.groups import Groups, names_of
from ductile.fabric.p2p import PeerToPeer
from ductile.fabric.transfer import Transfer, Verify
from ductile.kernels.device import is_out_of_memory
from ductile.messages.resizes import SlotPhase
from ductile.messages.workers import Failed, PreparationEnded, StateMoved
from ductile.observe import timed
from ductile.parallel.parallel_context import ParallelContext
from ductile.roles import OutOfMemory, Refused, RoleAssignment
from ductile.trainer.parking import ParkedTrainer, ParkingFailed, park
from ductile.trainer.state import StatePlans, device_of, named_state, parts_of
from ductile.trainer.trainer import Trainer

_one_at_a_time = threading.Lock()
"""Held by the thread of this process that prepares a change."""
LOOK_S = 0.02
"""Seconds after which a thread that waits for another looks again whether its change is still wanted."""


class ResizeFailed(RuntimeError):
    """A step of a resize cannot be done. The text is a sentence."""


@dataclass
class TrainerPart:
    """The trainer as one slot has it in one layout: its process groups, and its part of the trainer over them."""

    groups: Groups
    trainer: Trainer | None
    """The slot's part of the trainer; None before it is built, and once it has failed."""
    state: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The trainer's parameters and moments, flat, by name. They stay where they are as long as it lives, and are looked
    up once: in the middle of a micro-step the model has FSDP2's gathered parameters instead. While the trainer is
    parked there is nothing in them."""
    parked: ParkedTrainer | None = None
    """The trainer in host memory; None while it is on its device."""

    def attach(self, trainer: Trainer) -> None:
        self.trainer, self.state, self.parked = trainer, parts_of(named_state(trainer)), None

    def drop(self) -> None:
        """Free the slot's part of the trainer; the groups stay."""
        self.trainer, self.state, self.parked = None, {}, None

    def park(self) -> StateMoved:
        """Move the trainer to host memory, unless it is there. Raises ParkingFailed, and it is where it was."""
        if self.trainer is None:
            raise ParkingFailed("this slot lost its part of the trainer's state in an earlier failure")
        if self.parked is None:
            self.parked = park(self.trainer)
        return StateMoved(self.parked.num_bytes, self.parked.device_bytes, self.parked.seconds)

    def unpark(self) -> StateMoved:
        """Bring the trainer back to its device, if it is parked. Raises ParkingFailed where something has come to its
        device meanwhile, and what torch raises where the device has no room; it may be called again."""
        if self.parked is None:
            return StateMoved(0, 0, 0.0)
        if self.parked.is_whole and (left := self.parked.device_bytes):
            raise ParkingFailed(f"{left} bytes of the parked trainer have come to its device")
        moved = StateMoved(self.parked.num_bytes, 0, self.parked.restore())
        self.parked = None
        return moved

    def destroy(self) -> None:
        self.drop()  # before its groups: what refers to them would keep their sockets open
        self.groups.destroy()

    def abort_idle(self) -> None:
        """`destroy` where other slots may be dead, or stuck, and no collective is under way."""
        self.drop()
        self.groups.abort_idle()


@dataclass
class Planned:
    """Plans of a change, as a slot has them before it makes groups."""

    plans: dict[bool, Plan]
    """Plans without the accumulated gradient (False) and with it (True)."""
    reader: Carrier | None
    """Carrier that reads; None where bytes go as messages, through a group that is yet to be made."""
    reason: str
    """Why this carrier was chosen."""
    groups: Groups
    """Groups of the layout that comes after."""
    transfer_groups: Groups
    barrier: AbortableBarrier
    """Barrier of the change's slots; this slot leaves it at the end."""
    seconds: dict[SlotPhase, float]
    beside: tuple[SlotPhase, ...] = ()
    """Phases that ran beside training."""


@dataclass
class Connected:
    """The groups of a change, and what lies over them."""

    carrier: Carrier
    context: ParallelContext | None
    after: TrainerPart | None
    """The slot's part after the change; None on a slot that leaves, as is its context. In streaming mode the trainer
    comes last."""
    room: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Memory of the new trainer and of its gradient by buffer, without buffers that are handed on as they are. Empty in
    streaming mode."""
    old: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """This slot's parameters and moments: the old trainer goes on changing what they hold, but not where they lie.
    Empty in streaming mode."""
    transfers: dict[bool, Transfer] = field(default_factory=dict[bool, Transfer])
    """Transfers into the room, without gradient (False) and with it (True). They only lack the old buffers. Empty in
    streaming mode."""

    def clear(self) -> None:
        """Let go of all but what comes after."""
        for what in (self.room, self.old, self.transfers):
            what.clear()


class Preparation:
    """`Planned` and `Connected` in the making."""

    def __init__(
        self,
        order: ResizeOrder,
        assignment: RoleAssignment,
        config: TrainerConfig,
        plans: StatePlans,
        before: TrainerPart | None,
    ) -> None:
        self._order, self._assignment, self._config, self._plans = order, assignment, config, plans
        self._old: Mapping[str, Tensor] = before.state if before is not None else {}
        """Parameters and moments, which stay where they are while the old trainer works on."""
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._unwanted = False
        self._planned: Planned | None = None
        self._connected: Connected | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"prepare {self._order.epoch}", daemon=True).start()

    def result(self) -> Planned:
        """Return what was planned. Raises `ResizeFailed` when there is no result, or not yet."""
        if not self._done.is_set():
            raise ResizeFailed("this slot has not prepared yet")
        if self._error is not None:
            raise ResizeFailed(f"this slot {_why(self._error)}") from self._error
        if self._planned is None:
            raise ResizeFailed("this change has been taken back")
        return self._planned

    def connected(self) -> Connected:
        """The groups and what lies over them, made now if the thread has left that to the pause: then collective over
        the change."""
        planned = self.result()
        if self._connected is None:
            try:
                self._connected = self._connect(planned)
            except Exception as error:
                # What lies over the groups is held by the functions that failed alone, and goes with their locals.
                planned.groups.abandon(error)
                planned.transfer_groups.abandon(error)
                raise
        return self._connected

    def finish(self) -> TrainerPart | None:
        """Destroy all but what comes after, and return that."""
        planned, connected = self.result(), self.connected()
        connected.clear()
        planned.transfer_groups.abort_idle()  # all have what they wanted, and one that leaves may have died since
        planned.barrier.leave()
        return connected.after

    def abandon(self, error: BaseException) -> None:
        """`discard` after a failure over the groups. With gloo the other slots fail too then, instead of waiting.

        The locals of the functions that failed are cleared here: they hold groups, and would keep their sockets open.
        """
        traceback.clear_frames(error.__traceback__)
        self.discard()

    def discard(self) -> None:
        """Abort what there is, now or as soon as the thread is done with it."""
        with self._lock:
            self._unwanted = True
            self._old = {}
            planned, self._planned = self._planned, None
            connected, self._connected = self._connected, None
        _abort(planned, connected)

    def _run(self) -> None:
        planned: Planned | None = None
        connected: Connected | None = None
        try:
            with self._turn():
                planned, connected = self._prepare()
        except Exception as error:
            self._error = error
            self._old = {}
            if not self._unwanted:
                with suppress(OSError):  # the log may be on the disk that is full
                    traceback.print_exception(error)
            traceback.clear_frames(error.__traceback__)  # they hold groups, and would keep their sockets open
        with self._lock:
            if not self._unwanted:
                self._planned, self._connected = planned, connected
                planned = connected = None
            self._done.set()
        try:
            _abort(planned, connected)
        finally:  # somebody waits for it
            self._assignment.tell(PreparationEnded(self._order.epoch, _failed(self._error) if self._error else None))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other thread prepares: the thread of a change that was taken back may still be busy with it."""
        deadline = monotonic() + self._config.resize.timeout_s
        while not _one_at_a_time.acquire(timeout=LOOK_S):
            self._check_wanted()
            if monotonic() >= deadline:
                raise ResizeFailed("this slot is still busy with an earlier change that was taken back")
        try:
            yield
        finally:
            _one_at_a_time.release()

    def _check_wanted(self, awaited: Sequence[int] = ()) -> None:
        """Raises `ResizeFailed` once the result is not wanted any more, whichever slots are still awaited."""
        if self._unwanted:
            raise ResizeFailed("this change has been taken back")

    def _prepare(self) -> tuple[Planned, Connected | None]:
        """Plan, and connect unless groups are left to the pause: then the second is None."""
        order, slot, timeout_s = self._order, self._assignment.slot, self._config.resize.timeout_s
        store = rendezvous.lasting(self._assignment.rendezvous, timeout_s)
        notes = f"resize/{order.epoch}/"
        barrier = AbortableBarrier(store, notes, slot, order.slots, timeout_s, others=[names_of(order.epoch)])
        exchange = StoreExchange(store, f"{notes}exchange", slot, order.slots, timeout_s)
        groups = Groups(slot, self._assignment.epoch, self._assignment.device, store, timeout_s)
        transfer_groups = Groups(slot, self._assignment.epoch, self._assignment.device, store, timeout_s, "transfer/")
        seconds: dict[SlotPhase, float] = {}
        barrier.enter()
        try:
            with timed(seconds, "carrier"):
                reader, reason = self._choose(exchange)
                waits = why_not_beside(torch.device(self._assignment.device).type, self._device_ids(exchange))
            self._check_wanted()
            with timed(seconds, "plan"):
                relays = reader is None
                plans = {
                    gradient: self._plans.plan(order.before, order.after, gradient, relays)
                    for gradient in (False, True)
                }
                tuple(plan.key for plan in plans.values())  # computed now, and not in the pause
            self._check_wanted()
            planned = Planned(plans, reader, reason, groups, transfer_groups, barrier, seconds)
            connected = None
            if waits:
                planned.reason += f"; groups were made in the pause, as {waits}"
            else:
                connected = self._connect(planned)
            planned.beside = tuple(seconds)
            return planned, connected
        except Exception as error:
            groups.abandon(error)
            transfer_groups.abandon(error)
            barrier.leave()
            raise

    def _connect(self, planned: Planned) -> Connected:
        order, timeout_s, seconds = self._order, self._config.resize.timeout_s, planned.seconds
        carrier, context, after = planned.reader, None, None
        with timed(seconds, "groups"):
            planned.barrier.all_or_none(self._check_wanted)
            # From here on no slot leaves before all have made their groups, wanted or not.
            if carrier is None:
                group = planned.transfer_groups.group(order.slots)
                carrier = PeerToPeer(group, self._assignment.device, timeout_s)
            if self._assignment.slot in order.after.slots:
                context = ParallelContext(planned.groups, order.after)
                after = TrainerPart(planned.groups, None)
        connected = Connected(carrier, context, after)
        self._check_wanted()
        if self._config.resize.memory == "shadow":
            if after is not None and context is not None:
                with timed(seconds, "build"):
                    after.attach(self._build(context, planned.plans[True], connected.room))
            self._check_wanted()
            with timed(seconds, "load"):
                self._load(planned, connected)
        self._old = {}
        return connected

    def _choose(self, exchange: StoreExchange) -> tuple[Carrier | None, str]:
        """The carrier that reads, None where messages are needed, and why."""
        options, device = self._config.resize, torch.device(self._assignment.device).type
        # A slot that frees memory while it moves must know that it has been read.
        one_sided = options.carrier != "p2p" and options.memory == "shadow"
        if device != "cpu" and device_of(self._config.model, "exp_avg/", device) == "cpu":
            one_sided = False  # one carrier reads memory of GPUs, another that of processes: neither reads both
        carrier, reason = choose_reader(exchange, device, one_sided, self._check_wanted)
        if options.carrier == "peer_memory" and (carrier is None or carrier.name != options.carrier):
            raise ResizeFailed(f'trainer.resize.carrier is "peer_memory", which does not work here: {reason}')
        return carrier, reason

    def _device_ids(self, exchange: StoreExchange) -> set[str]:
        """The `device_id`s of the change's slots; empty on CPUs, where they do not matter."""
        device = torch.device(self._assignment.device)
        if device.type == "cpu":
            return set()
        notes = exchange.all_gather("devices", device_id(device).encode(), self._check_wanted)
        return {note.decode() for note in notes.values()}

    def _build(self, context: ParallelContext, plan: Plan, room: dict[str, Tensor]) -> Trainer:
        """A trainer over memory that is handed on where nothing changes, and over new memory elsewhere."""
        slot, device = self._assignment.slot, self._assignment.device
        unchanged = plan.unchanged_buffers(slot)
        for name, (dtype, size) in plan.target.buffer_sizes(slot).items():
            if name not in unchanged:
                where = device_of(self._config.model, name, device)
                # What a GPU reads and writes in host memory is pinned, so that copies run beside its work.
                room[name] = pages.zeros(size, getattr(torch, dtype), where, pin_memory=where == "cpu" != device)
        trainer = Trainer(self._config, context, device, {**self._old, **room})
        for name, part in parts_of(named_state(trainer)).items():
            if name in unchanged and part.data_ptr() == self._old[name].data_ptr():
                room.pop(name, None)
            else:
                room[name] = part
        return trainer

    def _load(self, planned: Planned, connected: Connected) -> None:
        connected.old = dict(self._old)
        for with_gradient, plan in planned.plans.items():
            sizes = plan.target.buffer_sizes(self._assignment.slot)
            room = {name: part for name, part in connected.room.items() if name in sizes}
            connected.transfers[with_gradient] = Transfer(
                plan, self._assignment.slot, None, room, connected.carrier, fingerprints(self._config)
            )


def _failed(error: Exception) -> Failed:
    """Its traceback is in the slot's log."""
    return Failed(_why(error), code=(OutOfMemory if is_out_of_memory(error) else Refused).code)


def _why(error: Exception) -> str:
    return f"could not prepare: {error_text(error)}"


def _abort(planned: Planned | None, connected: Connected | None) -> None:
    with ExitStack() as last_first:  # each of them is called, whatever another raises
        if planned is not None:
            last_first.callback(planned.barrier.leave)
            last_first.callback(planned.transfer_groups.abort)
            last_first.callback(planned.groups.abort)
        if connected is not None:
            last_first.callback(connected.clear)
            if connected.after is not None:
                last_first.callback(connected.after.drop)


def fingerprints(config: TrainerConfig) -> Verify:
    """Which fingerprints a transfer takes. What else `verify` asks for, each slot compares by itself."""
    return "off" if config.resize.verify == "off" else "moved"
