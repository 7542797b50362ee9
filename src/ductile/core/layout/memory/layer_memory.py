"""What one layer keeps for its backward pass, and the most that it needs in either pass.

A layer is a list of operations (`layer_operations`). What is kept follows from the list and the checkpointing; so does
the most that is live, by walking the list forward and back (`layer_memory`).

The count is that of Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models", section
4), for RMSNorm, SwiGLU, grouped-query attention that keeps no scores, and kernels that save what they read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ductile.core.layout.memory.layer_operations import ADD, Operation, operations_of
from ductile.core.layout.memory.options import Checkpointing
from ductile.core.layout.memory.slot_shapes import SlotShapes


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of one layer on one slot, for one micro-batch."""

    kept: tuple[int, ...]
    """Sizes of the tensors that it keeps from its forward pass to its backward pass, in the order of saving; its input
    is among them."""
    views: tuple[int, ...]
    """Sizes of views of these that it keeps, too: they take memory of their own in host memory alone."""
    cached: int
    """Bytes of results that selective checkpointing keeps beside these, and that never leave the device."""
    forward: int
    """The most that is live in its forward pass, its input and what it keeps among it."""
    backward: int
    """The most that is live in its backward pass, the gradients of its weights among it as far as they are made."""
    backward_with_one_weight: int
    """The same where each weight's gradient is added to another one as soon as it is made."""
    weight_gradients: int
    """Bytes of all its weights' gradients."""
    for_weights: int
    """Bytes of what products read, and of the gradients of what they make: what a schedule that makes gradients of
    weights later keeps until then."""

    @property
    def kept_bytes(self) -> int:
        return sum(self.kept) + self.cached


@lru_cache(maxsize=4096)
def layer_memory(
    shapes: SlotShapes, checkpointing: Checkpointing | None, offloaded_in_flight: int | None = None
) -> LayerMemory:
    """Return what a layer takes that does as `checkpointing` says.

    offloaded_in_flight: kept tensors that are on the device at a time, as the others are in host memory; None: all are.
    """
    walk = _LayerWalk(operations_of(shapes), checkpointing, offloaded_in_flight)
    forward = walk.forward()
    backward, with_one_weight = walk.backward()
    return LayerMemory(
        kept=tuple(walk.size_of([name]) for name in walk.kept),
        views=tuple(walk.views),
        cached=sum(walk.cached.values()),
        forward=forward,
        backward=backward,
        backward_with_one_weight=with_one_weight,
        weight_gradients=sum(operation.weight for operation in walk.operations),
        for_weights=sum(
            walk.size_of([*operation.reads, *operation.makes]) for operation in walk.operations if operation.is_product
        ),
    )


