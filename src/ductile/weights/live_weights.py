"""The tensors that an engine generates with, as those see them who read them meanwhile or stage the next version."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ductile.messages.updates import Digest, LiveDigest, TensorSpec, digest_text
from ductile.weights.digest import box_digest


@dataclass(frozen=True, eq=False)
class VersionTensors:
    """All tensors of a version."""

    version: int
    tensors: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    """Dtype that each was published in: an engine may hold it in a wider dtype, which loses nothing."""
    parts: dict[str, int] = field(default_factory=dict[str, int])
    """Digests of whole tensors, as far as they are known."""

    def digest(self) -> Digest:
        """Return the digest of all tensors, each of which is read unless its own is known."""
        for name, tensor in self.tensors.items():
            if name not in self.parts:
                self.parts[name] = box_digest(name, tensor.to(self.dtypes[name]), (0,) * tensor.dim())
        return digest_text(sum(self.parts.values()))

    def read(self, announced: Digest) -> LiveDigest:
        """Read the tensors. Where one is narrower than it was published there is no digest: what was rounded cannot be
        compared any more. announced: as `LiveDigest` has it."""
        if any(self.dtypes[name].itemsize > tensor.element_size() for name, tensor in self.tensors.items()):
            return LiveDigest(self.version, "", announced)
        digest = self.digest()
        return LiveDigest(
            self.version, digest, announced, {name: digest_text(part) for name, part in self.parts.items()}
        )

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name, str(self.dtypes[name]).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        )


class LiveWeights:
    """The version that is live, and the memory of the one before, which the next one is staged in."""

    def __init__(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """tensors: the engine's own."""
        self._lock = threading.Lock()
        self._current = VersionTensors(version, tensors, {name: tensor.dtype for name, tensor in tensors.items()})
        self._pinned: list[VersionTensors] = []
        self._spare: dict[str, Tensor] = {}

    @property
    def current(self) -> VersionTensors:
        return self._current

    @contextmanager
    def pinned(self) -> Iterator[VersionTensors]:
        """Hold the live version: its tensors keep their values until the end, also when another one becomes live."""
        with self._lock:
            held = self._current
            self._pinned.append(held)
        try:
            yield held
        finally:
            with self._lock:
                self._pinned.remove(held)

    def room(self, name: str) -> Tensor:
        """Return memory for the next version's tensor of this name, laid as the live one: used before, if any is
        free."""
        with self._lock:
            spare, like = self._spare.pop(name, None), self._current.tensors[name]
            if spare is not None and all(spare is not held.tensors[name] for held in self._pinned):
                return spare
        return torch.empty_like(like)

    def replace(self, new: VersionTensors) -> None:
        """Make `new` the live version; the memory of what it replaces is free for the next one."""
        with self._lock:
            old, self._current = self._current, new
            self._spare = {name: each for name, each in old.tensors.items() if each is not new.tensors[name]}

    def free(self) -> None:
        with self._lock:
            self._spare = {}
