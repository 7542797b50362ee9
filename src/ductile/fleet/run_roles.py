"""The roles of a run as the orchestrator asks them: the trainer, the generators and the scorers, if there are any."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from ductile.concurrency.listeners import Listeners
from ductile.concurrency.structured import gather_all
from ductile.core.instances.instances import Instance, InstanceId, Serving, in_order
from ductile.core.scheduling.orders import Migration, Release
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.requests.scorer import RemoteScorer
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.roles import Failure, Refused, SlotLost


@dataclass(frozen=True, slots=True)
class RunRoles:
    """Example: a run that trains on slots 0-1, generates on 2 and scores on 3 has `slots_by_role`
    {"train": (0, 1), "generate": (2,), "score": (3,)} until a policy or a user changes that."""

    trainer: RemoteTrainer
    generators: RemoteGenerators
    scorer: RemoteScorer | None
    settings: Mapping[Serving, Mapping[str, object]]
    """Settings of the roles, for slots that take them on."""
    on_migrated: Listeners[[int, float]] = field(default_factory=Listeners[[int, float]])
    """Told how many tokens of KV caches the generator took in that took in the most, and how many seconds it all
    took."""
    on_released: Listeners[[float]] = field(default_factory=Listeners[[float]])
    """Told how many seconds an instance took to end."""

    @property
    def pools(self) -> dict[Serving, RemoteGenerators | RemoteScorer]:
        """The generators and, where the run has any, the scorers."""
        scorers: dict[Serving, RemoteGenerators | RemoteScorer] = {"score": self.scorer} if self.scorer else {}
        return {"generate": self.generators, **scorers}

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All generators and scorers, as things are now."""
        return in_order(instance for pool in self.pools.values() for instance in pool.all_instances)

    async def admit(self, instance: Instance, after: Callable[[], Awaitable[None]] | None = None) -> None:
        """Have the instance's slots take its role and the live weights. Raises SlotLost, Refused or Late, and the slots
        then do not have the role. after: as of `WorkerPool.admit`.

        No slot may have the live version any more: the last one was lost while the trainer was between two optimizer
        steps of a batch. Then its weights of this moment go live in their place, or it would wait for work for ever.
        """
        trains = not {*instance.slots}.isdisjoint(self.trainer.layout.slots)
        with self.trainer.expecting_change() if trains and after is None else nullcontext():  # or a resize expects it
            await self._admit(instance, after)

    async def _admit(self, instance: Instance, after: Callable[[], Awaitable[None]] | None) -> None:
        pool = self.pools[instance.role]
        takes_work = await pool.admit(instance, self.settings[instance.role], after)
        version = pool.version
        if takes_work or version is None or pool.instances:
            return
        try:
            manifest = await self.trainer.publish_again(version)
        except Refused:
            await pool.release(instance)  # nobody has weights for it, and its slots are not to wait for any
            raise
        if manifest:
            try:
                await pool.go_live(manifest)
            finally:
                await self.trainer.withdraw(version)
        if why := pool.why_lost(instance):
            raise SlotLost(why)  # `go_live` goes on without instances that are lost

    async def release(self, release: Release) -> list[str]:
        """Have the rollouts migrate, and then the instances end. Returns a sentence, without its full stop, for each
        part that was not done. Where a slot of theirs trains, the caller holds the trainer at a boundary for it."""
        with self.trainer.expecting_change():  # a request may go to a generator that the caller did not think of
            return await self._release(release)

    async def _release(self, release: Release) -> list[str]:
        failures = list[str]()
        if release.migrations:
            try:
                await self._migrate(release.migrations)
            except Failure as error:
                failures.append(str(error))
        ended: list[str] = await gather_all(*(self._end(instance) for instance in release.instances))
        return [*failures, *filter(None, ended)]

    async def _migrate(self, migrations: Sequence[Migration]) -> None:
        contexts = {rollout.id: rollout.context_tokens for rollout in self.generators.unfinished()}
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        results = await self.generators.migrate(migrations)
        # A target takes caches in one after another, several targets at once.
        taken_in = Counter[InstanceId]()
        for result in results:
            if result.instance is not None and result.instance != result.order.source:
                taken_in[result.instance] += contexts.get(result.order.id, 0) if result.with_cache else 0
        if taken_in:  # otherwise all had ended, and no generator was asked
            self.on_migrated(max(taken_in.values()), now_s() - began_s)

    async def _end(self, instance: Instance) -> str:
        """Have the instance end. Returns why it goes on, or ""."""
        if instance.role == "generate":
            left = sum(rollout.instance == instance.id for rollout in self.generators.unfinished())
            if left:  # they could not migrate, and the change is not to wait for their end
                return f"{instance.id} goes on generating: {left} of its rollouts could not migrate"
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        try:
            await self.pools[instance.role].dismiss(instance)
        except Failure as error:
            return str(error)
        self.on_released(now_s() - began_s)
        return ""

    @property
    def slots_by_role(self) -> Mapping[str, tuple[int, ...]]:
        """Slots by role, as things are now."""
        return {"train": self.trainer.layout.slots, **{role: pool.slots for role, pool in self.pools.items()}}
