"""Move a state from one parallel layout to another, for trainers that are not ours.

    report = ductile.reshard([old_model, old_optimizer], [new_model, new_optimizer])

Every rank of one process group calls it with its own part of both states, or with None where it has none. What a rank
holds is read off its tensors (`inventory`); all descriptions together are two layouts; every rank makes the same plan,
carries out its part, and compares fingerprints with its peers. The bytes arrive in the target's own memory.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Literal, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ductile.core.layout.geometry.holdings import Shape
from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.topology import Topology
from ductile.core.transfer.cells import NotReshardable
from ductile.core.transfer.plan import Plan
from ductile.core.transfer.planning import Planner
from ductile.error_text import error_text
from ductile.fabric.carrier import Carrier, TransferFailed
from ductile.fabric.choice import choose
from ductile.fabric.exchange import GroupExchange
from ductile.fabric.transfer import Moved
from ductile.resharding.described import Disagreement, Held, assemble, trim
from ductile.resharding.inventory import Inventory, State
from ductile.resharding.move import Move
from ductile.resharding.reshard_report import Clock, Report

_Kind = TypeVar("_Kind")

REMEMBERED = 32
"""Most layouts that are remembered; the oldest goes first."""


def reshard(
    source_state: State,
    target_state: State,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 60.0,
    carrier: Literal["auto", "p2p"] = "auto",
) -> Report:
    """Fill `target_state` with the values of `source_state`, whatever the two layouts are. Collective.

    See `Resharder` for the arguments, and `Resharder.reshard` for what is raised.
    """
    return Resharder(group, timeout_s, carrier).reshard(source_state, target_state)


class _Note(msgspec.Struct, frozen=True):
    """What a rank tells the others of its part of one side, source or target."""

    problem: str
    digest: bytes
    host: str
    on_gpu: bool
    """Whether some of the rank's part is on a GPU."""
    has_gpu: bool


class _Verdict(msgspec.Struct, frozen=True):
    """What a rank tells the others after the transfer."""

    problem: str
    sent: dict[int, int]
    received: dict[int, int]


@dataclass(frozen=True)
class _Side:
    """One side of a call, source or target: what all ranks hold."""

    held: list[Held]
    """Descriptions of the tensors that all ranks hold."""
    layout: Layout

    @cached_property
    def padded(self) -> set[str]:
        return {name for held in self.held if held.padded for name in held.names if name in self.layout.tensors}


@dataclass(frozen=True)
class _Prepared:
    """A call, ready to be made again."""

    source: Inventory
    target: Inventory
    move: Move
    plan: Plan
    reason: str
    """Why this carrier was chosen."""


