"""Messages through a process group: gloo on CPUs, NCCL on GPUs; gloo on GPUs that several slots share.

1. A round's message to a peer is cut into segments: a large part is one by itself, small ones lie end to end in one.
   Both sides cut alike, knowing only the plan.
2. A segment that is one contiguous box leaves from where it lies, and arrives where it will stay. The others go through
   staging memory, one piece a direction for each of the two rounds in flight. gloo sends what lies on the CPU alone:
   from GPU to GPU all segments go through staging memory of the host.
3. All operations of a round are posted together, so no ring of slots waits for each other. The next round is posted
   before this one is waited for, unless it passes on what this one brings.
"""

import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ductile.core.layout.geometry.holdings import volume
from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.topology import MIB
from ductile.core.transfer.plan import Part, PeerMessage, Round
from ductile.fabric.carrier import PreparedTransfer, TransferFailed, TransferInputs
from ductile.fabric.digest import Digests
from ductile.fabric.memory import Memory, flat_bytes, num_bytes, pack, unpack

DIRECT_BYTES = MIB
"""Least part that is a segment of its own: gloo's throughput is near its best there, and staging is a copy."""
ALIGN = 8
"""Segments in staging begin at multiples of so many bytes, so that words of any size can be read there."""
ROUND_TAGS, SEGMENT_TAGS = 1 << 12, 1 << 16
"""Tags that tell rounds apart, and segments of a round. Two rounds are in flight; a round's message has at most as many
segments as a MiB has parts."""
POLL_S = 0.0002


@dataclass(frozen=True, slots=True)
class _Segment:
    """One operation on the wire: contiguous bytes, and the boxes that they are packed from or unpacked into."""

    peer: int
    number: int
    """Number of the segment among those of the same round with the same peer."""
    memory: torch.Tensor
    boxes: tuple[torch.Tensor, ...]
    """Boxes that the memory is packed from or unpacked into; empty where it is the box itself."""


@dataclass(frozen=True)
class _Posted:
    arriving: list[_Segment]
    works: list[tuple[int, dist.Work]]
    """Operations that torch has begun, each with its peer: (peer, work)."""


