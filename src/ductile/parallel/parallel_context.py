"""A layout, connected: the process groups of its axes, and how numbers are summed over its slots."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ductile.core.layout.geometry.parallel_layout import AXES, FULLY_SHARDED, ParallelLayout
from ductile.fabric.groups import Groups
from ductile.parallel.data import flat_shard
from ductile.parallel.parts import SlotParts

SAID_BYTES = 512
"""Bytes of what the first slot can say to all at a time."""


class ParallelContext:
    """A `ParallelLayout` as one of its slots sees it."""

    def __init__(self, groups: Groups, layout: ParallelLayout) -> None:
        """Makes the groups of all axes; collective over the layout, which makes no others meanwhile."""
        self.layout = layout
        self.slot = groups.slot
        self._groups = groups
        self.everyone = self.group(*AXES)
        for axis in ("pp", "cp", "tp"):
            self.group(axis)
        self.ends = self._ends()
        """Group of this slot's pipeline's first and last slot; None on slots between them, and without pp."""
        products = [("dp_replicate",), FULLY_SHARDED] if layout.dims.dp_replicate > 1 else [FULLY_SHARDED]
        self.mesh = groups.mesh(layout.mesh.around(groups.slot, *products))
        """Mesh of FSDP2: the shards of this slot's copy; before that axis the copies, when there are several."""
        self.is_first = groups.slot == layout.first
        """Whether this slot speaks for all: it publishes what all have written, and begins the folder of an export."""
        self.data_parallel_rank = layout.data_parallel_rank(groups.slot)
        """The part of a batch that this slot works on."""
        self.counts_samples = layout.counts_samples(groups.slot)
        """Whether this slot's sums over samples count, so that `sum` has each token once."""
        self.num_on_device = groups.num_on_device(layout.slots)
        """Slots that share this slot's GPU, itself among them."""

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The group of the slots that differ along these axes alone; collective among them the first time."""
        return self._groups.group(self.layout.group(self._groups.slot, axes))

    def send_recv_group(self, *axes: str) -> dist.ProcessGroup:
        """`group` as `dist.isend` and `dist.irecv` take it."""
        return self._groups.send_recv_group(self.layout.group(self.slot, axes))

    def _ends(self) -> dist.ProcessGroup | None:
        in_stages = self.layout.group(self.slot, ("pp",))
        ends = (in_stages[0], in_stages[-1])
        return self._groups.group(ends) if len(in_stages) > 1 and self.slot in ends else None

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor in place, over all slots."""
        dist.all_reduce(tensor, group=self.everyone)
        return tensor

    def said_by_first(self, text: str) -> str:
        """Return what the first slot says, on every slot; what others say does not count. At most `SAID_BYTES` of
        UTF-8, without zeros at its end. Collective."""
        content = text.encode()
        if len(content) > SAID_BYTES:
            raise ValueError(f"the first slot says {len(content)} bytes to all, and {SAID_BYTES} fit: {text!r}")
        said = torch.tensor([*content.ljust(SAID_BYTES, b"\0")], dtype=torch.uint8, device=self.mesh.device_type)
        dist.broadcast(said, self.layout.first, group=self.everyone)
        return bytes(said.tolist()).rstrip(b"\0").decode()

    def share_of_square(self, gradients: Mapping[str, Tensor], parts: SlotParts) -> Tensor:
        """This slot's share of the squared norm of the whole gradient, of which these are its parts: `sum` adds the
        shares up. What several slots have alike (copies of the state, a norm's weight along tp) counts on the one that
        owns it."""
        owned = [view for name, gradient in gradients.items() for view in parts.owned_views(name, flat_shard(gradient))]
        norms = [torch.linalg.vector_norm(view, dtype=torch.float32) for view in owned]
        return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
