"""Slots on this machine: one process each, forked by the process server, heard through the mailbox, never orphaned."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ductile.cluster.cluster import StartFailed
from ductile.cluster.cpu_cap import CpuCap
from ductile.cluster.processes import ForkedProcess, ProcessServer, all_ended
from ductile.concurrency.background import start_reported
from ductile.config.cluster import ClusterConfig
from ductile.core.layout.peak import Arithmetic
from ductile.error_text import capitalised
from ductile.messages.workers import Done, Event, Hello, RoleName, Stop, Surveyed
from ductile.roles import Failure
from ductile.transport.mailbox import Mailbox
from ductile.transport.router import Router
from ductile.transport.sockets import SocketFolder
from ductile.transport.survey import survey

ROLES: dict[RoleName, str] = {
    "train": "ductile.trainer.worker:TrainRole",
    "generate": "ductile.generator.worker:GenerateRole",
    "score": "ductile.scorer.worker:ScoreRole",
}

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

FREED_MEMORY_STAYS = {
    "GLIBC_TUNABLES": ":".join(
        f"glibc.malloc.{name}={value}"
        for name, value in {"hugetlb": 1, "mmap_threshold": 1 << 25, "trim_threshold": 1 << 30}.items()
    )
}
"""A training step frees what the next one takes again. Tensors of up to 32 MiB come out of a heap that gives memory
back to the kernel only when it has 1 GiB to spare, in huge pages where the kernel has them: otherwise 4 % of a step is
page faults and address look-ups. glibc reads it when a process starts; where the variable is set already, it stays."""

STOP_S = 2.0
"""How long slots have to leave by themselves. One that waits in a collective for a dead peer never will."""
KILL_S = 5.0
CHECK_S = 1.0


class LocalCluster:
    """The slots of one run, from start to stop:

        async with LocalCluster(range(4), config.cluster, logs) as cluster:
            ...  cluster.mailbox, cluster.rendezvous
            sentence = await cluster.death()

    A slot that ends, or is silent for `heartbeat_timeout_s`, is lost in the mailbox within milliseconds, and `death`
    returns if the run depends on it. Slots may be added at any time. Leaving the block stops everything: politely
    first, then with SIGKILL.
    """

    def __init__(
        self, slots: Sequence[int], config: ClusterConfig, logs: Path, roles: Mapping[RoleName, str] = ROLES
    ) -> None:
        self.slots = tuple(slots)
        self.rendezvous = ""
        """host:port of the run's store."""
        self.devices: dict[int, str] = {}
        self.processes: dict[int, ForkedProcess] = {}
        self.depends_on: Callable[[int], bool] = lambda slot: True
        """Whether the run ends when this slot is lost."""
        self._measured: Arithmetic | None = None
        """Arithmetic that the slots were measured at, as slots that are added later will be; None: not measured."""
        self._num_devices: int | None = None
        """Devices of the machine; None where slots are processes, of which there may be any number."""
        self._config = config
        self._logs = logs
        self._adding = asyncio.Lock()
        self._roles = dict(roles)
        self._cap: CpuCap | None = None
        self._store: ForkedProcess | None = None
        self._stopping = True
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LocalCluster":
        await self.start()
        return self

    async def start(self) -> None:
        """Returns when every slot has said Hello. Raises StartFailed or CapNotPermitted, with nothing left running."""
        self._stopping = False
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._token = secrets.token_bytes(32)
        self._sockets = SocketFolder()
        self._router = Router(self._token, self._sockets.address, self.fail_with)
        self.mailbox = Mailbox(self._router, on_error=self.fail_with)
        # Every process of the run carries its name, so that a user can find what belongs together.
        memory = {name: os.environ.get(name, value) for name, value in FREED_MEMORY_STAYS.items()}
        environment = {
            **ONE_THREAD,
            **memory,
            "TOKENIZERS_PARALLELISM": "false",
            "DUCTILE_RUN": f"{os.getpid()}-{id(self):x}",
        }
        log, sockets = self._logs / "processes.log", self._sockets.path
        self._server = ProcessServer(log, environment, self._on_exit, self.fail_with, sockets)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._start()
        except TimeoutError:
            await self.stop()
            raise StartFailed(self._not_started(self.slots)) from None
        except BaseException:
            await self.stop()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def death(self) -> str:
        """Wait until a process that the run needs is lost; returns the sentence. Raises the error of a mistake of the
        orchestrator's own, which ends the run, too."""
        return await asyncio.shield(self._death)

    async def add(self, slots: Sequence[int]) -> list[int]:
        """Start those of the slots that do not run; returns them when all have said Hello, and how fast they are where
        the others have.

        Raises StartFailed, with none of the new ones running. A slot that was lost starts anew, with nothing of its
        earlier life.
        """
        async with self._adding:  # two that want the same slot get one process
            return await self._add(slots)

    async def _add(self, slots: Sequence[int]) -> list[int]:
        new = [slot for slot in slots if slot not in self.processes or slot in self.mailbox.lost]
        if not new:
            return []
        self.devices |= {slot: self._device_of(slot) for slot in new}
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                for slot in new:
                    if slot in self.processes:
                        await self.processes[slot].ended.wait()
                    self.mailbox.welcome(slot)
                self.slots = tuple(sorted({*self.slots, *new}))
                with self._greetings(new) as greeted:
                    for slot in new:
                        self.processes[slot] = await self._fork_slot(slot)
                    await self._greeted_or_ended(greeted, new)
            if self._measured:
                await survey(self.mailbox, new, self._config.command_timeout_s, self._measured)
        except (TimeoutError, StartFailed, Failure) as error:
            for slot in new:
                if slot in self.processes:
                    self.condemn(slot, f"slot {slot} was not needed, as another one did not start")
            raise StartFailed(str(error) or self._not_started(new)) from None
        return new

    def condemn(self, slot: int, sentence: str) -> None:
        """Kill a slot, and lose it at once."""
        self._lose(slot, sentence)
        self.processes[slot].signal(signal.SIGKILL)

    def fail(self, sentence: str) -> None:
        """Have `death` return: the run cannot go on. The first sentence stays."""
        if not self._death.done():
            self._death.set_result(sentence)

    def fail_with(self, sentence: str, error: Exception) -> None:
        """Have `death` raise this error: the orchestrator itself has failed, and a run must not go on from wrong books.
        The first failure stays."""
        if not self._death.done():
            error.add_note(f"{capitalised(sentence)}.")
            self._death.set_exception(error)
            self._death.exception()  # it may be that nothing awaits it any more

    async def survey(self, measure: Arithmetic | None = None) -> dict[int, Surveyed]:
        """`ductile.transport.survey` of all slots. What it measures is also measured of slots that `add` starts
        later."""
        self._measured = measure or self._measured
        return await survey(self.mailbox, self.slots, self._config.command_timeout_s, measure)

    async def stop(self) -> None:
        """Stop all slots: `Stop` first, SIGKILL for those that do not follow. Returns when none is left.

        Called again, it does nothing.
        """
        if self._stopping:
            return  # or never started
        self._stopping = True
        if self._watching:
            self._watching.cancel()
        alive = [slot for slot, process in self.processes.items() if process.code is None]
        outcomes = await self.mailbox.ask_all(dict.fromkeys(alive, Stop()), STOP_S)
        willing = [slot for slot, outcome in outcomes.items() if isinstance(outcome, Done)]
        await all_ended([self.processes[slot] for slot in willing], STOP_S)
        await self._server.stop(KILL_S)
        await self._router.close()
        self._sockets.remove()
        if self._cap:
            self._cap.close()

    async def _start(self) -> None:
        if self._config.cpu_slot_fraction is not None:
            self._cap = CpuCap(self._config.cpu_slot_fraction)
        modules = sorted({path.partition(":")[0] for path in self._roles.values()} | {"ductile.slot.worker"})
        await self._server.start([*modules, "ductile.slot.store"], self._config.start_timeout_s)
        self._num_devices = await self._count_devices()
        self.devices = {slot: self._device_of(slot) for slot in sorted(self.slots, reverse=True)}
        self._store = await self._fork("store", "ductile.slot.store:host")
        self.rendezvous = f"127.0.0.1:{await self._output_of(self._store)}"
        with self._greetings(self.slots) as greeted:
            for slot in self.slots:
                self.processes[slot] = await self._fork_slot(slot)
            await self._or_death(greeted)
        self._watching = start_reported(self._watch(), "it is not seen any more which slots are silent", self.fail_with)

    async def _count_devices(self) -> int | None:
        if self._config.device == "cpu":
            return None
        counting = await self._fork("devices", "ductile.slot.store:count_devices")
        num_devices = int(await self._output_of(counting))
        return None if num_devices == 0 and self._config.device == "auto" else num_devices

    def _device_of(self, slot: int) -> str:
        if self._num_devices is None:
            return "cpu"
        each = self._config.slots_per_device
        if slot >= self._num_devices * each:
            shared = f", with {each} slots on each (cluster.slots_per_device)" if each > 1 else ""
            instead = "Use fewer slots, put several roles on one slot, raise cluster.slots_per_device, or say "
            if self._num_devices == 0:
                shared, instead = " that torch can use", 'A CPU build of torch ("+cpu" in its version) sees none. Say '
            raise StartFailed(
                f"slot {slot} has no device: this machine has {self._num_devices} CUDA devices{shared}. {instead}"
                'cluster.device = "cpu"'
            )
        return f"cuda:{slot // each}"

    async def _fork_slot(self, slot: int) -> ForkedProcess:
        arguments = {
            "slot": slot,
            "address": self._router.address,
            "token": self._token.hex(),
            "orchestrator": os.getpid(),
            "device": self.devices[slot],
            "roles": self._roles,
        }
        cgroup = self._cap.group(slot) if self._cap else ""
        log = self._logs / f"slot_{slot}.log"
        return await self._server.fork(_name(slot), "ductile.slot.worker:main", arguments, log, cgroup)

    async def _fork(self, name: str, entry: str) -> ForkedProcess:
        return await self._server.fork(name, entry, {}, self._logs / "processes.log")

    async def _output_of(self, process: ForkedProcess) -> str:
        await process.heard.wait()
        if process.code:
            raise StartFailed(f"the process {process.name!r} {process.ending}; see {self._logs / 'processes.log'}")
        return process.said[0]

    @contextmanager
    def _greetings(self, slots: Sequence[int]) -> "Iterator[asyncio.Future[None]]":
        """Done when each of the slots, of which there is at least one, has said Hello."""
        missing = set(slots)
        greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def listen(slot: int, event: Event) -> None:
            if isinstance(event, Hello):
                missing.discard(slot)
                if not missing and not greeted.done():
                    greeted.set_result(None)

        leave = self.mailbox.subscribe(listen)
        try:
            yield greeted
        finally:
            leave()

    async def _greeted_or_ended(self, greeted: "asyncio.Future[None]", slots: Sequence[int]) -> None:
        endings = [asyncio.create_task(self.processes[slot].ended.wait()) for slot in slots]
        try:
            await asyncio.wait([greeted, *endings], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for ending in endings:
                ending.cancel()
        if not greeted.done():
            ended = next(slot for slot in slots if self.processes[slot].code is not None)
            raise StartFailed(f"{self.mailbox.lost[ended]}; see {self._logs}")

    def _not_started(self, slots: Sequence[int]) -> str:
        silent = [slot for slot in slots if slot not in self.mailbox.heard_at_s]
        missing = ", ".join(map(str, silent or slots))  # the last one may just have been heard
        limit_s = self._config.start_timeout_s
        return f"slots {missing} did not start within {limit_s:g} s (cluster.start_timeout_s); see {self._logs}"

    async def _or_death(self, future: "asyncio.Future[None]") -> None:
        await asyncio.wait([future, self._death], return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise StartFailed(f"{self._death.result()}; see {self._logs}")

    def _on_exit(self, process: ForkedProcess) -> None:
        if self._stopping or process.name == "devices":
            return
        slot = next((slot for slot in self.slots if process.name == _name(slot)), None)
        if slot is None:
            self.fail(f"the process {process.name!r} (pid {process.pid}) {process.ending}")
        else:
            self._lose(slot, f"{self.mailbox.describe(slot)} {process.ending} while {self.mailbox.doing(slot)}")

    def _lose(self, slot: int, sentence: str) -> None:
        if slot in self.mailbox.lost:
            return
        needed = self.depends_on(slot)
        self.mailbox.lose(slot, sentence)
        if needed:
            self.fail(sentence)

    async def _watch(self) -> None:
        """Lose slots that are silent for too long, by the second."""
        limit_s = self._config.heartbeat_timeout_s
        checked_s = time.monotonic()
        awake_since_s = checked_s
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            if now_s - checked_s > 2 * CHECK_S:
                # We ourselves were stopped (Ctrl-Z, a suspended laptop): the heartbeats wait unread.
                awake_since_s = now_s
            checked_s = now_s
            for slot, process in self.processes.items():
                silent_s = min(self.mailbox.silent_for_s(slot), now_s - awake_since_s)
                if silent_s > limit_s and process.code is None and slot not in self.mailbox.lost:
                    self.condemn(
                        slot,
                        f"{self.mailbox.describe(slot)} was silent for {silent_s:.0f} s while "
                        f"{self.mailbox.doing(slot)} (cluster.heartbeat_timeout_s = {limit_s:g}) and has been killed",
                    )


def _name(slot: int) -> str:
    return f"slot-{slot}"
