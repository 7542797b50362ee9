"""Slots that hold the train role, in real processes, and a test that tells them what to do.

    with Fleet(settings, slots=range(4)) as fleet:
        fleet.assign((0, 1))
        fleet.train([0.5, ...])
        fleet.resize(ParallelLayout.of((3, 0, 2)))

It is the dumb twin of `ductile.elastic.transaction`: every step goes to everybody, and everybody must do it.
"""

import pickle
import queue
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout, ResizeOrder
from ductile.fabric import rendezvous
from ductile.messages.resizes import (
    Commit,
    Finalize,
    Freeze,
    Frozen,
    Prepare,
    Rollback,
    StateTransferred,
    TransferState,
)
from ductile.messages.workers import ForwardBackward, OptimStep, PreparationEnded
from ductile.records import Sample, StepReport, TrainProgress
from ductile.roles import RoleAssignment
from ductile.trainer.prepare import ResizeFailed
from ductile.trainer.train_role import TrainRole
from tests.ranks import start, stop

DEADLINE_S = 120.0


class SlotFailed(Exception):
    """A slot answered with an error; the text is the last line of its traceback."""


class SlotGone(Exception):
    pass


class Fleet:
    def __init__(
        self, settings: dict[str, Any], slots: Iterable[int], device: str = "cpu", deadline_s: float = DEADLINE_S
    ) -> None:
        """deadline_s: most that a slot may take to answer."""
        self.settings = settings
        self._deadline_s = deadline_s
        self.layout = ParallelLayout.of((0,))
        self.epoch = 0
        self.with_gradient = False
        self.idle: set[int] = set()
        """Slots that hold the role and have no part of the state."""
        self._store = rendezvous.host_store()
        self._pipes: dict[int, Connection] = {}
        self.processes = {}
        for slot in slots:
            ours, theirs = Pipe()
            self.processes[slot], _ = start(_serve, theirs, slot, device, f"127.0.0.1:{self._store.port}")
            theirs.close()
            self._pipes[slot] = ours

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        if kind is not None:
            for process in self.processes.values():
                process.kill()
        stop(*self.processes.values())

    def post(self, slot: int, *what: Any) -> None:
        with suppress(BrokenPipeError):  # who is gone shows when it should answer
            self._pipes[slot].send_bytes(pickle.dumps(what))

    def has_answered(self, slot: int) -> bool:
        """Return whether there is something to read, its end among them."""
        return self._pipes[slot].poll()

    def answer(self, slot: int, timeout_s: float | None = None) -> Any:
        """Raises SlotFailed, SlotGone, TimeoutError."""
        timeout_s = self._deadline_s if timeout_s is None else timeout_s
        if not wait([self._pipes[slot]], timeout_s):
            raise TimeoutError(f"slot {slot} did not answer within {timeout_s} s")
        try:
            ok, result = pickle.loads(self._pipes[slot].recv_bytes())  # noqa: S301 (our own child)
        except (EOFError, ConnectionResetError):
            self.processes[slot].join(5.0)
            raise SlotGone(f"slot {slot} ended with {self.processes[slot].exitcode}") from None
        if not ok:
            failed = SlotFailed(f"slot {slot}: {result.strip().splitlines()[-1]}")
            failed.add_note(result)
            raise failed
        return result

    def ask(self, commands: Mapping[int, Any]) -> dict[int, Any]:
        """One command each, all at once."""
        for slot, command in commands.items():
            self.post(slot, "handle", command)
        return {slot: self.answer(slot) for slot in commands}

    def call(self, slots: Iterable[int], function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
        """`function(role, *arguments)` on each slot."""
        slots = list(slots)
        for slot in slots:
            self.post(slot, "call", function, arguments)
        return {slot: self.answer(slot) for slot in slots}

    def assign(self, slots: Sequence[int], dp_replicate: int = 1) -> None:
        self.assign_in(ParallelLayout.of(slots, dp_replicate=dp_replicate))

    def assign_in(self, layout: ParallelLayout) -> None:
        """Slots that had the role must have released it. Groups of an epoch are made once: this begins another."""
        self.layout = layout
        self.epoch += 1
        self.with_gradient = False
        self._assign(layout.slots, joining=False)

    def _assign(self, slots: Sequence[int], joining: bool) -> None:
        for slot in slots:
            self.post(slot, "assign", self.settings, self.layout, self.epoch, joining)
        for slot in slots:
            self.answer(slot)

    def release(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        for slot in slots:
            self.post(slot, "release")
        for slot in slots:
            self.answer(slot)

    def forward_backward(self, samples: Sequence[Sample], seq_len: int = 64) -> None:
        packed = pack(samples, self.layout.num_data_parallel, seq_len)
        self.ask({slot: ForwardBackward(tuple(batch)) for slot, batch in self.layout.deal(packed).items()})
        self.with_gradient = True

    def optim_step(self, loss_denominator: float) -> StepReport:
        reports = [
            reply.report for reply in self.ask(dict.fromkeys(self.layout.slots, OptimStep(loss_denominator))).values()
        ]
        assert all(report == reports[0] for report in reports)
        self.with_gradient = False
        return reports[0]

    def assign_joining(self, slots: Sequence[int]) -> None:
        self._assign(slots, joining=True)

    def prepare_change(self, after: ParallelLayout) -> ResizeOrder:
        self.epoch += 1
        return ResizeOrder(self.epoch, self.layout, after)

    def command(self, step: str, change: ResizeOrder, progress: TrainProgress | None = None) -> Any:
        match step:
            case "prepare":
                return Prepare(change)
            case "freeze":
                return Freeze(change.epoch, self.with_gradient)
            case "transfer":
                assert progress is not None
                return TransferState(change.epoch, progress)
            case "commit":
                return Commit(change.epoch)
            case "rollback":
                return Rollback(change.epoch)
        return Finalize(change.epoch)

    def step(self, step: str, change: ResizeOrder, progress: TrainProgress | None = None) -> dict[int, Any]:
        return self.ask(dict.fromkeys(change.slots, self.command(step, change, progress)))

    def until_prepared(self, change: ResizeOrder) -> None:
        """Raises SlotFailed when a slot cannot prepare."""
        for slot in change.slots:
            self.post(slot, "prepared", change.epoch)
        for slot in change.slots:
            self.answer(slot)

    def total(self, change: ResizeOrder, frozen: Mapping[int, Frozen]) -> TrainProgress:
        """All made the same plan; their sums are added up."""
        assert len({reply.plan_key for reply in frozen.values()}) == 1
        assert all(frozen[slot].progress is None for slot in change.joiners)
        each = [frozen[slot].progress for slot in change.before.slots]
        sums: dict[str, float] = {}
        for progress in each:
            for name, value in progress.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        return TrainProgress(each[0].step, each[0].num_updates, each[0].with_gradient, sums)

    def roll_back(self, change: ResizeOrder, slots: Iterable[int] | None = None) -> None:
        self.ask(dict.fromkeys(change.slots if slots is None else slots, Rollback(change.epoch)))

    def resize(
        self, after: ParallelLayout, release: bool = True, when_frozen: Callable[[], None] = lambda: None
    ) -> dict[int, StateTransferred]:
        """A whole change. Slots that leave release the role, or else keep it for when they join again."""
        change = self.prepare_change(after)
        self.assign_joining([slot for slot in change.joiners if slot not in self.idle])
        self.step("prepare", change)
        self.until_prepared(change)
        progress = self.total(change, self.step("freeze", change))
        when_frozen()
        moved: dict[int, StateTransferred] = self.step("transfer", change, progress)
        for slot, reply in moved.items():
            assert reply.sent == {peer: other.received[slot] for peer, other in moved.items() if slot in other.received}
        self.step("commit", change)
        self.step("finalize", change)
        self.layout = after
        self.idle -= set(change.joiners)
        if release:
            self.release(change.leavers)
        else:
            self.idle |= set(change.leavers)
        return moved


def _prepared(
    told: "queue.Queue[PreparationEnded]", ended: dict[int, PreparationEnded], epoch: int
) -> PreparationEnded:
    """What the slot has said of the change, or says in time: it is frozen only then."""
    while epoch not in ended:
        event = told.get(timeout=DEADLINE_S)
        ended[event.epoch] = event
    return ended[epoch]


def _serve(pipe: Connection, slot: int, device: str, address: str) -> None:
    role: TrainRole | None = None
    told: queue.Queue[PreparationEnded] = queue.Queue()
    ended: dict[int, PreparationEnded] = {}
    begun: set[int] = set()
    while True:
        try:
            verb, *what = pickle.loads(pipe.recv_bytes())  # noqa: S301 (our own parent)
        except (EOFError, ConnectionResetError):
            break
        try:
            answer = None
            if verb == "assign":
                settings, layout, epoch, joining = what
                role = TrainRole(settings, RoleAssignment(slot, layout, epoch, device, address, joining, tell=told.put))
            elif verb == "release":
                role.close()
                role = None
            elif verb == "prepared":
                if failure := _prepared(told, ended, what[0]).failure:
                    raise ResizeFailed(failure.error)
            elif verb == "call":
                answer = what[0](role, *what[1])
            else:
                if isinstance(what[0], Freeze) and what[0].epoch in begun:
                    _prepared(told, ended, what[0].epoch)
                answer = role.handle(*what)
                if isinstance(what[0], Prepare):
                    begun.add(what[0].order.epoch)
            pipe.send_bytes(pickle.dumps((True, answer)))
        except Exception:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    if role is not None:
        role.close()
