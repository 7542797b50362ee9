"""A slot's process. The main thread executes commands in order and gives the roles that have work their turns. What a
change of roles or of the layout needs before it comes into effect is done beside that (`Message.is_beside`), each
command in a thread of its own.

Roles come by name: `"train"` is whatever class `SlotSettings.roles` says, made when `AssignRole` comes.
Any number of roles may live in one slot; each command has one that handles it.
"""

import importlib
import os
import queue
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from threading import Lock, Thread
from typing import Any

import msgspec
import torch

from ductile.core.layout.model.peak import Arithmetic
from ductile.error_text import error_text
from ductile.fabric.remote_segments import serve_segments
from ductile.kernels.device import is_out_of_memory, name_of, peak_memory, peak_of
from ductile.messages.message import RoleName
from ductile.messages.outgoing_updates import FinishUpdate, LeaveOut
from ductile.messages.resizes import Prepare
from ductile.messages.workers import (
    AssignRole,
    BeginTrace,
    Command,
    Done,
    EndOffer,
    EndTrace,
    Envelope,
    Failed,
    MigrateOut,
    OfferWeights,
    Ping,
    Receive,
    ReleaseRole,
    Reply,
    Score,
    Stop,
    Survey,
    Surveyed,
    Terminating,
    Traced,
    TrainCommand,
)
from ductile.roles import Failure, Later, OutOfMemory, Refused, RoleAssignment, SlotRole, StaleEpoch, StateKept
from ductile.slot.forkserver import Say
from ductile.slot.link import Link
from ductile.slot.trace import SlotTrace
from ductile.surrogates import ESCAPED, escaped
from ductile.transport.codec import BadFrame
from ductile.transport.curve import RunKey
from ductile.transport.dealer import Dealer


class SlotSettings(msgspec.Struct, frozen=True):
    """Settings that a slot's process is forked with."""

    slot: int
    address: str
    token: str
    """The run's token, in hex."""
    owner: int
    """Process id of the slot's owner on this host, the orchestrator or its agent: the slot ends when that process
    does."""
    device: str
    """"cpu" or "cuda:0"."""
    roles: dict[str, str]
    """Class of each role by the role's name: "package.module:Class"."""
    key: str = ""
    """The run's secret key; "" where nothing is encrypted."""
    host: str = ""
    """Address at which other nodes reach this process; "" where there are none."""


