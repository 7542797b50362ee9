"""A small orchestrator for tests to kill: `python -m tests.cluster.orchestrate FOLDER [FRACTION | agents]`.

It starts three slots, gives one of them a command that takes minutes, prints their pids as JSON, and waits. With
"agents" the slots are behind an agent. At SIGUSR1 it writes to stderr where it is.
"""

import asyncio
import faulthandler
import json
import signal
import sys
from pathlib import Path

from ductile.cluster.local import LocalCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.messages.workers import AssignRole, OptimStep
from tests.cluster.joining import join, joined_cluster
from tests.slot.echo import ECHO


async def main(folder: str, fraction: str = "") -> None:
    behind_agent = fraction == "agents"
    config = ClusterConfig(device="cpu", cpu_slot_fraction=None if behind_agent or not fraction else float(fraction))
    if behind_agent:
        agent = join(Path(folder), 0)
    async with (
        joined_cluster(Path(folder), [0, 1, 2], 3, 1, head_is_node=False)
        if behind_agent
        else LocalCluster([0, 1, 2], config, Path(folder), ECHO)
    ) as cluster:
        await cluster.mailbox.ask(1, AssignRole("train", {"sleep_s": 300}, ParallelLayout.of((1,))), 10)
        busy = asyncio.create_task(cluster.mailbox.ask(1, OptimStep(1.0), 300))
        server = cluster._home._server._server.pid
        pids = {"slots": [process.pid for process in cluster.processes.values()], "server": server}
        if behind_agent:
            pids["agent"] = agent.pid
        print(json.dumps(pids), flush=True)
        await busy


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    # Under nohup a process ignores hang-ups, and interrupts in the background of a script; so do all that it starts.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(main(*sys.argv[1:]))
