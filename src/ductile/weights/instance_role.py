"""Roles of generators and scorers: weights that come by `Receive` and are offered to instances that join."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ductile.messages.workers import Done, EndOffer, OfferWeights, Published, Receive
from ductile.records import Manifest
from ductile.roles import NotTaken, Refused, RoleAssignment
from ductile.weights.shared_memory import SharedMemory
from ductile.weights.weight_transport import WeightTransport, transport_of


class InstanceRole(ABC):
    """The part of a `ductile.roles.SlotRole` that follows published weights. One that joins has none before its first
    `Receive`."""

    does: str
    """Verb for a slot with the role, such as "generates"."""
    peers: str
    """Noun for those that hold the role, such as "generators"."""

    def __init__(self, assignment: RoleAssignment) -> None:
        self._slot = assignment.slot
        self._has_weights = not assignment.joining
        self._offered: WeightTransport = SharedMemory()

    @abstractmethod
    def live_weights(self) -> tuple[int, Iterable[tuple[str, Tensor]]]:
        """Return the version that is live, and its weights by the model's names."""

    @abstractmethod
    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make a version live. What training does not change may be missing: it stays as it is. A version that does not
        fit raises `ValueError` and changes nothing."""

    def handle(self, command: Any) -> Any:
        match command:
            case Receive(manifest=manifest):
                if not manifest.is_whole:
                    self.needs_weights(command)
                self.load_weights(transport_of(manifest).receive(manifest), manifest.version)
                self._has_weights = True
            case OfferWeights():
                self.needs_weights(command)
                return Published(self.offer())
            case EndOffer():
                self._offered.close()
            case _:
                raise Refused(f"slot {self._slot} {self.does}; it cannot execute {type(command).__name__}")
        return Done()

    def offer(self) -> Manifest | None:
        """Offer the live weights, whole. None on a slot that only helps another one to do so."""
        return self._offered.offer(*self.live_weights())

    def needs_weights(self, command: object) -> None:
        if not self._has_weights:
            raise NotTaken(
                f"slot {self._slot} joins the {self.peers} and has no weights yet: it cannot execute "
                f"{type(command).__name__} before the first Receive"
            )

    def close(self) -> None:
        self._offered.close()