class Worker:
    def __init__(self, settings: SlotSettings, link: Link) -> None:
        self._settings = settings
        self._link = link
        self._roles: dict[RoleName, SlotRole] = {}
        """Replaced as a whole, since the main thread goes through it while other threads make roles."""
        self._in_the_making: dict[RoleName, AssignRole] = {}
        """Roles that a thread makes, and the command that it does so for: a role that was released meanwhile, and
        assigned again, has another one."""
        self._num_releases = Counter[RoleName]()
        """Commands that release a role and have not been executed yet."""
        self._changing_roles = Lock()
        self._trace: SlotTrace | None = None
        self._leaving = False

    def run(self) -> None:
        """Carry out commands until `Stop`. A role whose own `step` fails ends the process, as no command reports it."""
        self._link.start(self._begin_beside)
        while not self._leaving:
            envelope = self._next(wait=not any(role.has_work() for role in self._roles.values()))
            if envelope and self._may_be_beside(envelope.body) and self._start_beside(envelope):
                continue  # the `ReleaseRole` that it waited for is done
            if envelope:
                self._serve(envelope)
            else:
                self._work()
        with suppress(OSError):  # whoever reads it finds none
            if self._trace is not None:
                self._end_trace()
        for role in self._roles.values():
            role.close()

    def _next(self, wait: bool) -> Envelope | None:
        with suppress(queue.Empty):
            # Waiting needs no deadline: the link ends this process when the orchestrator goes.
            return self._link.inbox.get(block=wait)
        return None

    def _begin_beside(self, envelope: Envelope) -> bool:
        """Called by the link with each command: have a thread execute it, if that may be done beside other work. Not
        where it assigns a role whose `ReleaseRole` still waits for the main thread."""
        command = envelope.body
        if isinstance(command, ReleaseRole):
            with self._changing_roles:
                self._num_releases[command.role] += 1
        if not self._may_be_beside(command):
            return False
        waits = isinstance(command, AssignRole) and self._num_releases[command.role] > 0
        return not waits and self._start_beside(envelope)

    def _may_be_beside(self, command: object) -> bool:
        """On a GPU no engine may begin in the middle of a micro-step: it would find less memory free than there is."""
        if isinstance(command, Prepare | FinishUpdate | LeaveOut):
            return True
        return isinstance(command, Command) and command.is_beside and self._settings.device == "cpu"

    def _start_beside(self, envelope: Envelope) -> bool:
        """False, and nothing happens, when the command is of an older epoch, or assigns a role that the slot has: the
        main thread then refuses it."""
        if envelope.epoch < self._link.epoch:
            return False
        if isinstance(envelope.body, AssignRole) and not self._begin_making(envelope.body):
            return False
        name = f"beside: {type(envelope.body).__name__}"
        Thread(target=self._serve, args=(envelope, True), name=name, daemon=True).start()
        return True

    def _serve(self, envelope: Envelope, beside: bool = False) -> None:
        command = envelope.body
        assert isinstance(command, Command)
        name = type(command).__name__
        with nullcontext() if beside else self._link.busy(name):
            reply = _outcome(name, partial(self._execute, envelope.epoch, command, beside))
        if isinstance(command, ReleaseRole):
            with self._changing_roles:
                self._num_releases[command.role] -= 1
        if isinstance(reply, Later):
            Thread(
                target=self._send_later, args=(envelope.seq, name, reply), name=f"waits: {name}", daemon=True
            ).start()
        else:
            self._send(envelope.seq, name, reply)

    def _send_later(self, seq: int, name: str, reply: Later) -> None:
        self._send(seq, name, _outcome(name, reply.wait))

    def _send(self, seq: int, name: str, reply: Reply) -> None:
        try:
            self._link.send(seq, reply)
        except BadFrame as error:
            self._link.send(seq, Failed(f"{name} is done, but its reply cannot be sent: {error}"))

    def _work(self) -> None:
        for name, role in self._roles.items():
            if role.has_work():
                with self._link.busy(f"a step of {name}"):
                    self._step(role)

    def _step(self, role: SlotRole) -> None:
        for event in role.step():
            self._link.send(0, event)

    def _execute(self, epoch: int, command: Command, beside: bool) -> Reply | Later:
        if not beside:  # then `_start_beside` has looked, and what is of the epoch before may still wait
            if epoch < self._link.epoch:
                raise StaleEpoch(f"the command is of epoch {epoch}, this slot is in epoch {self._link.epoch}")
            self._link.enter(epoch)
        match command:
            case Ping():
                return Done()
            case Stop():
                self._leaving = True
                return Done()
            case Survey(measure=measure):
                return survey(self._settings.device, measure)
            case BeginTrace(file=file):
                if self._trace is not None:
                    raise ValueError("this slot is being traced already")
                self._trace = SlotTrace(self._settings.device, file)
                return Done()
            case EndTrace():
                return self._end_trace()
            case AssignRole():
                if not beside and not self._begin_making(command):
                    raise ValueError(f"this slot holds the role {command.role!r} already")
                return self._assign(epoch, command)
            case ReleaseRole():
                self._release(command.role)
                return Done()
            case Receive() | OfferWeights() | EndOffer():
                return self._role(command.role).handle(command)
            case MigrateOut():
                role = self._role("generate")
                if role.has_work():  # what has ended is told first, as the reply lists only what goes on
                    self._step(role)
                return role.handle(command)
            case Score():
                return self._role(command.role).handle(command)
            case _:
                return self._role("train" if isinstance(command, TrainCommand) else "generate").handle(command)

    def _end_trace(self) -> Traced:
        trace, self._trace = self._trace, None
        if trace is None:
            raise ValueError("this slot is not being traced")
        return trace.end()

    def _begin_making(self, command: AssignRole) -> bool:
        """False when the slot holds or makes the role already."""
        with self._changing_roles:
            if command.role in self._roles or command.role in self._in_the_making:
                return False
            self._in_the_making[command.role] = command
            return True

    def _assign(self, epoch: int, command: AssignRole) -> Reply:
        try:
            role = self._make(epoch, command)
        except Exception:
            with self._changing_roles:
                self._is_still_wanted(command)
            raise
        with self._changing_roles:
            if is_wanted := self._is_still_wanted(command):
                self._roles = {**self._roles, command.role: role}
        if not is_wanted:
            role.close()
            raise ValueError(f"the role {command.role!r} was released while it was made")
        return Done()

    def _is_still_wanted(self, command: AssignRole) -> bool:
        """Return whether the role was not released while it was made, which is over now."""
        if self._in_the_making.get(command.role) is not command:
            return False
        del self._in_the_making[command.role]
        return True

    def _release(self, name: RoleName) -> None:
        """A role that is in the making is not waited for: the thread that makes it closes it."""
        with self._changing_roles:
            if self._in_the_making.pop(name, None):
                return
            role = self._role(name)
            # Also if it cannot be closed: else the slot could never hold it again.
            self._roles = {held: other for held, other in self._roles.items() if held != name}
        role.close()

    def _make(self, epoch: int, command: AssignRole) -> SlotRole:
        if command.role not in self._settings.roles:
            raise ValueError(f"this slot does not know the role {command.role!r}")
        module, _, name = self._settings.roles[command.role].partition(":")
        make = importlib.import_module(module).__dict__[name]
        assignment = RoleAssignment(
            self._settings.slot,
            command.layout,
            epoch,
            self._settings.device,
            command.rendezvous,
            command.joining,
            command.instance,
            partial(self._link.send, 0),
        )
        return make(command.settings, assignment)

    def _role(self, name: RoleName) -> SlotRole:
        if name not in self._roles:
            held = ", ".join(self._roles) or "none"
            raise ValueError(f"this slot does not hold the role {name!r} (it holds: {held})")
        return self._roles[name]


