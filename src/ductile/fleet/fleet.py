"""The roles of a run as the orchestrator asks them: the trainer, the generators and the scorers, if there are any."""

from collections.abc import Mapping
from dataclasses import dataclass

from ductile.core.instances.instances import Instance, Serving, in_order
from ductile.fleet.generators import RemoteGenerators
from ductile.fleet.scorer import RemoteScorer
from ductile.fleet.trainer import RemoteTrainer


@dataclass(frozen=True, slots=True)
class Fleet:
    """Example: a run that trains on slots 0-1, generates on 2 and scores on 3 has `slots_by_role`
    {"train": (0, 1), "generate": (2,), "score": (3,)} until a policy or a user changes that."""

    trainer: RemoteTrainer
    generators: RemoteGenerators
    scorer: RemoteScorer | None
    settings: Mapping[Serving, Mapping[str, object]]
    """Settings of the roles, for slots that take them on."""

    @property
    def pools(self) -> dict[Serving, RemoteGenerators | RemoteScorer]:
        """The generators and, where the run has any, the scorers."""
        scorers: dict[Serving, RemoteGenerators | RemoteScorer] = {"score": self.scorer} if self.scorer else {}
        return {"generate": self.generators, **scorers}

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All generators and scorers, as things are now."""
        return in_order(instance for pool in self.pools.values() for instance in pool.all_instances)

    async def admit(self, instance: Instance) -> None:
        """Have the instance's slots take its role and the live weights. Raises SlotLost, Refused or Late, and the slots
        then do not have the role.

        No slot may have the live version any more: the last one was lost while the trainer was between two optimizer
        steps of a batch. Then its weights of this moment go live in their place, or it would wait for work for ever.
        """
        pool = self.pools[instance.role]
        takes_work = await pool.admit(instance, self.settings[instance.role])
        version = pool.version
        if takes_work or version is None or pool.instances:
            return
        if manifest := await self.trainer.publish_again(version):
            try:
                await pool.receive(manifest)
            finally:
                await self.trainer.withdraw(version)

    @property
    def slots_by_role(self) -> Mapping[str, tuple[int, ...]]:
        """Slots by role, as things are now."""
        return {"train": self.trainer.layout.slots, **{role: pool.slots for role, pool in self.pools.items()}}