class PeerToPeer:
    """Carries through `group`, whose members are all slots of the plans that it gets."""

    name = "p2p"
    one_sided = False

    def __init__(
        self, group: dist.ProcessGroup, device: str, timeout_s: float, through_host: bool | None = None
    ) -> None:
        """`through_host`: segments go through memory of the host; None: where gloo carries what lies on a GPU."""
        self._group = group
        self._device = torch.device(device)
        self._through_host = _needs_host(group, self._device) if through_host is None else through_host
        self._wire = torch.device("cpu") if self._through_host else self._device
        """Device of the memory that is sent and received."""
        self._timeout_s = timeout_s
        self._staging: dict[tuple[bool, int], torch.Tensor] = {}
        """Staging memory by direction (True: leaving) and parity of the round."""

    def prepare(self, inputs: TransferInputs) -> PreparedTransfer:
        rounds = list(inputs.plan.rounds(inputs.slot))

        def run(sent: Digests, received: Digests) -> None:
            try:
                self._run(inputs, rounds, sent, received)
            except TransferFailed as error:
                # Frames hold works and views; while they live, sockets stay open and others do not hear of the failure.
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                self._staging.clear()

        return run

    def _run(self, inputs: TransferInputs, rounds: list[Round], sent: Digests, received: Digests) -> None:
        posted = self._post(inputs, rounds, 0, sent)
        inputs.steps.meanwhile()
        for index in range(len(rounds)):
            waits = index + 1 < len(rounds) and _passes_on(rounds[index + 1])
            ahead = None if waits else self._post(inputs, rounds, index + 1, sent)
            self._finish(posted, received)
            inputs.steps.after(index)
            posted = ahead or self._post(inputs, rounds, index + 1, sent)

    def _post(self, inputs: TransferInputs, rounds: list[Round], index: int, sent: Digests) -> _Posted:
        if index >= len(rounds):
            return _Posted([], [])
        inputs.steps.before(index)
        step = rounds[index]
        arriving = self._place(_cut(step.receives, inputs.new, inputs.new), (False, index % 2))
        leaving = self._place(_cut(step.sends, inputs.old, inputs.new), (True, index % 2))
        for segment in leaving:
            offset = 0
            for box in segment.boxes:
                pack(box, segment.memory[offset : offset + num_bytes(box)])
                offset += num_bytes(box)
            sent.update(segment.peer, segment.memory)
        return _Posted(arriving, self._start(step.number, arriving, leaving))

    def _place(self, cut: list[tuple[int, int, tuple[torch.Tensor, ...]]], key: tuple[bool, int]) -> list[_Segment]:
        """Give every segment its memory: where its only box lies, or a piece of staging."""
        direct = [self._direct(boxes) for _, _, boxes in cut]
        sizes = [
            sum(map(num_bytes, boxes)) if flat is None else 0 for flat, (_, _, boxes) in zip(direct, cut, strict=True)
        ]
        room = self._room(key, sum(-(-size // ALIGN) * ALIGN for size in sizes))
        segments: list[_Segment] = []
        used = 0
        for flat, size, (peer, number, boxes) in zip(direct, sizes, cut, strict=True):
            if flat is not None:
                segments.append(_Segment(peer, number, flat, ()))
            else:
                segments.append(_Segment(peer, number, room[used : used + size], boxes))
                used += -(-size // ALIGN) * ALIGN
        return segments

    def _direct(self, boxes: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the bytes of a segment's only box, where they can leave from or arrive."""
        is_there = len(boxes) == 1 and not self._through_host and boxes[0].device.type == self._wire.type
        return flat_bytes(boxes[0]) if is_there else None

    def _room(self, key: tuple[bool, int], size: int) -> torch.Tensor:
        if key not in self._staging or len(self._staging[key]) < size:
            pinned = self._wire != self._device
            self._staging[key] = torch.empty(size, dtype=torch.uint8, device=self._wire, pin_memory=pinned)
        return self._staging[key]

    def _start(self, number: int, arriving: list[_Segment], leaving: list[_Segment]) -> list[tuple[int, dist.Work]]:
        operations = [*((dist.irecv, segment) for segment in arriving), *((dist.isend, segment) for segment in leaving)]
        if self._wire.type == "cuda":  # one call to NCCL, which pairs operations by their order
            batch = [
                dist.P2POp(operation, segment.memory, segment.peer, self._group) for operation, segment in operations
            ]
            return [(batch[0].peer, work) for work in dist.batch_isend_irecv(batch)] if batch else []
        works: list[tuple[int, dist.Work]] = []
        for operation, segment in operations:
            tag = number % ROUND_TAGS * SEGMENT_TAGS + segment.number  # gloo pairs operations by their tags
            try:
                work = operation(segment.memory, segment.peer, group=self._group, tag=tag)
            except RuntimeError as error:
                raise TransferFailed(
                    f"slot {segment.peer} cannot be reached: {_sentence(error)}", segment.peer
                ) from None
            assert work is not None, "this slot is in the group"
            works.append((segment.peer, work))
        return works

    def _finish(self, posted: _Posted, received: Digests) -> None:
        for peer, work in posted.works:
            self._wait(peer, work)
        for segment in posted.arriving:
            received.update(segment.peer, segment.memory)
            offset = 0
            for box in segment.boxes:
                unpack(segment.memory[offset : offset + num_bytes(box)], box)
                offset += num_bytes(box)
        posted.works.clear()  # they hold what was sent, which may be freed now

    def _wait(self, peer: int, work: dist.Work) -> None:
        start = time.monotonic()
        try:
            if self._wire.type == "cuda":  # NCCL's wait returns at once; what the stream does needs a deadline of ours
                while not work.is_completed():
                    if time.monotonic() - start > self._timeout_s:
                        raise RuntimeError("timed out")
                    time.sleep(POLL_S)
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            if time.monotonic() - start >= 0.95 * self._timeout_s:
                cause = f"nothing came from or went to slot {peer} for {self._timeout_s:g} s"
            else:
                cause = f"slot {peer} is gone: {_sentence(error)}"
            raise TransferFailed(cause, peer) from None


def _needs_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    there = device.type == "cuda" and any(kind.type == "cuda" for kind in group._device_types)
    return there and group._get_backend(device).name() == "gloo"


def _cut(messages: Sequence[PeerMessage], old: Memory, new: Memory) -> list[tuple[int, int, tuple[torch.Tensor, ...]]]:
    """(peer, number, boxes) of every segment. Relayed parts come from `new`."""
    return [
        (message.peer, number, tuple((new if part.relayed else old).box(part.name, part.box) for part in parts))
        for message in messages
        for number, parts in enumerate(_segments(message.parts, new.layout))
    ]


def _segments(parts: Sequence[Part], layout: Layout) -> Iterator[list[Part]]:
    small: list[Part] = []
    for part in parts:
        if volume(part.box) * layout[part.name].item_bytes >= DIRECT_BYTES:
            if small:
                yield small
            small = []
            yield [part]
        else:
            small.append(part)
    if small:
        yield small


def _passes_on(step: Round) -> bool:
    return any(part.relayed for message in step.sends for part in message.parts)


def _sentence(error: BaseException) -> str:
    """The first line of an error of torch's, without the C++ frames behind it."""
    return str(error).partition("\n")[0].strip()
