"""A run on this machine alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ductile.cluster.node import Node
from ductile.cluster.nodes import NodesCluster, SlotNode
from ductile.config.schema.cluster import ClusterConfig
from ductile.messages.message import RoleName
from ductile.transport.router import Router
from ductile.transport.sockets import LOOPBACK, SocketFolder

ROLES: dict[RoleName, str] = {
    "train": "ductile.trainer.train_role:TrainRole",
    "generate": "ductile.generator.generate_role:GenerateRole",
    "score": "ductile.scorer.score_role:ScoreRole",
}


class LocalCluster(NodesCluster):
    """Slots on this machine. Its process server lives and dies with the orchestrator, and the slots find it in a folder
    that only their owner can enter:

        async with LocalCluster(range(4), config.cluster, logs) as cluster:
            ...  cluster.mailbox, cluster.rendezvous
            sentence = await cluster.death()
    """

    def __init__(
        self, slots: Sequence[int], config: ClusterConfig, logs: Path, roles: Mapping[RoleName, str] = ROLES
    ) -> None:
        super().__init__(slots, config, logs, roles, LOOPBACK)

    def _open(self) -> tuple[Node, dict[int, SlotNode]]:
        self._sockets = SocketFolder()
        self._router = Router(self._token, self._sockets.address, self.fail_with)
        home = Node(self._settings(), self._on_exit, self.fail_with, self._sockets.path)
        return home, {0: home}

    def _node_of(self, slot: int) -> int:
        return 0

    async def stop(self) -> None:
        if not self._stopping:
            await super().stop()
            self._sockets.remove()
