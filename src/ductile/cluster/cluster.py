"""Who is there: the slots of a run as everything above sees them, wherever their processes are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ductile.cluster.notices import Notices
from ductile.config.schema.cluster import ClusterConfig
from ductile.core.instances.node_slots import SlotsPerNode
from ductile.core.layout.geometry.topology import Topology
from ductile.core.layout.model.peak import Arithmetic
from ductile.core.scheduling.node_demand import NodeDemand
from ductile.messages.message import RoleName
from ductile.messages.workers import Surveyed
from ductile.observe import RunEvent
from ductile.transport.mailbox import Mailbox


class StartFailed(Exception):
    """A process could not be started. The text says which, why, and which log to read."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Things that a run asks of its cluster."""

    slots: Sequence[int]
    """Those of the placement."""
    config: ClusterConfig
    folder: Path
    """The run's: it has the logs, and says where the orchestrator is."""
    roles: Mapping[RoleName, str]
    """Class of each role: "package.module:Class"."""
    per_node: SlotsPerNode
    tell: Callable[[RunEvent], None] = lambda event: None
    """Hears of nodes that come and go."""


class SlotProcess(Protocol):
    @property
    def pid(self) -> int:
        """Process id on the slot's own node."""
        ...


class Cluster(Protocol):
    """The slots of one run, from start to stop.

    The death of a slot is reported once: by the event `Died` of `mailbox`, which has the sentence in `lost` from then
    on, and by `death` where the run depends on the slot. The double for tests is `tests/cluster/memory_cluster.py`.
    """

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots that have ever said Hello, also those that are lost."""
        ...

    @property
    def devices(self) -> Mapping[int, str]:
        """Device of each slot, on its own node: "cpu" or "cuda:0"."""
        ...

    @property
    def processes(self) -> Mapping[int, SlotProcess]:
        """Process of each slot, the latest where there was more than one."""
        ...

    @property
    def mailbox(self) -> Mailbox:
        """Every conversation with the slots, by slot number."""
        ...

    @property
    def on_notice(self) -> Notices:
        """Told, in the event loop, which slots will be gone by when: SIGTERM has come to a slot's process."""
        ...

    @property
    def rendezvous(self) -> str:
        """host:port of the run's store, as every slot reaches it."""
        ...

    async def start(self) -> None:
        """Returns when every slot has said Hello. Raises StartFailed or CapNotPermitted, with nothing left running."""
        ...

    async def add(self, slots: Sequence[int]) -> list[int]:
        """Start those of the slots that do not run; returns them when all have said Hello, and how fast they are where
        the others have.

        Raises StartFailed, with none of the new ones running. A slot that was lost starts anew, with nothing of its
        earlier life.
        """
        ...

    async def survey(self, measure: Arithmetic | None = None) -> dict[int, Surveyed]:
        """`ductile.cluster.survey` of all slots. What it measures is also measured of slots that `add` starts
        later."""
        ...

    def ends_without(self, needed: Callable[[int], bool]) -> None:
        """Have the run end with a slot that is `needed` at the moment of its loss, and with no other. Until this is
        called, every slot is needed."""
        ...

    @property
    def has_failed(self) -> bool:
        """Return whether the run is ending: `death` returns, or raises."""
        ...

    async def death(self) -> str:
        """Wait until a process that the run needs is lost; returns the sentence. Raises the error of a mistake of the
        orchestrator's own, which ends the run, too."""
        ...

    def node_of(self, slot: int) -> int:
        """Number of the slot's node; 0 is the orchestrator's own machine where no agent has the slot."""
        ...

    @property
    def topology(self) -> Topology:
        """The nodes that the slots are on, and those that may join; known when the run's first ones are there."""
        ...

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the run has now."""
        ...

    def want(self, demand: NodeDemand) -> None:
        """Ask who manages the machines for nodes, where somebody does. Returns at once."""
        ...

    async def leave(self, slots: Sequence[int]) -> None:
        """End the processes of slots that hold nothing. They are gone then (`Mailbox.gone`), and not lost."""
        ...

    def startable(self, slots: Iterable[int]) -> frozenset[int]:
        """Return those of the slots whose processes can be started anew: their nodes are there, and they were not told
        to leave. None where the run has lost a process that all of it needs."""
        ...

    async def begin_again(self, slots: Sequence[int]) -> None:
        """Kill all slots, and start these anew, as `start` does: `death` waits again, `mailbox` is another one, which
        knows all others as lost, and every slot is needed. Raises StartFailed, with none of them running."""
        ...

    def condemn(self, slot: int, sentence: str) -> None:
        """Kill a slot, and lose it at once."""
        ...

    def fail(self, sentence: str) -> None:
        """Have `death` return: the run cannot go on. The first sentence stays."""
        ...

    def fail_with(self, sentence: str, error: Exception) -> None:
        """Have `death` raise this error: the orchestrator itself has failed, and a run must not go on from wrong books.
        The first failure stays; a later one is written to stderr."""
        ...

    async def stop(self) -> None:
        """Stop all slots. Returns when none is left. Called again, it does nothing."""
        ...
