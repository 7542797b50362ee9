"""Attempts at a run in one process: when the trainer has lost slots, the next one goes on from the last checkpoint, as
`--resume` does, on the slots that are left.

    lost       an attempt ends as a run that has lost a slot: what can be saved is saved, all that it has begun ends
    way back   `ductile.core.scheduling.going_back` says on which slots; where there are none, the run ends after all
    prepare    data and checkpoint are read anew: of the attempt before, only its files are gone on with
    again      all slots are killed, and those that are left begin with new processes, on the nodes that there are

So parameters, optimizer, random numbers, place in the data and metrics are those of a run that is resumed by hand on
the same slots, and so are its versions: no process is left that has seen later ones, and servers outside are taken over
as by any run that is resumed (membership epochs go up).
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from ductile.cluster.agent import BROKEN_S
from ductile.cluster.cluster import Cluster, StartFailed
from ductile.cluster.make_cluster import has_several_nodes
from ductile.concurrency.structured import cancel_on
from ductile.config.checks.asked_placement import SlotsConfig
from ductile.config.checks.asked_servers import asked_servers
from ductile.config.reading.imports import ImportPathError
from ductile.config.schema.run import RLConfig, TrainerRunConfig
from ductile.config.schema.trainer import TrainerConfig
from ductile.core.instances.placement import Placement, slots_of
from ductile.core.layout.choice.layout_rules import LayoutRules
from ductile.core.scheduling.going_back import TrainerLoss, WayBack, sentence_of, way_back
from ductile.elastic.trainer_resizer import TrainerResizer
from ductile.events.resizes import TrainerWentBack
from ductile.orchestrator.ending.meaning import Beginning
from ductile.orchestrator.ending.progress import CheckpointError, Checkpoints
from ductile.orchestrator.ending.run_until import SlotDied, run_until
from ductile.orchestrator.ending.supervise import Session
from ductile.roles import Failure, Late, Refused, SlotLost, TrainerLost
from ductile.tasks.task import TaskError
from ductile.tasks.tokenizer import TokenizerError

NEWS_S = BROKEN_S + 3.0
"""How much longer than a lease it may take until it is known that a node is lost."""
FOLLOW = (Refused, Late, SlotLost, TrainerLost)
"""Failures that may follow from the loss of a node."""
START_CANCEL_S = 8.0
"""A start that is interrupted has processes to stop before it returns."""
UNREADABLE = (TaskError, TokenizerError, ImportPathError, CheckpointError, OSError)


class Restored(Protocol):
    """Things that a command prepares before its slots begin (`Prepared`, `PreparedBatches`)."""

    @property
    def trainer(self) -> TrainerConfig: ...

    @property
    def checkpoints(self) -> Checkpoints | None: ...

    @property
    def began(self) -> Beginning: ...


P = TypeVar("P", bound=Restored)
C = TypeVar("C", bound=SlotsConfig)


class RunAttempt(Generic[P]):
    """A run from the moment at which its slots get their roles to the loss of its trainer, or to its end."""

    def __init__(self, prepared: P, placement: Placement, rules: LayoutRules, began_s: float) -> None:
        """rules: which layout the trainer has on how many slots. began_s: `time.perf_counter()` of its beginning."""
        self.prepared, self.placement, self.began_s = prepared, placement, began_s
        self._rules = rules
        self._resizer: TrainerResizer | None = None

    def trains_by(self, resizer: TrainerResizer) -> None:
        """The slots have their roles; the resizer knows from now on which of them train."""
        self._resizer = resizer

    @property
    def is_at_work(self) -> bool:
        return self._resizer is not None

    @property
    def rules(self) -> LayoutRules:
        return self._resizer.rules if self._resizer else self._rules

    def needs(self, slot: int) -> bool:
        """Return whether the attempt ends with the slot: all while they get their roles, then those with a part of the
        trainer's state, or a version that others fetch."""
        return self._resizer.depends_on(slot) if self._resizer else slot in self.placement.slots

    @property
    def trained(self) -> tuple[int, ...]:
        """Slots of the trainer, in rank order."""
        return self._resizer.layout.slots if self._resizer else self.placement.train


