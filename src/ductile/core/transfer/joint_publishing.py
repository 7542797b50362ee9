"""The ruling on a version that all slots of a trainer write into one memory, each its own boxes.

Every slot has the same outcomes and so comes to the same ruling: the version is published, or the first slot gathers
it, or nobody publishes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class PartOutcome(IntEnum):
    """The outcome of a slot's part of a version, as it says to all."""

    WRITTEN = 0
    OUT_OF_REACH = 1
    """The first slot's memory cannot be opened here: this slot is on another host, or in another container."""
    FAILED = 2


@dataclass(frozen=True, slots=True)
class PublishingRuling:
    next: Literal["seal", "gather", "fail"]
    """The first slot seals what all have written; all gather the tensors for the first slot; nobody publishes."""
    reason: str = ""


def ruling(outcomes: Mapping[int, PartOutcome], missing_bytes: int) -> PublishingRuling:
    """Return what all slots do next. missing_bytes: bytes of the version that no slot says to have written."""
    if failed := _slots(outcomes, PartOutcome.FAILED):
        return PublishingRuling("fail", f"{failed} could not write a part of the weights")
    if far := _slots(outcomes, PartOutcome.OUT_OF_REACH):
        return PublishingRuling("gather", f"{far} cannot open the memory of the first slot")
    if missing_bytes:
        return PublishingRuling("fail", f"the slots' parts and the version differ by {missing_bytes} bytes")
    return PublishingRuling("seal")


def _slots(outcomes: Mapping[int, PartOutcome], outcome: PartOutcome) -> str:
    found = [str(slot) for slot, said in outcomes.items() if said == outcome]
    return f"slot{'s' * (len(found) > 1)} {', '.join(found)}" if found else ""
