"""Publishing a version to the slots of this host: every rank writes its own boxes, and nobody gathers a tensor.

    first rank    makes the segment at its full size, and says where it is       one broadcast
    all ranks     write their boxes into it, and sum them up as they do          one sum
    first rank    seals it

Every rank is in both collectives, whatever has failed on it, and all come to the same ruling. Where a rank cannot open
the segment, as on another host, the tensors are gathered for the first rank instead.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ductile.core.layout.geometry.holdings import Box
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.transfer.joint_publishing import PartOutcome, PublishingRuling, ruling
from ductile.error_text import error_text
from ductile.fabric.fingerprint import MODULUS
from ductile.fabric.segment import Segment, SegmentUnavailable, mapped_for_writing
from ductile.messages.updates import Digest, digest_text
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.parts import SlotParts
from ductile.records import Manifest, TensorEntry
from ductile.trainer.own_weights import OwnWeights
from ductile.trainer.trainer import Trainer
from ductile.weights.buckets import OwnedTensor
from ductile.weights.shared_memory import SharedMemory, laid_out

GATHER = "gather"
"""The word of the first rank in the place of its segment where a rank is known not to be able to open it."""
_Row = tuple[OwnedTensor, TensorEntry]
"""A tensor with this rank's boxes, and its place in the segment."""
T = TypeVar("T")


class NotPublished(Exception):
    """The version is not published. All slots are in step, and the trainer is as it was. The text is a sentence."""


@dataclass(slots=True)
class _Part:
    """This rank's part of a version."""

    digests: list[int]
    """Digests of its boxes of each tensor."""
    left_out: int | None
    """Digest of its boxes of tensors that are left out; None where none are."""
    num_bytes: int = 0
    error: Exception | None = None

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Take a step that may fail here alone: nobody waits for this rank in it."""
        try:
            return step()
        except Exception as error:
            self.error = error
            return None

    def write(self, place: str, num_bytes: int, weights: OwnWeights, table: Sequence[_Row]) -> None:
        """Write this rank's boxes into the segment at `place`, which has so many bytes."""
        location, _, name = place.rpartition(" ")
        spans = [_span(entry, tensor.dtype.itemsize, box) for tensor, entry in table for box in tensor.boxes]
        with mapped_for_writing(location, name, num_bytes, spans) as content:
            for number, (tensor, entry) in enumerate(table):
                whole = content[entry.offset_bytes :][: entry.num_bytes].view(tensor.dtype).view(tensor.shape)
                for start, stop in tensor.boxes:
                    target = whole[tuple(map(slice, start, stop))]
                    self.digests[number] += weights.copy(tensor.name, (start, stop), target)
                    self.num_bytes += target.nbytes

    @property
    def outcome(self) -> PartOutcome:
        if self.error is None:
            return PartOutcome.WRITTEN
        return PartOutcome.OUT_OF_REACH if isinstance(self.error, SegmentUnavailable) else PartOutcome.FAILED


