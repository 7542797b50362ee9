"""One slot's part of a plan, carried out: the state goes from one layout to another.

    plan = planner.plan(source, target)            on every slot for itself; all compare plan.key
    transfer = Transfer(plan, slot, old, new, carrier)
    moved = transfer.run()                         on every slot at once
    # all compare what they sent with what their peers received, then all commit or none does

The caller makes sure that nothing writes to old buffers from before the first slot runs until the last one is done.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch

from ductile.core.transfer.plan import Plan
from ductile.fabric.carrier import Carrier, PreparedTransfer, TransferInputs
from ductile.fabric.digest import Digests
from ductile.fabric.memory import Memory
from ductile.fabric.modes import Allocate, Shadow, Streaming

Verify = Literal["off", "moved"]
"""Which fingerprints are taken: none, or of what goes to each peer, on both sides."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a slot did in a transfer."""

    sent: dict[int, int]
    """64-bit fingerprint of all that went to each peer, by slot. It must be what the peer says in `received`."""
    received: dict[int, int]
    num_bytes: int
    """Bytes that the slot received from peers."""


class Transfer:
    """Moves a state in shadow mode: old buffers stay as they are.

    `old` and `new` are this slot's buffers by the names that the two layouts list (`Layout.buffer_sizes`): contiguous,
    of any shape, and of the listed dtype. A buffer that does not change (`Plan.unchanged_buffers`) can be missing in
    `new`, or be the same memory: it is handed on. Padding in new buffers is left as it is.
    """

    def __init__(
        self,
        plan: Plan,
        slot: int,
        old: Mapping[str, torch.Tensor] | None,
        new: Mapping[str, torch.Tensor],
        carrier: Carrier,
        verify: Verify = "moved",
    ) -> None:
        """Prepare the transfer. `bind` brings `old` where it is None: everything else can be done before it is known.

        Raises `ValueError` for buffers that are not what the layouts say.
        """
        _check(plan, carrier)
        self._new = new
        self._verify: Verify = verify
        self._unchanged = plan.unchanged_buffers(slot)
        self.handed_on: frozenset[str] = frozenset()
        self.buffers: dict[str, torch.Tensor] = {}
        """The new state, whole after `run`."""
        old_memory, new_memory = Memory.empty(plan.source, slot), Memory.empty(plan.target, slot)
        for name in new_memory.sizes:
            if name in new or name not in self._unchanged:
                new_memory.take(name, new)
        self._steps = Shadow(plan, old_memory, new_memory)
        self._inputs = TransferInputs(plan, slot, old_memory, new_memory, self._steps)
        if old is not None:
            self.bind(old)
        self._prepared = carrier.prepare(self._inputs)

    def bind(self, old: Mapping[str, torch.Tensor]) -> None:
        """Bring the old buffers, once. Raises `ValueError` as `__init__` does."""
        for name in self._inputs.old.sizes:
            self._inputs.old.take(name, old)
        new = self._new
        self.handed_on = frozenset(
            name for name in self._unchanged if name not in new or new[name].data_ptr() == old[name].data_ptr()
        )
        for name in self.handed_on:
            self._inputs.new.add(name, old[name])
        self.buffers = {name: old[name] if name in self.handed_on else new[name] for name in self._inputs.new.sizes}
        _check_apart(self._inputs.old, self._inputs.new, self.handed_on)
        self._steps.bind(self.handed_on)

    def run(self) -> Moved:
        """Raises `TransferFailed`; then the old buffers are whole, and the new ones are worth nothing."""
        return _run(self._prepared, self._inputs, self._verify)


def stream(
    plan: Plan,
    slot: int,
    state: MutableMapping[str, torch.Tensor],
    carrier: Carrier,
    allocate: Allocate,
    verify: Verify = "moved",
) -> tuple[dict[str, torch.Tensor], Moved]:
    """Move a state in streaming mode: the new buffers, and what was done.

    `state` are the old buffers. They are taken out of the mapping one by one; nothing else may refer to them, or they
    are not freed. There is no way back: after `TransferFailed` the state is lost.
    """
    _check(plan, carrier)
    if carrier.one_sided:
        raise ValueError(
            f"{carrier.name} cannot stream: a slot does not know when its peers have read a buffer that it would free; "
            "use p2p"
        )
    old, new = Memory(plan.source, slot, state), Memory.empty(plan.target, slot)
    target: dict[str, torch.Tensor] = {}
    handed_on = plan.unchanged_buffers(slot)
    for name in handed_on:
        target[name] = state.pop(name)
        new.add(name, target[name])
    steps = Streaming(plan, old, new, handed_on, state, target, allocate)
    inputs = TransferInputs(plan, slot, old, new, steps)
    moved = _run(carrier.prepare(inputs), inputs, verify)
    return target, moved


def _run(prepared: PreparedTransfer, inputs: TransferInputs, verify: Verify) -> Moved:
    sent, received = Digests(verify != "off"), Digests(verify != "off")
    prepared(sent, received)
    inputs.steps.finish()
    return Moved(sent.values(), received.values(), inputs.plan.ingress.get(inputs.slot, 0))


def _check(plan: Plan, carrier: Carrier) -> None:
    if carrier.one_sided and plan.relayed_bytes:
        raise ValueError(f"{carrier.name} cannot carry a plan with relays: make it with Planner(relays=False)")


def _check_apart(old: Memory, new: Memory, handed_on: frozenset[str]) -> None:
    """A new buffer that shares memory with an old one would be overwritten while others read it."""
    ranges = sorted(
        (words.data_ptr(), words.data_ptr() + words.numel() * words.element_size(), is_new, name)
        for is_new, memory in ((False, old), (True, new))
        for name in memory
        if (words := memory.words(name)).numel() and not (is_new and name in handed_on)
    )
    reached = {False: (0, ""), True: (0, "")}
    for start, end, is_new, name in ranges:
        other_end, other = reached[not is_new]
        if start < other_end:
            raise ValueError(f"the buffers {other!r} and {name!r} share memory, and one of them is to be overwritten")
        reached[is_new] = max(reached[is_new], (end, name))
