"""A layout: the holdings of every tensor of a training state. What a plan starts from, and what it ends at."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod

from ductile.core.layout.geometry.holdings import Holdings, Shape

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element, by dtype. Names are torch's without the prefix. Only the size matters: tensors move as bytes,
never as values."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One logical tensor, under the name that it has in every layout."""

    name: str
    dtype: str
    holdings: Holdings
    buffers: tuple[str, ...] = ()
    """Names of the local buffers that the tensor's rows lie in; empty: one buffer that is called like the tensor."""

    @property
    def shape(self) -> Shape:
        return self.holdings.shape

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes

    def buffer(self, index: int) -> str:
        return self.buffers[index] if self.buffers else self.name

    def kind(self, prefix: str, dtype: str) -> "Tensor":
        """Return another tensor that lies like this one: `parameter.kind("exp_avg/", "float32")`."""
        return Tensor(prefix + self.name, dtype, self.holdings, tuple(prefix + buffer for buffer in self.buffers))


class Layout:
    """Tensors by name, in a fixed order, and the slots that take part, those without any data included."""

    def __init__(self, tensors: Iterable[Tensor], slots: Iterable[int]) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.slots = tuple(sorted(slots))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @cached_property
    def key(self) -> bytes:
        """Digest of names, dtypes, buffers and every row of every slot: equal layouts have equal keys."""
        digest = blake2b(repr(self.slots).encode(), digest_size=16)
        for tensor in self:
            digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.buffers}\0".encode())
            digest.update(tensor.holdings.key)
        return digest.digest()

    def buffer_sizes(self, slot: int) -> dict[str, tuple[str, int]]:
        """The buffers that `slot` has to allocate: name -> (dtype, elements, padding included)."""
        found: dict[str, tuple[str, int]] = {}
        for tensor in self:
            for holder, buffer, size in tensor.holdings.sizes:
                if holder == slot:
                    found[tensor.buffer(buffer)] = (tensor.dtype, size)
        return found

    def kind(self, prefix: str, dtype: str) -> "Layout":
        """Return another state with the same geometry."""
        return Layout([tensor.kind(prefix, dtype) for tensor in self], self.slots)

    def __or__(self, other: "Layout") -> "Layout":
        """Both layouts together. Their tensors must have different names."""
        both = self.tensors.keys() & other.tensors.keys()
        if both:
            raise ValueError(f"{min(both)!r} is in both layouts")
        return Layout([*self, *other], set(self.slots) | set(other.slots))
