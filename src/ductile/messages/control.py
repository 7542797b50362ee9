"""Messages to a live run from outside (`ductile.orchestrator.control.control`,
`ductile.orchestrator.control.endpoint`), and what becomes of it. One line of JSON each way."""

from typing import Literal

import msgspec

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.events.resizes import ResizeRolledBack, TrainerResized

VERSION = 7


class Words(msgspec.Struct, forbid_unknown_fields=True):
    pass


class ResizeRequest(Words, tag="resize"):
    """Have the trainer go on with other slots, in another layout, or both, in the order of slots that moves least of
    its state. What it means is said in `ductile.core.layout.choice.requested_layout`."""

    train: tuple[int, ...] | None = None
    """Slots; None: as many as the layout has, preferring those that train."""
    layout: str = ""
    """Sizes of all axes, such as "pp=2,dp_shard=2,tp=2"; "": as the run's layouts have it for so many slots."""
    sizes: dict[str, int] = {}
    """Sizes of axes as `ParallelDims` names them, such as {"dp_replicate": 2}; the other axes stay as they are, and
    `dp_shard` is what the slots leave."""


class Status(Words, tag="status"):
    pass


class FleetRequest(Words, tag="fleet"):
    """Say which servers the run has, have one come, or have one leave."""

    action: Literal["list", "join", "drain", "evict"] = "list"
    server: str = ""
    """join: the server's address. drain, evict: its id, or its address."""
    timeout_s: float = 600.0
    """join: seconds until the server must generate."""


class DrainRequest(Words, tag="drain"):
    """Empty slots, and end them; or have slots come back that are gone."""

    slots: tuple[int, ...] = ()
    node: int | None = None
    """Node whose slots are meant, besides `slots`."""
    deadline_s: float = 120.0
    """Seconds until they are to be gone."""
    back: bool = False
    """They are to come back."""


class ControlRequest(Words):
    version: int
    token: str
    ask: ResizeRequest | Status | FleetRequest | DrainRequest


class Resized(Words, tag="resized"):
    """Outcome of a resize."""

    outcome: Literal["resized", "rolled_back", "unchanged"]
    sentence: str
    epoch: int
    before: ParallelLayout
    after: ParallelLayout
    """Layout that was asked for; after a rollback the trainer is on `before`."""
    reason: str = ""
    """Reason for which it was rolled back; "" when it was not."""
    not_released: tuple[str, ...] = ()
    """Parts of a change of roles that were to be done before the freeze and were not, a sentence for each."""
    pause_s: float = 0.0
    """Seconds for which the resize kept the trainer still. What it waits for before that does not count."""
    took_s: float = 0.0
    """Seconds from the request to the end of the resize, the start of slots included."""
    seconds: dict[str, float] = {}
    """Seconds that the orchestrator waited, by step of the transaction."""
    slot_seconds: dict[str, float] = {}
    """Seconds of the slots' work, by phase: the longest of all slots."""
    beside: tuple[str, ...] = ()
    """Phases of `slot_seconds` in which the trainer still trained."""
    num_bytes: int = 0
    carrier: str = ""


class Drained(Words, tag="drained"):
    """Slots are gone, or are back."""

    slots: tuple[int, ...]
    seconds: float
    """Seconds from the notice until they held nothing; of slots that are back, from the request until they were."""
    sentence: str


class SlotStatus(Words):
    slot: int
    pid: int
    device: str
    roles: tuple[str, ...]
    doing: str
    """An activity of the ledger: train, generate, score, publish, switch, idle. Of a lost slot "restarting", or "given
    back" when it is not started again any more; "gone" when it was emptied before it left, and "lost" when it never was
    to be started again."""
    seconds: dict[str, float]
    """Seconds by activity since the slot had its first role; together they are all the time since then."""
    idle: dict[str, float] = {}
    """Idle seconds of `seconds`, by cause."""
    node: int = 0
    """Number of the slot's node."""


class FleetServer(Words):
    """A server of the run's fleet."""

    id: str
    url: str
    status: str
    """A state of `ductile.core.instances.health`: joining, warming, ready, suspect, draining, stale, dead or gone; or
    absent, for an address that is looked at and has no server."""
    reason: str
    """Reason for which it is in that state, a sentence."""
    since_s: float
    """Seconds for which it has been."""
    version: int | None = None
    """Version that it has committed; None before the first."""
    num_unfinished: int = 0
    """Requests of the run that it has."""


class FleetStatus(Words, tag="fleet"):
    epoch: int
    """Membership epoch of the fleet."""
    version: int | None
    """Newest version that a server has committed."""
    servers: tuple[FleetServer, ...]
    under_way: str = ""
    """The weight update or the join that is under way; "" when there is none."""
    sentence: str = ""
    """Outcome of what was asked for, for a person."""


class RunStatus(Words, tag="status"):
    command: str
    pid: int
    step: int
    max_steps: int
    running_s: float
    epoch: int
    trainer: ParallelLayout
    changing: str
    """The step of a resize that is under way, and to where; "" when there is none."""
    slots: tuple[SlotStatus, ...]
    changes: tuple[TrainerResized | ResizeRolledBack, ...]
    """The latest resizes, oldest first."""
    lost: dict[int, str]
    """Slots that died, with the sentence that says how."""
    fleet: FleetStatus | None = None
    """The run's servers; None where it has none by its config."""
    went_back: tuple[str, ...] = ()
    """Sentences of the latest times that the trainer lost slots and went back to a checkpoint."""
    disagreed: tuple[str, ...] = ()
    """Sentences of the latest canaries of which a generator did not say what the trainer says."""


class Response(Words):
    version: int
    result: Resized | RunStatus | FleetStatus | Drained | None = None
    error: str = ""
    """Reason for which there is no result, as a sentence; "" when there is one."""
    unfit: bool = False
    """True when what was asked for cannot be, and nothing was tried."""


class RunFailed(Exception):
    """The run did not do what was asked for. The text is a sentence."""


class Unfit(Exception):
    """An impossible request, or no live run to ask: nothing was tried. The text is a sentence."""