class _LayerWalk:
    """A layer's operations, run forward and back."""

    def __init__(
        self, operations: Sequence[Operation], checkpointing: Checkpointing | None, in_flight: int | None
    ) -> None:
        self.operations = operations
        self._sizes = {"x": operations[0].gradients["x"]}
        for operation in operations:
            self._sizes |= operation.makes
        self._regions = _regions(operations, checkpointing)
        self._in_flight = in_flight
        kept, self.cached = self._what_is_kept(checkpointing)
        self.kept = [name for name in kept if self._sizes[name]]
        """Names of the tensors that are kept, in the order of saving."""
        in_regions = {number for region in self._regions for number in region}
        self.views = [each.views for number, each in enumerate(operations) if each.views and number not in in_regions]

    def size_of(self, names: Iterable[str]) -> int:
        """Return the bytes of these tensors."""
        return sum(self._sizes[name] for name in names)

    def forward(self) -> int:
        """Return the most that is live, of tensors that are kept, or that a later operation reads."""
        last_reader = {name: number for number, operation in enumerate(self.operations) for name in operation.reads}
        made, saved, peak = {"x"}, set[str](), 0
        for number, operation in enumerate(self.operations):
            made |= operation.makes.keys()
            saved |= made & {*operation.reads, *operation.saves}
            needed = {name for name in made if last_reader.get(name, -1) >= number} | operation.makes.keys()
            stay = [name for name in self.kept if name in (made if self._in_flight is None else saved)]
            leaving = stay if self._in_flight is None else stay[-self._in_flight :]
            peak = max(peak, self.size_of(needed.union(leaving)) + operation.forward_extra)
        return peak + sum(self.cached.values())

    def backward(self) -> tuple[int, int]:
        """Return the most that is live: with all weights' gradients that are made so far, and with that of the
        operation that runs alone."""
        waiting = self._num_uses()
        again: set[str] = set()
        """Tensors that have been computed again."""
        results, gradients = sum(self.cached.values()), {"y": self._sizes["y"]}
        peak = peak_with_one = made_weights = 0
        for number in reversed(range(len(self.operations))):
            operation = self.operations[number]
            region = next((region for region in self._regions if number == region.stop - 1), None)
            if region is not None:
                again |= {name for each in region for name in self.operations[each].saves}
                # A cached result is the tensor that is saved again, or goes, but for the last one, which none asks for.
                results -= sum(self.cached.get(each, 0) for each in region if each != region.stop - 1)
            new = {name: operation.gradients.get(name, self._sizes[name]) for name in operation.reads}
            live = {name for name in again if waiting[name]} | self._on_device(operation, waiting, again)
            made_weights += operation.weight
            now = self.size_of(live) + sum(gradients.values()) + sum(new.values()) + results + operation.backward_extra
            peak, peak_with_one = max(peak, now + made_weights), max(peak_with_one, now + operation.weight)
            if operation.name == ADD:  # its gradient is that of both addends
                new["total"] = gradients["y"]
            for name in operation.makes:
                gradients.pop(name, None)
            for name, size in new.items():
                gradients[name] = max(gradients.get(name, 0), size)
            for name in operation.saves:
                waiting[name] -= 1
        return peak, peak_with_one

    def _on_device(self, operation: Operation, waiting: dict[str, int], again: set[str]) -> set[str]:
        """Kept tensors that are on the device in an operation's backward pass. Of offloaded ones it is those that it
        uses, those that have not left yet, and as many that come back ahead of their use as may be in flight besides.
        """
        number = self._in_flight
        remaining = [name for name in self.kept if waiting.get(name, 1)]
        if number is None:
            return {*remaining}
        used = {*operation.saves} & {*remaining}
        leaving = {*self.kept[-number:]} & {*remaining}
        others = [name for name in remaining if name not in used | leaving | again]
        num_ahead = min(max(0, number - 1 - len(leaving - used)), len(others))
        return used | leaving | {*others[len(others) - num_ahead :]}

    def _what_is_kept(self, checkpointing: Checkpointing | None) -> tuple[dict[str, None], dict[int, int]]:
        """Names of the tensors that are kept, in the order of saving; and bytes of cached results by operation."""
        kept: dict[str, None] = {}
        cached: dict[int, int] = {}
        for number, operation in enumerate(self.operations):
            region = next((region for region in self._regions if number in region), None)
            if region is None:
                kept |= dict.fromkeys(operation.saves)
                continue
            if number == region.start:
                kept |= dict.fromkeys(operation.reads)
            if checkpointing is None or checkpointing.mode == "full":
                continue
            if operation.cached:
                cached[number] = operation.cached
            elif operation.is_product and operation.target not in checkpointing.targets:
                cached[number] = self.size_of(operation.makes)
        return kept, cached

    def _num_uses(self) -> dict[str, int]:
        """How many operations' backward passes need each tensor."""
        waiting: dict[str, int] = {}
        for operation in self.operations:
            for name in operation.saves:
                waiting[name] = waiting.get(name, 0) + 1
        return waiting


def _regions(operations: Sequence[Operation], checkpointing: Checkpointing | None) -> list[range]:
    """Runs of operations that are run again as one."""
    if checkpointing is None:
        return []
    if checkpointing.mode == "full" or "norm" in checkpointing.targets:
        return [range(len(operations))]
    found: list[range] = []
    for target in ("attn_proj", "mlp"):
        numbers = [number for number, operation in enumerate(operations) if operation.target == target]
        if target in checkpointing.targets:
            found.append(range(numbers[0], numbers[-1] + 1))
    return found
