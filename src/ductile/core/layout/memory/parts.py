"""What a slot's memory is taken by: `MemoryParts`, `SlotUse`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes that are live at one moment, by what they are for."""

    parameters: int = 0
    """Shards that the optimizer updates."""
    gradients: int = 0
    """Gradients that have been accumulated, and those that a backward pass has just made."""
    optimizer: int = 0
    gathered: int = 0
    """Whole parameters of a few layers, as FSDP2 gathers them to compute with."""
    activations: int = 0
    """What layers keep for their backward pass, and what they work with."""
    logits: int = 0
    """Scores of the vocabulary, a chunk of tokens at a time."""
    communication: int = 0
    """Buffers of collectives, and hidden states on their way to another stage."""
    generator: int = 0
    """Weights and KV cache of a generator that shares the slot."""
    scorer: int = 0
    """Weights of a scorer that shares the slot, those of the reference among them."""
    context: int = 0
    """What the device's driver and libraries take."""

    @property
    def total(self) -> int:
        return sum(self.named().values())

    def named(self) -> dict[str, int]:
        """Bytes by the part's name, the parts of 0 bytes too."""
        return asdict(self)

    def largest_first(self) -> list[tuple[str, int]]:
        """Names and bytes of the parts that are there."""
        return sorted(((name, size) for name, size in self.named().items() if size), key=lambda part: -part[1])

    def in_words(self) -> str:
        """ "parameters 4, optimizer 8, activations 2", in GiB; parts of less than a fiftieth of the total are left
        out."""
        there = [(name, size) for name, size in self.named().items() if size * 50 > self.total]
        return ", ".join(f"{name} {gib(size)}" for name, size in there)


@dataclass(frozen=True, slots=True)
class SlotUse:
    """The most that a slot's memory is taken by during a step."""

    device: MemoryParts
    """Parts at the moment when the device has least room."""
    host: MemoryParts
    """Parts that wait in host memory."""
    moment: str
    """Moment when the device has least room: "backward pass of layer 3"."""
    stage: int = 0
    """Stage of pp whose slots need most."""


def sums_of(*several: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of bytes by part."""
    total: dict[str, int] = {}
    for each in several:
        for name, size in each.items():
            total[name] = total.get(name, 0) + size
    return total


def gib(number_bytes: int) -> str:
    """Bytes as a number of GiB, with three digits: "14", "0.35"."""
    return f"{number_bytes / GIB:.3g}"