class JointPublisher:
    """The versions that a train slot publishes, where it is its layout's first one, or helps to publish."""

    def __init__(self) -> None:
        self._whole, self._trained = SharedMemory(), SharedMemory()
        """Whole versions, and what is trained of versions alone: one that is published anew as a whole leaves those who
        read the other what they read."""
        self._frozen: tuple[SlotParts, int] | None = None
        """Digest of this slot's part of what is not trained, and the parts that it was taken of."""
        self._too_far: ParallelLayout | None = None
        """Layout in which a slot cannot open this one's memory."""

    def publish(
        self, version: int, trainer: Trainer, state: Mapping[str, Tensor], with_frozen: bool = True
    ) -> Manifest | None:
        """Publish the weights as they are; collective. The first slot gets the manifest. Raises NotPublished, on all
        slots or on the first one alone.

        state: this slot's part of the trainer's (`trainer.state`). with_frozen: also tensors that are not trained;
        without them the version is for those that have these already.
        """
        context, weights = trainer.context, OwnWeights.of(trainer, state)
        with_frozen = with_frozen or trainer.spec.lora is None
        tensors, memory = weights.tensors(with_frozen), self._whole if with_frozen else self._trained
        entries, num_bytes = laid_out(tensors)
        table = list(zip(tensors, entries, strict=True))
        part, segment = _Part([0] * len(table), None if with_frozen else self._digest_of_frozen(weights)), None
        gathers = self._too_far == context.layout
        with ExitStack() as unpublished:
            if context.is_first and not gathers:
                segment = part.attempt(lambda: memory.begin(version, num_bytes))
            if segment is not None:
                unpublished.callback(segment.close)
            place = context.said_by_first(GATHER if gathers else _place(segment))
            if place == GATHER:
                return self._gather(version, trainer, memory, part)
            if place:
                part.attempt(lambda: part.write(place, num_bytes, weights, table))
            total_bytes = sum(entry.num_bytes for entry in entries)
            digests, left_out, ruled = _exchanged(part, total_bytes, context, trainer.device)
            if ruled.next == "seal":
                entries = [
                    replace(entry, digest=digest_text(each)) for entry, each in zip(entries, digests, strict=True)
                ]
                manifest = self._sealed(version, memory, segment, entries, left_out)
                unpublished.pop_all()
                return manifest
        if ruled.next == "gather":
            if context.is_first:
                self._too_far = context.layout
                print(f"the trainer's weights are gathered where they are published: {ruled.reason}", file=sys.stderr)
            return self._gather(version, trainer, memory, part)
        why = error_text(part.error) if part.error is not None else ruled.reason
        raise NotPublished(f"version {version} is not published: {why}")

    def withdraw(self, version: int) -> None:
        """Free this version and all older ones. Readers keep what they have received."""
        self._whole.withdraw(version)
        self._trained.withdraw(version)

    def close(self) -> None:
        self._whole.close()
        self._trained.close()

    def _digest_of_frozen(self, weights: OwnWeights) -> int:
        if self._frozen is None or self._frozen[0] is not weights.parts:
            self._frozen = weights.parts, weights.digest_of_frozen()
        return self._frozen[1]

    @staticmethod
    def _sealed(
        version: int, memory: SharedMemory, segment: Segment | None, entries: Sequence[TensorEntry], left_out: Digest
    ) -> Manifest | None:
        try:
            return None if segment is None else memory.finish(version, segment, entries, left_out)
        except Exception as error:
            raise NotPublished(f"version {version} is not published: {error_text(error)}") from error

    def _gather(self, version: int, trainer: Trainer, memory: SharedMemory, part: _Part) -> Manifest | None:
        """Have the first slot copy whole tensors, which all slots gather one by one. Where that fails half way, it
        still gathers the rest: the others are spared its failure."""
        context, left_out = trainer.context, ""
        if part.left_out is not None:
            said = torch.tensor(part.left_out % MODULUS, device=trainer.device)
            left_out = digest_text(int(context.sum(said)))
        tensors = _CommonTensors(trainer.publish_weights(with_frozen=not left_out))
        try:
            return memory.publish(version, tensors, left_out) if context.is_first else None
        except Exception as error:
            if tensors.has_failed:
                raise
            raise NotPublished(f"version {version} is not published: {error_text(error)}") from error
        finally:
            for _ in tensors:
                pass


class _CommonTensors:
    """Tensors that all slots gather in step, one by one. What fails in that is no slot's own failure."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self.has_failed = False

    def __iter__(self) -> "_CommonTensors":
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._tensors)
        except StopIteration:
            raise
        except BaseException:
            self.has_failed = True
            raise


def _span(entry: TensorEntry, item_bytes: int, box: Box) -> tuple[int, int]:
    """Return where the first byte of a box is in the segment, and where its last one ends."""
    first, last = 0, 0
    for size, start, stop in zip(entry.shape, *box, strict=True):
        first, last = first * size + start, last * size + stop - 1
    return entry.offset_bytes + first * item_bytes, entry.offset_bytes + (last + 1) * item_bytes


def _place(segment: Segment | None) -> str:
    return "" if segment is None else f"{segment.location} {segment.name}"


def _exchanged(
    part: _Part, tensor_bytes: int, context: ParallelContext, device: torch.device
) -> tuple[list[int], Digest, PublishingRuling]:
    """Return the digest of each tensor, from all slots' parts, that of all that are left out, "" where none are, and
    what all slots do next; collective. tensor_bytes: those of all tensors, which is what all slots are to have
    written."""
    slots, num_tensors = context.layout.slots, len(part.digests)
    outcomes = [part.outcome if slot == context.slot else PartOutcome.WRITTEN for slot in slots]
    # Of 52 bits: the sum over 2,000 slots is none of 64.
    digests = [digest % MODULUS for digest in (*part.digests, part.left_out or 0)]
    said = torch.tensor([*digests, *outcomes, part.num_bytes], dtype=torch.int64, device=device)
    *totals, num_bytes = context.sum(said).tolist()
    of_slots = {slot: PartOutcome(value) for slot, value in zip(slots, totals[num_tensors + 1 :], strict=True)}
    left_out = "" if part.left_out is None else digest_text(totals[num_tensors])
    return totals[:num_tensors], left_out, ruling(of_slots, tensor_bytes - num_bytes)