def _outcome(name: str, work: Callable[[], Any]) -> Any:
    """Return what a command's work returns, or the failure that it ends with."""
    try:
        return work()
    except Exception as error:
        with suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
        return Failed(f"{name} failed: {_sentence(error)}", escaped(traceback.format_exc()), _code(error))


def survey(device: str, measure: Arithmetic | None) -> Surveyed:
    memory, peak = peak_memory(device), peak_of(device, measure, measure=True) if measure else None
    return Surveyed(
        name_of(device),
        memory.used_bytes,
        memory.reserved_bytes,
        peak.flops_per_s if peak else None,
        peak.source if peak else None,
        memory.total_bytes,
    )


def _sentence(error: Exception) -> str:
    if isinstance(error, StateKept):  # it has its cause's name already
        return escaped(str(error))
    return error_text(error)


def _code(error: Exception) -> str:
    if isinstance(error, Failure):
        return error.code
    return (OutOfMemory if is_out_of_memory(error) else Refused).code


def tell_of_sigterm(tell: Callable[[], None]) -> None:
    """Have a thread call `tell` at each SIGTERM, which all threads block: no call of theirs is interrupted, and none
    needs its turn for the signal to be heard."""

    def wait() -> None:
        while True:
            signal.sigwait({signal.SIGTERM})
            tell()

    Thread(target=wait, name="SIGTERM", daemon=True).start()


def main(arguments: dict[str, Any], say: Say) -> None:
    """What the process server forks (`ductile.slot.forkserver`)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there is any other thread
    settings = msgspec.convert(arguments, SlotSettings)
    sys.stdout.reconfigure(line_buffering=True, errors=ESCAPED)  # pyright: ignore[reportAttributeAccessIssue]
    if settings.device == "cpu":
        # Slots share cores: batch scheduling and one thread each make collectives several times faster. Threads
        # inherit the policy, so it comes before any.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
    else:
        torch.cuda.set_device(settings.device)
    key = RunKey(settings.key) if settings.key else None
    if key and settings.host:
        serve_segments(settings.host, key)
    token = bytes.fromhex(settings.token)
    link = Link(lambda: Dealer(settings.address, token, settings.slot, key), settings.device, settings.owner)
    tell_of_sigterm(partial(link.send, 0, Terminating()))
    try:
        Worker(settings, link).run()
    except Exception as error:
        say(error_text(error))
        raise
    finally:
        link.close()