class RunAttempts(Generic[C, P]):
    """Chooses what comes after an attempt that has ended with a failure."""

    def __init__(self, config: C, cluster: Cluster, session: Session, prepare: Callable[[C], P]) -> None:
        self._config, self._cluster, self._session, self._prepare = config, cluster, session, prepare
        self._num_in_row = 0
        """How often the run has gone back to the checkpoint of `_step`."""
        self._step = 0

    async def after(self, attempt: RunAttempt[P], failure: Failure) -> RunAttempt[P]:
        """Have slots begin again, and return the attempt on them. Raises the failure where the run ends with it, as the
        trainer has lost no slot, or the user wants to stop; and SlotDied, which says why, where it would go back and
        cannot."""
        checkpoints, most = attempt.prepared.checkpoints, self._config.cluster.max_restarts
        if checkpoints is None or not most or self._session.measures or not (attempt.is_at_work or self._num_in_row):
            raise failure
        lost = await self._lost(attempt, failure)
        while lost and not self._session.interrupt.graceful.is_set():
            saved = await asyncio.to_thread(checkpoints.steps)
            step = saved[-1] if saved else 0
            if step > self._step:
                self._step, self._num_in_row = step, 0
            why = self._why(failure, lost)
            back = way_back(self._loss(attempt, lost), attempt.rules)
            if not back.goes_on:
                raise self._ends(why, back.reason) from failure
            self._num_in_row += 1
            try:
                return await self._begin_again(attempt, back, lost, why)
            except UNREADABLE as error:
                raise self._ends(why, str(error)) from error
            except StartFailed as error:
                assert back.placement is not None
                failure = SlotDied(str(error))
                attempt = RunAttempt(attempt.prepared, back.placement, attempt.rules, attempt.began_s)
                lost = frozenset(attempt.placement.slots)
        raise failure

    async def _lost(self, attempt: RunAttempt[P], failure: Failure) -> frozenset[int]:
        """Return the lost slots with which the attempt has ended. Where a collective has failed, waits for the news of
        a lost node: its peers see earlier that connections are broken."""
        mailbox = self._cluster.mailbox

        def lost() -> frozenset[int]:
            return frozenset(slot for slot in mailbox.lost.keys() - mailbox.gone if attempt.needs(slot))

        cluster = self._config.cluster
        may_follow = has_several_nodes(cluster, self._config.ray) and type(failure) in FOLLOW
        if may_follow and not lost() and not self._cluster.has_failed:
            with suppress(TimeoutError):
                async with asyncio.timeout(cluster.heartbeat_timeout_s + NEWS_S):
                    await cancel_on(self._session.interrupt.graceful, self._cluster.death())
        return lost()

    def _why(self, failure: Failure, lost: frozenset[int]) -> str:
        known = self._cluster.mailbox.lost
        why = str(failure) if isinstance(failure, SlotDied) else known[min(lost)]
        return why if len(lost) == 1 else f"{why} ({slots_of(lost)} are lost)"

    def _loss(self, attempt: RunAttempt[P], lost: frozenset[int]) -> TrainerLoss:
        config, home = self._config, attempt.placement
        startable = self._cluster.startable(home.slots + attempt.trained)
        has_servers = isinstance(config, RLConfig) and (
            bool(asked_servers(config).urls) or config.inference.registry is not None
        )
        return TrainerLoss(
            home=home,
            # A policy's slots change roles by themselves, so the trainer is where the run began: on what is left of it.
            trained=home.train if config.cluster.auto_scheduler else attempt.trained,
            # While slots get their roles, all fail with one: those on nodes that are there may be tried once more.
            lost=lost if attempt.is_at_work else lost - startable,
            startable=startable,
            num_in_row=self._num_in_row,
            max_restarts=config.cluster.max_restarts,
            servers_generate=has_servers,
            slots_per_scorer=config.scorer.tp if isinstance(config, RLConfig) else 1,
        )

    async def _begin_again(
        self, attempt: RunAttempt[P], back: WayBack, lost: frozenset[int], why: str
    ) -> RunAttempt[P]:
        """Raises StartFailed, or what `prepare` raises."""
        assert back.placement is not None
        assert back.layout is not None
        stop, record, began_s = self._session.interrupt.graceful, self._session.record, time.perf_counter()
        # In a thread: the nodes of the run are to hear that the orchestrator is there.
        prepared = await run_until(asyncio.to_thread(self._prepare, resumed(self._config)), stop)
        step = prepared.began.progress.step
        num_lost = max(0, (record.last_step or 0) - step)
        record.event(
            TrainerWentBack(
                step=step,
                lost=tuple(sorted(lost)),
                before=attempt.trained,
                after=back.layout.slots,
                after_dims=back.layout.dims,
                num_in_row=self._num_in_row,
                last_kept=prepared.began.last_kept,
                sentence=sentence_of(step, back, why, num_lost),
            )
        )
        again = self._cluster.begin_again(back.placement.slots)
        await run_until(again, stop, cancel_s=START_CANCEL_S)
        return RunAttempt(prepared, back.placement, attempt.rules, began_s)

    def _ends(self, why: str, reason: str) -> SlotDied:
        return SlotDied(f"{why}; the trainer cannot go back to a checkpoint: {reason}")


def resumed(config: C) -> C:
    """Return the config of a run that goes on from its last checkpoint."""
    if isinstance(config, TrainerRunConfig):
        return config  # it has none
    return config.model_copy(update={"ckpt": config.ckpt.model_copy(update={"resume_step": -1})})