class Resharder:
    """Reshards again and again between the same ranks; layouts, plans and the carrier are remembered.

    It holds on to the tensors of its last call: when it gets the same ones again, nothing has to be prepared.

    `group` has all ranks of both states, by default all of the job. `timeout_s` bounds every wait. `carrier` is chosen
    by what works between the ranks; "p2p" insists on messages through the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 60.0,
        carrier: Literal["auto", "p2p"] = "auto",
    ) -> None:
        self._group = group if group is not None else dist.distributed_c10d._get_default_group()
        members = dist.get_process_group_ranks(self._group)
        if dist.get_rank() not in members:
            raise ValueError(f"rank {dist.get_rank()} is not in the group, whose ranks are {members}")
        self._group_exchange = GroupExchange(
            self._group, dist.get_rank(), members, _meeting_device(self._group), timeout_s
        )
        self._one_sided = carrier == "auto"
        self._carriers: dict[bool, tuple[Carrier, str, torch.device]] = {}
        self._planners: dict[bool, Planner] = {}
        self._sides: dict[tuple[bytes, ...], _Side] = {}
        self._inventories: dict[str, Inventory] = {}
        """Inventories of the last call, by side."""
        self._last: _Prepared | None = None
        self._topology = Topology()
        self._num_exchanges = 0

    def reshard(self, source_state: State, target_state: State) -> Report:
        """Fill the tensors of `target_state` in place. Neither state may be written to meanwhile.

        Raises, on every rank, `NotReshardable` when the states do not fit each other (nothing is touched then), and
        `TransferFailed` when a rank dies or does not answer in time: the source is whole, the target is not.
        """
        clock = Clock()
        try:
            return self._reshard(source_state, target_state, clock)
        except TransferFailed as error:
            raise TransferFailed(
                f"{error}. It was in phase {clock.now!r}. The source is untouched; the target may be half written, and "
                "the group is of no more use.",
                error.peer,
            ) from None

    def _reshard(self, source_state: State, target_state: State, clock: Clock) -> Report:
        with clock.phase("describe"):
            is_same = self._is_same(source_state, target_state)
        if not is_same:
            self._prepare(source_state, target_state, clock)
        call = self._last
        assert call is not None, "its failure would have been told"
        with clock.phase("transfer"):
            moved = self._run(call.move)
        return Report(call.plan, call.reason, moved.num_bytes, clock.seconds, tuple(call.target.left_out))

    def _is_same(self, source_state: State, target_state: State) -> bool:
        """Return whether all ranks have the tensors of the last call, so that nothing has to be told or prepared."""
        if not self._num_exchanges:
            return False  # on all ranks
        is_same = False
        with suppress(Exception):  # told by the long way
            is_same = self._last is not None and self._has_same(self._last, source_state, target_state)
        return all(self._exchange("same", msgspec.msgpack.encode(is_same), bool).values())

    def _has_same(self, last: _Prepared, source_state: State, target_state: State) -> bool:
        source = Inventory(source_state, None, self._inventories.get("source"))
        # Without the source: an optimizer that has no state yet gets none here.
        target = Inventory(target_state, (), self._inventories.get("target"))
        return source.is_like(last.source) and target.is_like(last.target)

    def _prepare(self, source_state: State, target_state: State, clock: Clock) -> None:
        with clock.phase("describe"):
            source, before, gpu_before = self._describe("source", source_state, None)
            target, after, gpu_after = self._describe("target", target_state, before.held)
        with clock.phase("carrier"):
            carrier, reason, device = self._carrier(gpu_before or gpu_after)
        with clock.phase("plan"):
            plan = self._plan(before, after, carrier.one_sided)
        with clock.phase("agree"):
            move = self._agree(plan, source, target, carrier, device)
        self._last = _Prepared(source, target, move, plan, reason)

    def _describe(self, side: str, state: State, source: Sequence[Held] | None) -> tuple[Inventory, _Side, bool]:
        """This rank's inventory, what all ranks hold, and whether the bytes should travel between GPUs."""
        inventory, held, on_gpu, failure = None, b"", False, None
        try:
            inventory = self._inventories[side] = Inventory(state, source, self._inventories.get(side))
            held = msgspec.msgpack.encode(inventory.held())
            on_gpu = any(memory.is_cuda for memory in inventory.buffers.values())
        except Exception as error:  # whatever it is, the others are waiting for this rank
            failure = error
        digest = blake2b(held, digest_size=16).digest()
        note = _Note(_text_of(failure), digest, socket.gethostname(), on_gpu, torch.cuda.is_available())
        notes = self._exchange(side, msgspec.msgpack.encode(note), _Note)
        _raise_on_all({rank: note.problem for rank, note in notes.items()}, failure)
        assert inventory is not None, "its failure would have been told"
        self._topology = _topology({rank: note.host for rank, note in notes.items()})
        key = (side.encode(), *(note.digest for note in notes.values()))
        if key not in self._sides:
            described = self._exchange(f"{side} in full", held, list[Held])
            try:
                layout = assemble(described, side)
            except Disagreement as error:
                raise NotReshardable(str(error)) from None
            self._sides[key] = _Side([part for parts in described.values() for part in parts], layout)
            if len(self._sides) > REMEMBERED:
                del self._sides[next(iter(self._sides))]
        on_gpu = any(note.on_gpu for note in notes.values()) and all(note.has_gpu for note in notes.values())
        return inventory, self._sides[key], on_gpu

    def _carrier(self, on_gpu: bool) -> tuple[Carrier, str, torch.device]:
        """(carrier, why it was chosen, device whose memory it carries); other memory makes a detour over a copy."""
        if on_gpu not in self._carriers:
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
            carrier, reason = self._choose(device)
            if on_gpu and carrier.name == "p2p" and not _carries(self._group, "cuda"):
                device = torch.device("cpu")
                carrier, reason = self._choose(device)
            self._carriers[on_gpu] = carrier, reason, device
        return self._carriers[on_gpu]

    def _choose(self, device: torch.device) -> tuple[Carrier, str]:
        return choose(self._group_exchange, str(device), lambda: self._group, self._one_sided)

    def _plan(self, before: _Side, after: _Side, one_sided: bool) -> Plan:
        source, target = _data(before, after)
        if one_sided not in self._planners:
            self._planners[one_sided] = Planner(self._topology, relays=not one_sided)
        return self._planners[one_sided].plan(source, target)

    def _agree(self, plan: Plan, source: Inventory, target: Inventory, carrier: Carrier, device: torch.device) -> Move:
        """Make the move, and find out that all ranks have the same plan; else all raise."""
        move, failure = self._last.move if self._last is not None else None, None
        try:
            if move is None or move.key != Move.key_of(plan, source, target):
                move = self._last = None  # frees what only they refer to
                move = Move(plan, source, target, carrier, self._group_exchange.slot, device)
        except Exception as error:
            failure = error
        notes = self._exchange("plan", msgspec.msgpack.encode((_text_of(failure), plan.key)), tuple[str, bytes])
        _raise_on_all({rank: problem for rank, (problem, _) in notes.items()}, failure)
        others = [rank for rank, (_, key) in notes.items() if key != plan.key]
        if others:
            raise NotReshardable(f"ranks {others} made another plan than this one; do all run the same ductile?")
        assert move is not None, "its failure would have been told"
        return move

    def _run(self, move: Move) -> Moved:
        """Move, and find out that every rank has what was sent to it; else all raise."""
        moved, failure = None, None
        start = time.monotonic()
        try:
            moved = move.run()
        except Exception as error:  # whatever it is, the others are waiting for this rank
            if time.monotonic() - start >= self._group_exchange.timeout_s:
                raise  # no rank still waits for a verdict
            failure = error
        return self._conclude(moved, failure)

    def _conclude(self, moved: Moved | None, failure: Exception | None) -> Moved:
        verdict = _Verdict(_text_of(failure), moved.sent if moved else {}, moved.received if moved else {})
        try:
            verdicts = self._exchange("verdict", msgspec.msgpack.encode(verdict), _Verdict)
        except TransferFailed as error:
            raise failure or error from None
        problems = [f"rank {rank}: {verdict.problem}" for rank, verdict in verdicts.items() if verdict.problem]
        problems = problems or [
            f"what rank {receiver} received from rank {sender} is not what was sent"
            for sender, ours in verdicts.items()
            for receiver, digest in ours.sent.items()
            if verdicts[receiver].received.get(sender) != digest
        ]
        if problems or moved is None:
            raise TransferFailed("; ".join(problems)) from failure
        return moved

    def _exchange(self, topic: str, note: bytes, kind: type[_Kind]) -> dict[int, _Kind]:
        self._num_exchanges += 1
        notes = self._group_exchange.all_gather(f"{self._num_exchanges}/{topic}", note)
        return {rank: msgspec.msgpack.decode(note, type=kind) for rank, note in notes.items()}


