"""Nodes for tests: agents on this machine, each with a loopback address of its own, as `ductile join` starts them.

The orchestrator is at 127.0.0.1, node 1 at 127.0.0.2 and so on. They count as different hosts (`DUCTILE_NODE`), so that
nothing goes from one to another through shared memory.
"""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ductile.cluster.cluster import ClusterSpec
from ductile.cluster.joined import JoinedCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.core.instances.node_slots import SlotsPerNode
from ductile.observe import RunEvent
from tests.slot.echo import ECHO

GONE_S = 30.0
HEAD = "127.0.0.1"


def address_of_node(node: int) -> str:
    return f"127.0.0.{node + 1}"


def join(where: Path | str, node: int, *flags: str, **environment: str) -> "subprocess.Popen[bytes]":
    """Start the agent of a node. Its stderr goes to a file beside the run's folder, if there is one."""
    words = ["-P", "-m", "ductile", "join", str(where), "--interface", address_of_node(node), *flags]
    return subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )


def stderr_of(agent: "subprocess.Popen[bytes]") -> str:
    """Wait for the agent's end; return what it has said."""
    return agent.communicate(timeout=GONE_S)[1].decode()


def joined_cluster(
    folder: Path,
    slots: Sequence[int],
    per_node: int,
    num_nodes: int,
    events: list[RunEvent] | None = None,
    roles: Any = ECHO,
    **keys: Any,
) -> JoinedCluster:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    config = ClusterConfig(**{"device": "cpu", "num_nodes": num_nodes, "interface": HEAD, **keys})
    tell = (lambda event: None) if events is None else events.append
    return JoinedCluster(ClusterSpec(slots, config, folder, roles, SlotsPerNode(per_node, per_node), tell))


@asynccontextmanager
async def started(
    cluster: JoinedCluster, folder: Path, nodes: Sequence[int], *flags: str, **environment: str
) -> AsyncIterator[list["subprocess.Popen[bytes]"]]:
    """The cluster from its start to its end, with agents for these nodes, each of which has ended after it."""
    agents = [join(folder, node, "--node-rank", str(node), *flags, **environment) for node in nodes]
    try:
        async with cluster:
            yield agents
    finally:
        for agent in agents:
            try:
                agent.wait(GONE_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                raise
            if agent.stderr is not None:
                agent.stderr.close()
