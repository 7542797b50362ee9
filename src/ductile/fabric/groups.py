"""The groups of one epoch, or of one scorer: created among their members only, kept by member list, destroyed together.

torch's own `new_group` needs the whole world, or derives names that repeat when groups come and go. Here a group is
created under an explicit name that is unique in the run, on a prefix of the run's store, and registered under its
members' slot ids, so that `DeviceMesh`, FSDP2, DTensor and DCP (`process_group=`) take it.
"""

import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from threading import Thread

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import HashStore, Store, _ProcessGroupWrapper
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ductile.core.layout.geometry.mesh import Mesh
from ductile.error_text import error_text
from ductile.fabric import rendezvous, universe
from ductile.fabric.backend import SETTINGS, Backend, choose_backend, device_id, tell_devices
from ductile.fabric.send_recv import GlooSendRecv
from ductile.roles import RoleAssignment


class Groups:
    """Makes groups for one slot, in one epoch or for one instance. All members ask for the same groups in the same
    order.

    After a member's death, its neighbours get an error from the collective they are in; the others wait. Who gets
    the error calls `abandon`. With gloo its sockets close, and so the error reaches all within milliseconds. NCCL
    tells no member: each waits until its own deadline.
    """

    def __init__(
        self,
        slot: int,
        epoch: int,
        device: str,
        store: Store,
        timeout_s: float,
        purpose: str = "",
        instance: str = "",
    ) -> None:
        """A `purpose` lets the same members have a second group in the same epoch. Groups of an `instance` belong to no
        epoch: others may begin and end meanwhile."""
        universe.enter(slot)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)  # where torch puts the tensors of object collectives
        self.slot = slot
        self._names = f"instance/{instance}/" if instance else f"{names_of(epoch)}{purpose}"
        """What the names of all groups begin with; nobody else in the run has it."""
        self._device = torch.device(device)
        self._store = store
        self._timeout_s = timeout_s
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._send_recv: dict[tuple[int, ...], GlooSendRecv] = {}
        self._meshes: list[DeviceMesh] = []
        self._num_on_device: dict[tuple[int, ...], int] = {}

    @classmethod
    def at(cls, assignment: RoleAssignment, timeout_s: float) -> "Groups":
        """Groups for a role's assignment. A role that is held by one slot alone needs no rendezvous."""
        slots = assignment.layout.slots
        if len(slots) > 1 and not assignment.rendezvous:
            raise ValueError(f"slots {slots} cannot find each other: their assignment names no rendezvous")
        store = rendezvous.connect(assignment.rendezvous, timeout_s) if assignment.rendezvous else HashStore()
        epoch, instance = assignment.epoch, assignment.instance
        return cls(assignment.slot, epoch, assignment.device, store, timeout_s, instance=instance)

    def group(self, members: Sequence[int]) -> dist.ProcessGroup:
        """The group of these slots, in this rank order. Collective among the members the first time."""
        key = tuple(members)
        if self.slot not in key:
            raise ValueError(f"slot {self.slot} is not among the members {key}")
        if key not in self._groups:
            self._groups[key] = self._create(key)
        return self._groups[key]

    def send_recv_group(self, members: Sequence[int]) -> dist.ProcessGroup:
        """A made group as `dist.isend` and `dist.irecv` take it."""
        key = tuple(members)
        group = self._groups[key]
        if dist.get_backend(group) != "gloo":
            return group
        if key not in self._send_recv:
            self._send_recv[key] = GlooSendRecv(group, partial(timeout_of, group))
            c10d._world.pg_group_ranks[self._send_recv[key]] = c10d._world.pg_group_ranks[group]
        return self._send_recv[key]

    def num_on_device(self, members: Sequence[int]) -> int:
        """Slots of a made group that share this slot's GPU, itself among them; 1 on a CPU."""
        return self._num_on_device.get(tuple(members), 1)

    def mesh(self, slots: Mesh) -> DeviceMesh:
        """The mesh as parallel code takes it, with a group along each axis. Collective among its slots."""
        # torch remembers tensor layouts by equal meshes, and would go on with one whose group died with an older epoch.
        # With the epoch or the instance in the axes' names, meshes of different ones are not equal.
        names = tuple(f"{axis}@{self._names}" for axis, _ in slots.axes)
        groups = [self.group(slots.around(self.slot, (axis,)).slots) for axis, _ in slots.axes]
        places = torch.tensor(slots.slots).view([size for _, size in slots.axes])
        mesh = DeviceMesh.from_group(groups, self._device.type, mesh=places, mesh_dim_names=names)
        self._meshes.append(mesh)
        return mesh

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of all later collectives on the groups made so far."""
        for group in self._groups.values():
            _behind(group, self._device)._set_default_timeout(timedelta(seconds=timeout_s))

    def destroy(self) -> None:
        """Close every group, in the order of their making. Drop what was made from them (meshes, modules) before.

        All members do: those of NCCL's groups wait for each other.
        """
        self._close(dist.destroy_process_group)

    def abort(self) -> None:
        """`destroy` without waiting for other slots: they may be dead, or stuck, or not do it. When it returns, nothing
        arrives in this slot's memory any more."""
        self._close(_abort)

    def abort_idle(self) -> None:
        """`abort` of groups in which no collective is under way: NCCL's end in threads, also after this has returned.
        Each takes a third of a second (H200), and may wait until another slot aborts another group
        (pytorch/pytorch#119797)."""
        self._close(_abort_idle)

    def abandon(self, error: BaseException) -> None:
        """`abort` after a failure. With gloo the other members fail too then, instead of waiting.

        Drop models and meshes first; the locals of the functions that failed are cleared here.
        """
        cause: BaseException | None = error
        while cause is not None:  # torch's pipelines say what failed in an error of their own
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__
        self.abort()

    def _close(self, close: Callable[[dist.ProcessGroup], None]) -> None:
        for mesh in self._meshes:
            # A mesh that is kept would keep its group, and with it its sockets.
            mesh._pg_registry.clear()
        self._meshes.clear()
        for group in self._send_recv.values():
            del c10d._world.pg_group_ranks[group]
        self._send_recv.clear()
        # What torch remembers of operations on tensors is kept by mesh, and for ever.
        _clear_sharding_prop_cache()
        errors: list[Exception] = []
        for members in list(self._groups):
            try:
                close(self._groups.pop(members))
            except Exception as error:  # the other groups are closed all the same
                errors.append(error)
        gc.collect()  # sharded modules refer to each other in circles; only without them sockets and threads go
        if errors:
            raise errors[0]

    def _create(self, members: tuple[int, ...]) -> dist.ProcessGroup:
        name = f"{self._names}{'.'.join(map(str, members))}"
        backend = self._backend(members, f"{name}/")
        for variable, value in SETTINGS[backend.name].items():
            os.environ.setdefault(variable, value)
        group, _ = c10d._new_process_group_helper(
            group_size=len(members),
            group_rank=members.index(self.slot),
            global_ranks_in_group=list(members),
            backend=c10d.Backend(backend.name),
            store=self._store,
            group_name=c10d.GroupName(name),
            timeout=timedelta(seconds=self._timeout_s),
            device_id=self._device if backend.name == "nccl" else None,
        )
        assert isinstance(group, dist.ProcessGroup)
        c10d._world.pg_group_ranks[group] = {slot: rank for rank, slot in enumerate(members)}
        # Who cannot connect shows here and not in the middle of a step. Once all have, the addresses are read no
        # more: without them a run that resizes a thousand times leaves nothing behind, and a name can be used again.
        try:
            self._meet(group)
            if members[0] == self.slot:
                rendezvous.forget(self._store, f"{name}/")
            self._meet(group)
        except Exception:
            _abort(group)
            raise
        return group

    def _meet(self, group: dist.ProcessGroup) -> None:
        """Returns when all members have come. Raises RuntimeError when they have not in time."""
        work = dist.barrier(group=group, async_op=True)
        assert work is not None, "this slot is in the group"
        if dist.get_backend(group) == "nccl":
            work.wait(timedelta(seconds=self._timeout_s))  # without a time it waits for ever
        else:
            work.wait()

    def _backend(self, members: tuple[int, ...], prefix: str) -> Backend:
        if self._device.type == "cpu" or len(members) == 1:
            return choose_backend(self._device.type, [""])
        devices = tell_devices(self._store, prefix, self.slot, members, device_id(self._device))
        self._num_on_device[members] = devices.count(devices[members.index(self.slot)])
        backend = choose_backend(self._device.type, devices)
        if backend.stands_in and members[0] == self.slot:
            print(f"the group of slots {list(members)}: {backend.stands_in}", file=sys.stderr)
        return backend


