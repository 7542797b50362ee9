"""What a live run tells of itself, and does when it is asked to (`ductile resize`, `ductile status`).

Its latest resizes are those of its `RunState`. What is no event is asked of who knows it this moment: roles and deaths
of the mailbox, the phase of a resize of the resizer, seconds of the slots' ledger.
"""

import os
import time
from typing import Protocol

from msgspec.structs import replace

from ductile.cluster.cluster import Cluster
from ductile.core.layout.choice.requested_layout import LayoutRequest
from ductile.elastic.activity import SlotActivity
from ductile.elastic.trainer_resizer import CannotResize, ResizeNotDone, TrainerResizer
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.control import (
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
        policy: str = "",
        servers: AskServers | None = None,
    ) -> None:
        """policy: that moves the slots of this run; "" when none does. servers: those of its fleet; None where it has
        none by its config."""
        self._session, self._cluster, self._trainer = session, cluster, trainer
        self._activity, self._resizer, self._policy = activity, resizer, policy
        self._servers = servers

    async def respond(self, ask: ResizeRequest | Status | FleetRequest) -> Resized | RunStatus | FleetStatus:
        """Raises Unfit or RunFailed."""
        if isinstance(ask, FleetRequest):
            return await self._fleet(ask)
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

    async def _resize(self, ask: ResizeRequest) -> Resized:
        try:
            return await self._resizer.resize_as(LayoutRequest(ask.layout, ask.train, ask.sizes))
        except CannotResize as error:
            raise Unfit(str(error)) from error
        except ResizeNotDone as error:
            raise RunFailed(str(error)) from error

    def status(self) -> RunStatus:
        return RunStatus(
            command=self._session.command,
            pid=os.getpid(),
            step=self._session.record.last_step or 0,
            max_steps=self._session.max_steps,
            running_s=time.perf_counter() - self._session.began_s,
            epoch=self._cluster.mailbox.epoch,
            trainer=self._trainer.layout,
            changing=self._resizer.under_way,
            slots=tuple(self._slot(slot) for slot in self._cluster.slots),
            changes=tuple(self._session.state.resizes),
            lost=dict(self._cluster.mailbox.lost),
            fleet=self._servers.status() if self._servers else None,
            disagreed=tuple(each.sentence for each in self._session.state.disagreements),
        )

    def _slot(self, slot: int) -> SlotStatus:
        process, mailbox = self._cluster.processes.get(slot), self._cluster.mailbox
        lost = slot in mailbox.lost
        state = self._session.state
        gone = "given back" if slot in state.given_back else "restarting" if slot in state.restarting else "lost"
        account, now_s = self._activity.account(slot), time.monotonic()
        return SlotStatus(
            slot=slot,
            pid=process.pid if process else 0,
            device=self._cluster.devices[slot],
            roles=() if lost else mailbox.roles(slot),
            doing=gone if lost else account.activity,
            seconds={str(activity): seconds for activity, seconds in account.totals(now_s).items()},
            idle={str(cause): seconds for cause, seconds in account.idle(now_s).items()},
        )
