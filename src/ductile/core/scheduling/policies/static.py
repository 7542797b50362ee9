"""The slots keep the roles that the configuration gave them."""

from dataclasses import dataclass

from ductile.core.instances.placement import many
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.orders import Decision


@dataclass(frozen=True, slots=True)
class Static:
    def decide(self, state: ClusterState) -> Decision:
        return Decision()


@dataclass(frozen=True, slots=True)
class InTurns:
    """All slots generate, then all train: the trainer waits until the step's last rollout is there.

    Meant for a placement in which all slots hold both roles (`actor,rollout: all`): the collocated arm of comparisons.
    """

    def decide(self, state: ClusterState) -> Decision:
        if state.batch.missing:
            why = f"training waits for {many(state.batch.missing, 'rollout')}"
            return Decision(hold_training=True, reason=why, topic="rollouts")
        return Decision()
