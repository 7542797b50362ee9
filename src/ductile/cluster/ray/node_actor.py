"""The agent of a node (`ductile.cluster.agent`) as an actor of Ray. It imports no Ray: `ray.remote` is put on from
outside (`ductile.cluster.ray.connection`)."""

import asyncio
import os
from dataclasses import dataclass

from ductile.cluster.agent import Agent, Departure, hello
from ductile.transport.curve import RunKey
from ductile.transport.network import address_towards


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """What the agent of a node has to know to find the run."""

    address: str
    """host:port of the orchestrator."""
    key: str
    """The run's secret key."""
    number: int
    """Number of the node."""
    folder: str
    """Folder that the command was started in, from which relative paths of its config are meant."""

    def __repr__(self) -> str:
        return f"AgentPlace({self.address}, node {self.number})"  # the key is for nobody's log


class NodeActor:
    def run(self, place: AgentPlace) -> Departure:
        """Return when the run is over, or does without this node. Nothing of the node is left then.

        Ray calls it in the main thread of a process of the actor's own, which the slots' processes end with.
        """
        if os.path.isdir(place.folder):
            os.chdir(place.folder)
        return asyncio.run(_run(place))


async def _run(place: AgentPlace) -> Departure:
    host, _, port = place.address.rpartition(":")
    own = address_towards(host, int(port))
    return await Agent(place.address, RunKey.of(place.key), hello(own, place.number)).run()
