"""Brings the trainer's weights to all that sample or score with them, while the trainer goes on.

publish → receive → withdraw                           version s is live
begin_step → publish → joined → receive → withdraw     the same where slots change roles for each version
"""

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Self

from ductile.concurrency.listeners import Listeners
from ductile.concurrency.structured import PipelinedTask, gather_all
from ductile.core.rollouts.provenance import KnownWeights
from ductile.elastic.controller import ElasticController
from ductile.events.phases import JoinPhase, PublishPhase, ReceivePhase, StepListeners
from ductile.orchestrator.loop.rollouts import Rollouts
from ductile.records import Manifest
from ductile.roles import Scorer, TrainerClient


class Publisher:
    """`async with publisher:` has weights on their way; leaving the block waits until they are live, or stops them when
    the block has failed. `Buffer.fail` hears of weights that do not arrive."""

    def __init__(
        self, trainer: TrainerClient, rollouts: Rollouts, scorer: Scorer | None, listeners: StepListeners
    ) -> None:
        self._trainer, self._rollouts, self._scorer, self._listeners = trainer, rollouts, scorer, listeners
        self._receiving = PipelinedTask(on_error=rollouts.buffer.fail)
        self.on_live = Listeners[[KnownWeights]]()
        """Told of each version that has gone live."""

    def at_work(self) -> AbstractAsyncContextManager[None]:
        """Return what is at work beside the whole run: nothing here."""
        return nullcontext()

    async def __aenter__(self) -> Self:
        await self._receiving.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._receiving.__aexit__(kind)

    async def publish(self, version: int) -> None:
        """Have the trainer publish its weights; they are received while it goes on with what is there to train on.

        Waits for the trainer, and until the version before is live. With a scorer it also waits until this one is: what
        is trained next is scored by the same weights.
        """
        with self._listeners.during(PublishPhase()) as phase:
            manifest = await self._trainer.publish(version)
            phase.num_bytes = manifest.num_bytes
        self._rollouts.buffer.note_published(version, manifest.digest)
        await self._receiving.start(self._receive(manifest))
        if self._scorer:
            await self.finish()

    async def finish(self) -> None:
        """Wait until the version that is on its way is live. Raises what has kept it from that."""
        await self._receiving.finish()

    async def _receive(self, manifest: Manifest) -> None:
        """Make the version live: from then on `Rollouts` starts new groups. Waits for all generators and scorers, but
        for those that do not take it."""
        with self._listeners.during(ReceivePhase()):
            receivers = [self._rollouts.generators, self._scorer] if self._scorer else [self._rollouts.generators]
            given, *_ = await gather_all(*(receiver.receive(manifest) for receiver in receivers))
        self._rollouts.buffer.note_published(given.version, given.digest)  # the manifest may not know its digest
        self._rollouts.now_live(manifest.version)
        self.on_live(given)
        await self._trainer.withdraw(manifest.version)


class ElasticPublisher(Publisher):
    """Publishes to slots that a controller moves between roles, at the beginning of each step above all."""

    def __init__(
        self,
        trainer: TrainerClient,
        rollouts: Rollouts,
        scorer: Scorer | None,
        listeners: StepListeners,
        controller: ElasticController,
    ) -> None:
        super().__init__(trainer, rollouts, scorer, listeners)
        self._controller = controller

    def at_work(self) -> AbstractAsyncContextManager[None]:
        return self._controller.at_work(self._rollouts.buffer.fail)

    async def publish(self, version: int) -> None:
        """Have the slots begin to change roles for the step, then publish. Waits until the version before is live, as
        slots change roles for one version at a time, and for the decision of the policy."""
        await self.finish()
        await self._controller.begin_step(version)
        await super().publish(version)

    async def _receive(self, manifest: Manifest) -> None:
        """Make the version live, and have the controller decide again from then on. Waits for slots that join, as long
        as it has patience with them."""
        with self._listeners.during(JoinPhase()):
            await self._controller.joined()
        await super()._receive(manifest)
        self._controller.go_on()
