"""The processes of one node: its process server, its devices, its slots. They belong to the orchestrator on its own
machine, and to an agent on another one (`ductile.cluster.agent`)."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ductile.cluster.cluster import StartFailed
from ductile.cluster.cpu_cap import CpuCap
from ductile.cluster.processes import ForkedProcess, ProcessServer
from ductile.concurrency.deadline import Deadline
from ductile.fabric.process import NODE_VARIABLE
from ductile.messages.agents import NodeSettings
from ductile.transport.network import interface_of

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

KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a node whose first slot is `first_slot`."""

    num_devices: int | None
    """None where slots are processes, of which there may be any number."""
    slots_per_device: int = 1
    first_slot: int = 0

    def of(self, slot: int) -> str:
        """ "cpu", "cuda:0". Raises StartFailed."""
        if self.num_devices is None:
            return "cpu"
        each, place = self.slots_per_device, slot - self.first_slot
        if place >= self.num_devices * each:
            shared = f", with {each} slots on each (cluster.slots_per_device)" if each > 1 else ""
            instead = "Use fewer slots, put several roles on one slot, raise cluster.slots_per_device, or say "
            if self.num_devices == 0:
                shared, instead = " that torch can use", 'A CPU build of torch ("+cpu" in its version) sees none. Say '
            raise StartFailed(
                f"slot {slot} has no device: this machine has {self.num_devices} CUDA devices{shared}. {instead}"
                'cluster.device = "cpu"'
            )
        return f"cuda:{place // each}"


class Node:
    lost = ""
    """Never: with its process server the run, or the agent, ends."""

    def __init__(
        self,
        settings: NodeSettings,
        on_exit: Callable[[ForkedProcess], None],
        on_error: Callable[[str, Exception], None],
        sockets: Path | None = None,
    ) -> None:
        """on_exit: called in the event loop for every slot, store and process server that ends, wanted or not.
        on_error, sockets: as `ProcessServer` has them."""
        self._settings, self._on_exit = settings, on_exit
        self._logs = Path(settings.logs)
        self._log = self._logs / (f"processes_{settings.node}.log" if settings.node else "processes.log")
        self._cap: CpuCap | None = None
        self._devices = Devices(None)
        memory = {name: os.environ.get(name, value) for name, value in FREED_MEMORY_STAYS.items()}
        environment = {**ONE_THREAD, **memory, "TOKENIZERS_PARALLELISM": "false", "DUCTILE_RUN": settings.run}
        environment |= network_variables(settings.node, settings.host)
        self._server = ProcessServer(self._log, environment, self._on_process_exit, on_error, sockets)

    async def start(self) -> Devices:
        """Have the process server import what the slots will need, and count the devices. Raises StartFailed or
        CapNotPermitted; `stop` is to be called all the same."""
        settings = self._settings
        if settings.cpu_slot_fraction is not None:
            self._cap = CpuCap(settings.cpu_slot_fraction)
        modules = sorted({path.partition(":")[0] for path in settings.roles.values()} | {"ductile.slot.worker"})
        await self._server.start(
            [*modules, "ductile.slot.store"], Deadline(settings.start_timeout_s, "cluster.start_timeout_s")
        )
        self._devices = Devices(await self._count_devices(), settings.slots_per_device, settings.first_slot)
        return self._devices

    async def start_slot(self, slot: int) -> ForkedProcess:
        """Returns when the process is there; it says Hello later. Raises StartFailed."""
        arguments = {
            "slot": slot,
            "address": self._settings.address,
            "token": self._settings.token,
            "owner": os.getpid(),
            "device": self._devices.of(slot),
            "roles": self._settings.roles,
            "key": self._settings.key,
            "host": self._settings.host,
        }
        cgroup = self._cap.group(slot) if self._cap else ""
        log = self._logs / f"slot_{slot}.log"
        return await self._server.fork(slot_name(slot), "ductile.slot.worker:main", arguments, log, cgroup)

    async def host_store(self, host: str) -> str:
        """Start the process of the run's store, on the address `host` of this machine. Returns host:port."""
        return f"{host}:{await self._output_of('store', 'ductile.slot.store:host', {'host': host})}"

    async def stop(self) -> None:
        """Kill what is left. Nothing of the node runs afterwards."""
        await self._server.stop(KILL_S)
        if self._cap:
            self._cap.close()

    async def _count_devices(self) -> int | None:
        if self._settings.device == "cpu":
            return None
        num_devices = int(await self._output_of("devices", "ductile.slot.store:count_devices", {}))
        return None if num_devices == 0 and self._settings.device == "auto" else num_devices

    async def _output_of(self, name: str, entry: str, arguments: dict[str, Any]) -> str:
        process = await self._server.fork(name, entry, arguments, self._log)
        await process.heard.wait()
        if process.code:
            raise StartFailed(f"the process {name!r} {process.ending}; see {self._log}")
        return process.said[0]

    def _on_process_exit(self, process: ForkedProcess) -> None:
        if process.name != "devices":
            self._on_exit(process)


def network_variables(node: int, host: str) -> dict[str, str]:
    """Return variables of the environment for the processes of a node that other nodes reach at `host`: torch's
    sockets are on the interface that has this address, unless the user's own variables say otherwise."""
    if not host:
        return {}
    interface = interface_of(host)
    torch = {name: interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}
    return {NODE_VARIABLE: str(node), **(torch if interface else {})}


def slot_name(slot: int) -> str:
    """Name of a slot's process on its node."""
    return f"slot-{slot}"


def slot_of(name: str) -> int | None:
    """The slot that a process is; None for another process."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "slot" else None