def _data(before: _Side, after: _Side) -> tuple[Layout, Layout]:
    """Both layouts without the padding that only one of them has."""
    shapes: dict[str, Shape] = {}
    for name in before.padded & after.padded:
        here, there = before.layout[name].shape, after.layout[name].shape
        if here != there and len(here) == len(there):
            shapes[name] = tuple(map(min, here, there))
    return (trim(before.layout, shapes), trim(after.layout, shapes)) if shapes else (before.layout, after.layout)


def _raise_on_all(problems: Mapping[int, str], failure: Exception | None) -> None:
    """Every rank raises when one has a problem: the same text everywhere."""
    found: dict[str, list[int]] = {}
    for rank, problem in problems.items():
        if problem:
            found.setdefault(problem, []).append(rank)
    if found:
        sentences = (
            f"{text} (on {'rank' if len(on) == 1 else 'ranks'} {', '.join(map(str, on))})" for text, on in found.items()
        )
        raise NotReshardable("; ".join(sentences)) from failure


def _text_of(failure: Exception | None) -> str:
    if failure is None or isinstance(failure, NotReshardable | TransferFailed):
        return str(failure or "")
    return error_text(failure)


def _topology(hosts: Mapping[int, str]) -> Topology:
    nodes: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        nodes.setdefault(host, []).append(rank)
    return Topology(tuple(map(tuple, nodes.values()))) if len(nodes) > 1 else Topology()


def _carries(group: dist.ProcessGroup, kind: str) -> bool:
    return any(device.type == kind for device in group._device_types)


def _meeting_device(group: dist.ProcessGroup) -> str:
    """The device on which the group can gather notes."""
    return "cpu" if _carries(group, "cpu") else f"cuda:{torch.cuda.current_device()}"
