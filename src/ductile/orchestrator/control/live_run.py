"""What a live run tells of itself, and does when it is asked to (`ductile resize`, `ductile drain`, `ductile status`).

Its latest resizes are those of its `RunState`. What is no event is asked of who knows it this moment: roles and deaths
of the mailbox, the phase of a resize of the resizer, seconds of the slots' ledger.
"""

import os
import time
from typing import Protocol

from msgspec.structs import replace

from ductile.cluster.cluster import Cluster, StartFailed
from ductile.core.instances.placement import slots_of
from ductile.core.layout.choice.requested_layout import LayoutRequest
from ductile.core.scheduling.drains import CannotDrain, Notice
from ductile.elastic.activity import SlotActivity
from ductile.elastic.drains import Drains
from ductile.elastic.trainer_resizer import CannotResize, ResizeNotDone, TrainerResizer
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.control import (
    Drained,
    DrainRequest,
    FleetRequest,
    FleetStatus,
    Resized,
    ResizeRequest,
    RunFailed,
    RunStatus,
    SlotStatus,
    Status,
    Unfit,
)
from ductile.orchestrator.ending.supervise import Session


class AskServers(Protocol):
    """The servers of a run, as those who ask it from outside see them (`ductile.orchestrator.commands.servers`)."""

    def status(self) -> FleetStatus: ...

    async def do(self, ask: FleetRequest) -> str:
        """Returns what was done, a sentence. Raises Unfit or RunFailed."""
        ...


class LiveRun:
    def __init__(
        self,
        session: Session,
        cluster: Cluster,
        trainer: RemoteTrainer,
        activity: SlotActivity,
        resizer: TrainerResizer,
        drains: Drains,
        policy: str = "",
        servers: AskServers | None = None,
    ) -> None:
        """policy: that moves the slots of this run; "" when none does. servers: those of its fleet; None where it has
        none by its config."""
        self._session, self._cluster, self._trainer = session, cluster, trainer
        self._activity, self._resizer, self._policy = activity, resizer, policy
        self._servers, self._drains = servers, drains

    async def respond(
        self, ask: ResizeRequest | Status | FleetRequest | DrainRequest
    ) -> Resized | RunStatus | FleetStatus | Drained:
        """Raises Unfit or RunFailed."""
        if isinstance(ask, FleetRequest):
            return await self._fleet(ask)
        if isinstance(ask, DrainRequest):
            return await self._drain(ask)
        if isinstance(ask, ResizeRequest) and self._policy:
            raise Unfit(
                f"the slots of this run are moved by its scheduler (cluster.auto_scheduler, policy {self._policy}), "
                "which would take the change back. Start the run with auto_scheduler = false to resize it by hand"
            )
        return await self._resize(ask) if isinstance(ask, ResizeRequest) else self.status()

    async def _fleet(self, ask: FleetRequest) -> FleetStatus:
        if self._servers is None:
            raise Unfit(
                "this run has no servers by its config: start it with orchestrator.client.base_url, or with "
                "inference.registry"
            )
        sentence = await self._servers.do(ask)
        return replace(self._servers.status(), sentence=sentence)

    async def _drain(self, ask: DrainRequest) -> Drained:
        slots = self._named(ask)
        try:
            if ask.back:
                return await self._drains.bring_back(slots)
            return await self._drains.drain(Notice(slots, ask.deadline_s, "ductile drain"))
        except (CannotDrain, StartFailed) as error:
            raise RunFailed(str(error)) from error

    def _named(self, ask: DrainRequest) -> tuple[int, ...]:
        """The slots that are meant. Raises Unfit."""
        known, gone, lost = self._cluster.slots, self._cluster.mailbox.gone, self._cluster.mailbox.lost
        if not 0 < ask.deadline_s < float("inf"):
            raise Unfit(f"the deadline is {ask.deadline_s:g} s; it must be above 0, and finite")
        if strange := sorted({*ask.slots}.difference(known)):
            raise Unfit(f"this run has no {slots_of(strange)}; it has {slots_of(known)}")
        of_node = [slot for slot in known if ask.node is not None and self._cluster.node_of(slot) == ask.node]
        if ask.node is not None and not of_node:
            nodes = ", ".join(map(str, sorted({self._cluster.node_of(slot) for slot in known})))
            raise Unfit(f"this run has no slots on node {ask.node}; it has some on {nodes}")
        chosen = {*ask.slots, *(slot for slot in of_node if (slot in gone if ask.back else slot not in lost))}
        if not chosen:
            raise Unfit("no slots are named" if ask.node is None else f"node {ask.node} has no such slots")
        return tuple(sorted(chosen))

    async def _resize(self, ask: ResizeRequest) -> Resized:
        if busy := sorted(self._drains.leaving.intersection(ask.train or ())):
            verb = "is" if len(busy) == 1 else "are"
            raise Unfit(f"{slots_of(busy)} {verb} being drained: name others")
        try:
            return await self._resizer.resize_as(LayoutRequest(ask.layout, ask.train, ask.sizes))
        except CannotResize as error:
            raise Unfit(str(error)) from error
        except ResizeNotDone as error:
            raise RunFailed(str(error)) from error

    def status(self) -> RunStatus:
        mailbox = self._cluster.mailbox
        return RunStatus(
            command=self._session.command,
            pid=os.getpid(),
            step=self._session.record.last_step or 0,
            max_steps=self._session.max_steps,
            running_s=time.perf_counter() - self._session.began_s,
            epoch=mailbox.epoch,
            trainer=self._trainer.layout,
            changing=self._resizer.under_way,
            slots=tuple(self._slot(slot) for slot in self._cluster.slots),
            changes=tuple(self._session.state.resizes),
            lost={slot: why for slot, why in mailbox.lost.items() if slot not in mailbox.gone},
            fleet=self._servers.status() if self._servers else None,
            went_back=tuple(each.sentence for each in self._session.state.goings_back),
            disagreed=tuple(each.sentence for each in self._session.state.disagreements),
        )

    def _slot(self, slot: int) -> SlotStatus:
        process, mailbox = self._cluster.processes.get(slot), self._cluster.mailbox
        lost = slot in mailbox.lost
        state = self._session.state
        gone = "given back" if slot in state.given_back else "restarting" if slot in state.restarting else "lost"
        gone = "gone" if slot in mailbox.gone else gone
        account, now_s = self._activity.account(slot), time.monotonic()
        return SlotStatus(
            slot=slot,
            pid=process.pid if process else 0,
            device=self._cluster.devices[slot],
            roles=() if lost else mailbox.roles(slot),
            doing=gone if lost else account.activity,
            seconds={str(activity): seconds for activity, seconds in account.totals(now_s).items()},
            idle={str(cause): seconds for cause, seconds in account.idle(now_s).items()},
            node=self._cluster.node_of(slot),
        )
