"""Parties to a weight update (`fleet.updates.weight_update`): who sends it, and who is sent it; and its result."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from ductile.core.instances.instances import InstanceId
from ductile.core.instances.update_outcomes import InstanceOutcome, Shortfall
from ductile.messages.updates import (
    Digest,
    EndUpdate,
    Offer,
    PauseServer,
    PrepareUpdate,
    ResumeServer,
    SendReport,
    ServerState,
    UpdateProgress,
    UpdateProof,
    WeightCarrier,
    WeightUpdate,
    total_of,
)
from ductile.roles import Failure, Late, NotTaken, Refused, SlotLost


class Senders(Protocol):
    """Holders of the version: the trainer's ranks (`ductile.fleet.trainer.remote_trainer`), or a server that gives its
    weights to one that joins (`ductile.fleet.updates.donor`)."""

    @property
    def carrier(self) -> WeightCarrier | None:
        """The only way by which they send; None: whichever suits a receiver."""
        ...

    def keeping(self, version: int) -> AbstractContextManager[None]:
        """Keep the weights this version meanwhile. Raises Refused when they have gone on from it."""
        ...

    async def begin_update(self, update: WeightUpdate) -> Sequence[Offer]:
        """Return what each of them will send. Raises Refused when they cannot; what else is raised ends the update."""
        ...

    async def sent(self, update_id: str) -> Sequence[SendReport]:
        """Wait until all are through, also with failures."""
        ...

    async def leave_out(self, update_id: str, instance: str, reason: str) -> None:
        """Do not wait for a receiver that is out. Raises a Failure."""
        ...

    async def finish_update(self, update_id: str, aborted: bool) -> None:
        """Go on. aborted: nobody has the version. Raises Refused where they themselves were at fault for that."""
        ...


class ServerControl(Protocol):
    """Control routes of one server (`ductile.fleet.servers.server_port`). Each raises SlotLost, Late or Refused."""

    async def state(self) -> ServerState: ...

    async def prepare(self, message: PrepareUpdate, /) -> UpdateProgress: ...

    async def verify(self, message: EndUpdate, /) -> UpdateProgress: ...

    async def commit(self, message: EndUpdate, /) -> UpdateProgress: ...

    async def abort(self, message: EndUpdate, /) -> UpdateProgress: ...

    async def pause(self, message: PauseServer, /) -> object: ...

    async def resume(self, message: ResumeServer, /) -> object: ...


Control = TypeVar("Control", bound=ServerControl, covariant=True)


@dataclass(frozen=True, slots=True)
class ServerHandle(Generic[Control]):
    """A server, as the run reaches it: to give it a version, or to have it give its own."""

    id: InstanceId
    control: Control
    url: str = ""
    """Root of its routes, without /v1."""
    token: str = field(default="", repr=False)
    incarnation: str = ""
    """Process that it was last known to be; "": not known yet."""


AnyServer = ServerHandle[ServerControl]


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Limits and choices by which versions go to servers; the keys are those of [inference]."""

    bucket_bytes: int = 4 << 20
    num_slots: int = 4
    bucket_timeout_s: float = 10.0
    total_timeout_s: float = 300.0
    max_attempts: int = 3
    verify: UpdateProof = "sum"
    pause_mode: Literal["abort", "keep", "drain"] = "keep"
    pause_lease_s: float = 30.0
    probe_timeout_s: float = 2.0
    join_carrier: WeightCarrier | None = None
    """The only carrier for servers that join between two versions: who does not send so is not asked. None: as for a
    version, and whoever can give it."""
    folder: str = ""
    """Folder that ranks and servers see, for carrier "disk"."""
    rendezvous: str = ""
    """host:port near which servers find the ranks, for carrier "point_to_point"."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Result of a version at the servers."""

    version: int
    digest: Digest
    """The version's; "" where nobody has committed it."""
    outcomes: tuple[InstanceOutcome, ...]
    attempts: int
    seconds: float
    pause_s: float
    """The longest that a server answered nobody."""
    num_bytes: int
    carriers: Mapping[InstanceId, WeightCarrier]
    tensors: Mapping[str, Digest] = field(default_factory=dict[str, Digest])
    """Parts of the digest, by the tensors' names; empty where nobody knows them."""
    num_bytes_unchanged: int = 0
    """Bytes that were not sent, as all had them from the version before."""
    share_equal: float = 0.0
    """Share of the version's bytes that are those of the version before."""
    unsent: str = ""
    """Reason for which the senders could not send it in the last attempt, which says nothing of the servers."""

    @property
    def committed(self) -> tuple[InstanceId, ...]:
        return tuple(InstanceId(each.instance) for each in self.outcomes if each.outcome == "committed")


def shortfall(error: Failure | str) -> Shortfall:
    """Return what a failed call says of the server that was asked."""
    match error:
        case SlotLost():
            return Shortfall("gone", str(error))
        case Late():
            return Shortfall("silent", str(error))
        case Refused() if not isinstance(error, NotTaken):
            return Shortfall("refused", str(error))
        case _:
            return Shortfall("undone", str(error))


def summed_by_name(parts: Iterable[Mapping[str, Digest]]) -> dict[str, Digest]:
    """Return each tensor's digest; {} where one sender does not know its parts."""
    known, by_name = list(parts), dict[str, list[Digest]]()
    for part in known if all(known) else ():
        for name, digest in part.items():
            by_name.setdefault(name, []).append(digest)
    return {name: total_of(digests) for name, digests in by_name.items()}
