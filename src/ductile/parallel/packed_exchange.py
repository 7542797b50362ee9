"""A plan between two layouts of one process group, carried out by one all-to-all.

Each slot packs what it sends to each other one end to end, in the plan's order, and unpacks what arrives in the same
order. It is for states that move in every step; live ones move by `ductile.fabric.transfer`, which proves what came.
"""

from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ductile.core.layout.geometry.holdings import View
from ductile.core.layout.geometry.layout import Layout
from ductile.core.transfer.plan import Part, Plan


class PackedExchange:
    """The part of one slot. `members` are the group's slots, by rank."""

    def __init__(self, plan: Plan, slot: int, members: tuple[int, ...], group: dist.ProcessGroup) -> None:
        messages = plan.at_once(slot)
        self._group, self._target, self._slot = group, plan.target, slot
        self._kept = [
            (part.name, _view(plan.source, part, slot)[1], _view(plan.target, part, slot)[1])
            for part in plan.local(slot)
        ]
        sent = {message.peer: [_view(plan.source, part, slot) for part in message.parts] for message in messages.sends}
        coming = {
            message.peer: [_view(plan.target, part, slot) for part in message.parts] for message in messages.receives
        }
        self._sends = [each for peer in members for each in sent.get(peer, [])]
        self._receives = [each for peer in members for each in coming.get(peer, [])]
        self._num_sent = [sum(prod(view.shape) for _, view in sent.get(peer, [])) for peer in members]
        self._num_received = [sum(prod(view.shape) for _, view in coming.get(peer, [])) for peer in members]

    def run(self, source: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Return this slot's part of each tensor in the target layout, flat. Collective.

        `source` has its part in the source layout, flat; results have the dtype and device of `like`.
        """
        sizes = self._target.buffer_sizes(self._slot)
        target = {name: like.new_zeros(size) for name, (_, size) in sizes.items()}
        for name, before, after in self._kept:
            _strided(target[name], after).copy_(_strided(source[name], before))
        sent = [_strided(source[name], view).reshape(-1) for name, view in self._sends]
        arrived = like.new_empty(sum(self._num_received))
        packed = torch.cat(sent) if sent else like.new_empty(0)
        dist.all_to_all_single(arrived, packed, self._num_received, self._num_sent, group=self._group)
        parts = arrived.split([prod(view.shape) for _, view in self._receives])
        for (name, view), part in zip(self._receives, parts, strict=True):
            _strided(target[name], view).copy_(part.view(view.shape))
        return target


def _view(layout: Layout, part: Part, slot: int) -> tuple[str, View]:
    return part.name, layout[part.name].holdings.view(slot, part.box)


def _strided(flat: Tensor, view: View) -> Tensor:
    return flat.as_strided(view.shape, view.strides, flat.storage_offset() + view.offset)
