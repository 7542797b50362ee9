"""The dumb twin: layouts as arrays that hold, at every element, the element's own global index.

`Recipe` says how a state is laid out. `Recipe.layout` is the product's layout; `Recipe.local` cuts index arrays with
nothing but numpy indexing, one slot at a time. `execute` carries a plan out on such arrays, so that a wrong box, view,
order or round shows up as a wrong number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod

import numpy as np

from ductile.core.layout.geometry.holdings import View
from ductile.core.layout.geometry.layout import ITEM_BYTES, Layout, Tensor
from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.core.transfer.plan import Part, Plan
from tests.core.other_layouts import flatten, unstacked

PAD = -1
Buffers = dict[int, dict[str, np.ndarray]]
"""slot -> buffer -> one number an element"""


@dataclass(frozen=True)
class Logical:
    """What a tensor is, in every layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    tp_dim: int | None = None
    parts: tuple[tuple[int, int], ...] = ()
    experts: bool = False
    """dim 0 is cut along ep, and dp_shard then cuts dim 1: there are at least two."""

    @property
    def first(self) -> int:
        """Its elements are numbered from here, so that no two tensors have a number in common."""
        return 1 + sum(ord(letter) * 1_000_000 for letter in self.name)


@dataclass(frozen=True)
class Recipe:
    tensors: tuple[Logical, ...]
    mesh: Mesh
    stages: tuple[tuple[int, ...], ...]
    """The pp coordinates that hold each tensor."""
    vocab_multiple: int = 1
    """Dims cut along tp without parts are padded to this multiple times tp."""
    zero: bool = False
    unstacked: bool = False

    def shards(self, tensor: Logical) -> list[Shard]:
        steps: list[Shard] = []
        if tensor.experts:
            steps.append(Shard("ep", 0))
        if tensor.tp_dim is not None:
            padded = 0 if tensor.parts else self.padded(tensor.shape[tensor.tp_dim])
            steps.append(Shard("tp", tensor.tp_dim, tensor.parts, padded))
        return [*steps, Shard("dp_shard", self.fsdp_dim(tensor))]

    def fsdp_dim(self, tensor: Logical) -> int:
        return 1 if tensor.experts else 0

    def padded(self, length: int) -> int:
        unit = self.vocab_multiple * self.mesh.size(("tp",))
        return -(-length // unit) * unit

    def layout(self) -> Layout:
        tensors: list[Tensor] = []
        for logical, stages in zip(self.tensors, self.stages, strict=True):
            only = (("pp", stages),)
            holdings = place(logical.shape, self.mesh, self.shards(logical), only)
            buffers: tuple[str, ...] = ()
            if logical.experts and self.unstacked:
                holdings = unstacked(holdings)
                buffers = tuple(f"{logical.name}.{expert}" for expert in range(logical.shape[0]))
            tensors.append(Tensor(logical.name, logical.dtype, holdings, buffers))
        if self.zero:
            tensors = flatten(tensors, self.mesh, ("dp_replicate",), "zero", align=4, multiple=8)
        return Layout(tensors, self.mesh.slots)

    def local(self, tensor: Logical, slot: int) -> np.ndarray:
        """The slot's local tensor, before flattening."""
        index = np.arange(prod(tensor.shape)).reshape(tensor.shape) + tensor.first
        if tensor.experts:
            index = _chunk(index, 0, self.mesh.size(("ep",)), self.mesh.coordinate(slot, ("ep",)))
        if tensor.tp_dim is not None:
            size, at = self.mesh.size(("tp",)), self.mesh.coordinate(slot, ("tp",))
            if tensor.parts:
                index = _components(index, tensor.tp_dim, tensor.parts, size, at)
            else:
                widths = [(0, 0)] * index.ndim
                widths[tensor.tp_dim] = (0, self.padded(tensor.shape[tensor.tp_dim]) - tensor.shape[tensor.tp_dim])
                index = _chunk(np.pad(index, widths, constant_values=PAD), tensor.tp_dim, size, at)
        return _chunk(
            index, self.fsdp_dim(tensor), self.mesh.size(("dp_shard",)), self.mesh.coordinate(slot, ("dp_shard",))
        )

    def buffers(self) -> Buffers:
        found: Buffers = {slot: {} for slot in self.mesh.slots}
        for slot in self.mesh.slots:
            stage = self.mesh.coordinate(slot, ("pp",))
            here = [t for t, stages in zip(self.tensors, self.stages, strict=True) if stage in stages]
            if self.zero:
                flat = _end_to_end(
                    [self.local(tensor, slot).ravel() for tensor in here], self.mesh.size(("dp_replicate",))
                )
                found[slot]["zero"] = flat[self.mesh.coordinate(slot, ("dp_replicate",))]
                continue
            for tensor in here:
                local = self.local(tensor, slot)
                if tensor.experts and self.unstacked:
                    chunk = -(-tensor.shape[0] // self.mesh.size(("ep",)))
                    first = self.mesh.coordinate(slot, ("ep",)) * chunk
                    for row, expert in enumerate(local):
                        found[slot][f"{tensor.name}.{first + row}"] = expert.ravel()
                else:
                    found[slot][tensor.name] = local.ravel()
        return found


def _chunk(index: np.ndarray, dim: int, size: int, at: int) -> np.ndarray:
    chunk = -(-index.shape[dim] // size)
    return index[(slice(None),) * dim + (slice(at * chunk, (at + 1) * chunk),)]


def _components(index: np.ndarray, dim: int, parts: Sequence[tuple[int, int]], size: int, at: int) -> np.ndarray:
    """Unit by unit: the slot has the units of the longest component that are its own, and those of the others that
    serve them."""
    lead = max(units for _, units in parts)
    mine = list(range(lead))[at * -(-lead // size) : (at + 1) * -(-lead // size)]
    rows: list[int] = []
    base = 0
    for length, units in parts:
        for unit in sorted({leader // (lead // units) for leader in mine}):
            rows += [base + unit * (length // units) + row for row in range(length // units)]
        base += length
    return np.take(index, np.array(rows, dtype=int), axis=dim)


def _end_to_end(tensors: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    flat = np.zeros(0, dtype=int)
    for tensor in tensors:
        if tensor.size:
            flat = np.concatenate([flat, np.full(-len(flat) % 4, PAD), tensor])
    flat = np.concatenate([flat, np.full(-len(flat) % lcm(8, size), PAD)])
    return np.split(flat, size)


def filled(layout: Layout) -> Buffers:
    """The same buffers by the product's own rows."""
    found: Buffers = {slot: {} for slot in layout.slots}
    for slot in layout.slots:
        for name, (_, size) in layout.buffer_sizes(slot).items():
            found[slot][name] = np.full(size, PAD)
    return found


def number(buffers: Buffers, layout: Layout, logical: Mapping[str, Logical]) -> None:
    """Write every element's number where the rows say that it lies."""
    for tensor in layout:
        holdings = tensor.holdings
        index = np.arange(prod(tensor.shape)).reshape(tensor.shape) + logical[tensor.name].first
        for row in range(len(holdings.slots)):
            slot, start, stop = int(holdings.slots[row]), holdings.start[row].tolist(), holdings.stop[row].tolist()
            view = holdings.view(slot, (tuple(start), tuple(stop)))
            box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            into = buffers[slot][tensor.buffer(view.buffer)]
            assert (into[positions(view)] == PAD).all(), f"{tensor.name}: two rows of slot {slot} share memory"
            into[positions(view)] = index[box].ravel()


def positions(view: View) -> np.ndarray:
    offsets = np.array(view.offset)
    for length, stride in zip(view.shape, view.strides, strict=True):
        offsets = offsets[..., None] + np.arange(length) * stride
    return offsets.ravel()


def execute(plan: Plan, old: Buffers) -> tuple[Buffers, Buffers]:
    """Carry a plan out. Returns the new buffers and how often each of their elements was written.

    Asserts on the way that sends mirror receives and that no slot stages more than the bound.
    """
    new = filled(plan.target)
    written: Buffers = {slot: {n: np.zeros_like(b) for n, b in names.items()} for slot, names in new.items()}

    def read(slot: int, part: Part) -> np.ndarray:
        layout, buffers = (plan.target, new) if part.relayed else (plan.source, old)
        view = layout[part.name].holdings.view(slot, part.box)
        return buffers[slot][layout[part.name].buffer(view.buffer)][positions(view)]

    def write(slot: int, part: Part, values: np.ndarray) -> None:
        view = plan.target[part.name].holdings.view(slot, part.box)
        name = plan.target[part.name].buffer(view.buffer)
        new[slot][name][positions(view)] = values
        written[slot][name][positions(view)] += 1

    for slot in plan.slots:
        unchanged = plan.unchanged_buffers(slot)
        for name in unchanged:
            new[slot][name] = old[slot][name]
            written[slot][name] += old[slot][name] != PAD
        for part in plan.local(slot):
            holdings = plan.target[part.name].holdings
            if plan.target[part.name].buffer(holdings.view(slot, part.box).buffer) not in unchanged:
                write(slot, part, read(slot, part))
    by_number: dict[int, dict[int, tuple]] = {}
    for slot in plan.slots:
        for step in plan.rounds(slot):
            by_number.setdefault(step.number, {})[slot] = (step.sends, step.receives)
    assert sorted(by_number) == list(range(plan.num_rounds)), "a round without work, or more rounds than announced"
    for _, slots in sorted(by_number.items()):
        packed = {}
        for slot, (sends, receives) in slots.items():
            assert sum(message.num_bytes for message in sends) <= plan.round_bytes
            assert sum(message.num_bytes for message in receives) <= plan.round_bytes
            for message in sends:
                values = [read(slot, part) for part in message.parts]
                packed[slot, message.peer] = (message, values)
                sizes = [len(v) * plan.target[p.name].item_bytes for v, p in zip(values, message.parts, strict=True)]
                assert sum(sizes) == message.num_bytes
        for slot, (_, receives) in slots.items():
            for message in receives:
                sent, values = packed.pop((message.peer, slot))
                assert (sent.parts, sent.num_bytes) == (message.parts, message.num_bytes)
                for part, value in zip(message.parts, values, strict=True):
                    write(slot, part, value)
        assert not packed, "somebody sent what nobody receives"
    return new, written


def missing_bytes(old: Buffers, new: Buffers, dtypes: Mapping[int, str]) -> int:
    """What slots need and do not have, element by element. `dtypes` maps a tensor's first number to its dtype."""
    total = 0
    firsts = np.array(sorted(dtypes))
    sizes = np.array([ITEM_BYTES[dtypes[first]] for first in firsts.tolist()])
    for slot, names in new.items():
        need = np.unique(np.concatenate([np.zeros(0, dtype=int), *names.values()]))
        have = np.unique(np.concatenate([np.zeros(0, dtype=int), *old.get(slot, {}).values()]))
        lacking = np.setdiff1d(need[need != PAD], have)
        total += int(sizes[np.searchsorted(firsts, lacking, side="right") - 1].sum())
    return total
