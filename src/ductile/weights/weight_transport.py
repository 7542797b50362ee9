"""The seam between the processes that have new weights and those that sample or score with them.

    manifest = transport.publish(7, tensors)     where the weights are; the manifest travels as a message
    tensors = transport.receive(manifest)        where they are wanted: checked, and no weight there touched yet
    transport.withdraw(7)                        where they are: the memory is free again

`transport_of` has the transports by the name that a manifest carries. What each of them must do is in
`tests/weights/test_weight_transport.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from ductile.records import Manifest
from ductile.weights.shared_memory import SharedMemory, WeightsUnavailable


class WeightTransport(Protocol):
    """Published versions of one process, and a reader of other processes' versions."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Offer a version's tensors (full, any device, any dtype) until it is withdrawn.

        The iterable is consumed one tensor at a time, so it may gather each only when asked for it. When it raises,
        nothing changes. A version that is offered already is replaced; who has received it keeps it.
        """
        ...

    def offer(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Publish as `publish` does, for several readers, one after the other: a version that is offered already is
        offered again."""
        ...

    def receive(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """Return the version's tensors, by name, on the CPU, equal to what was published. They live on after the
        version is withdrawn, and writing to them changes no other reader's. Raises WeightsUnavailable."""
        ...

    def withdraw(self, version: int) -> None:
        """Free this version and all older ones. Readers keep what they have received."""
        ...

    def close(self) -> None:
        """Withdraw everything."""
        ...


TRANSPORTS: Mapping[str, type[WeightTransport]] = {"shared_memory": SharedMemory}
"""The transports, by `Manifest.carrier`."""


def transport_of(manifest: Manifest) -> WeightTransport:
    """Return a transport that reads the manifest's weights. Raises WeightsUnavailable when there is none."""
    if manifest.carrier not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise WeightsUnavailable(
            f"version {manifest.version} is offered by {manifest.carrier}, and only {known} can be read"
        )
    return TRANSPORTS[manifest.carrier]()