def _abort(group: dist.ProcessGroup) -> None:
    if dist.get_backend(group) == "nccl":
        c10d._abort_process_group(group)  # destroying it would wait for what is under way, and so for other members
    else:
        dist.destroy_process_group(group)


def _abort_idle(group: dist.ProcessGroup) -> None:
    if dist.get_backend(group) == "nccl":
        Thread(target=_abort_and_tell, args=(group,), name="abort a group", daemon=True).start()
    else:
        dist.destroy_process_group(group)


def _abort_and_tell(group: dist.ProcessGroup) -> None:
    try:
        c10d._abort_process_group(group)
    except Exception as error:
        print(f"NCCL did not abort a group: {error_text(error)}", file=sys.stderr, flush=True)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The present timeout of a gloo group's collectives (`Groups.set_timeout`)."""
    return _behind(group, torch.device("cpu")).options._timeout


def _behind(group: dist.ProcessGroup, device: torch.device) -> TorchBackend:
    """What carries the group's collectives on the device. Where TORCH_DISTRIBUTED_DEBUG is DETAIL torch puts its checks
    of collectives before it, which have no timeout that can be told or set."""
    backend = group._get_backend(device)
    return backend.wrapped_pg if isinstance(backend, _ProcessGroupWrapper) else backend


def names_of(epoch: int) -> str:
    """What the names of an epoch's groups, and their keys in the store, begin with."""
    return f"epoch/{epoch}/"
