"""A run of `ductile rl` over the nodes of a `tests.cluster.namespaces.Network`, and what befalls the nodes.

nodes = NodesRun(network, config, folder, *flags)      the orchestrator on node 0, agents on all but the spare
nodes.reach(Moment(2, "ForwardBackward", 3))           two steps are trained, and three more such commands sent
nodes.kill(2), nodes.cut_power(2), ...
"""

import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.namespaces import Network
from tests.end_to_end.runs import Run
from tests.end_to_end.watched import FOLDER, commands_in

NUM_NODES = 3
SPARE = 3
"""A machine that may join."""
DEADLINE_S = 240.0
"""Of a machine that may be shared with other tests."""
PARTITION_S = 5.0


@dataclass(frozen=True, slots=True)
class Moment:
    """An instant of a run: `after_s` seconds after the orchestrator has sent the nth such command since a step was
    trained."""

    step: int
    """0: since the slots have their roles."""
    command: str
    nth: int
    after_s: float = 0.0

    def __str__(self) -> str:
        return f"step {self.step} {self.command} {self.nth} + {self.after_s:.2f} s"


class NodesRun:
    """`close` ends all of it."""

    def __init__(self, network: Network, config: Path, folder: Path, *flags: str) -> None:
        """folder: for what `tests.end_to_end.watched` writes down."""
        self.network, self._folder = network, folder
        several = ("--cluster.num-nodes", str(NUM_NODES), "--cluster.max-nodes", str(SPARE + 1))
        self.run = Run(
            config,
            *several,
            *flags,
            module="tests.end_to_end.watched",
            begin=lambda *words, **how: network.begin(0, *words, **how),
            **{FOLDER: str(folder)},
        )
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        """The latest one of each node."""
        self.num_struck = Counter[int]()
        """How often each node has been killed, or cut off for good."""
        self._joined_s: dict[int, float] = {}
        self._others: list[subprocess.Popen[bytes]] = []
        for node in range(1, NUM_NODES):
            self.join(node)

    def join(self, node: int, wait_s: float = DEADLINE_S) -> None:
        """wait_s: for the run, which may have ended."""
        words = ("ductile", "join", str(self.run.folder), "--node-rank", str(node), "--wait-s", f"{wait_s:g}")
        self.network.mend(node)
        self._others.append(self.network.begin(node, *words, **self._how))
        self.agents[node] = self._others[-1]
        self._joined_s[node] = time.time()

    def command(self, *words: str) -> int:
        """Run `ductile` on the orchestrator's machine; return its exit code."""
        begun = self.network.enter(0, self.run.process, "ductile", *words, **self._how)
        self._others.append(begun)
        return begun.wait(DEADLINE_S)

    def kill(self, node: int) -> None:
        """End all processes of the node at once; the others see its connections end."""
        self.num_struck[node] += 1
        self.agents[node].kill()
        self.agents[node].wait(DEADLINE_S)

    def cut_power(self, node: int) -> None:
        """End all processes of the node, of which nobody hears."""
        self.network.cut(node)
        self.kill(node)

    def part(self, node: int) -> None:
        """Have nothing reach the node, nor come from it, for a while."""
        self.network.cut(node)
        time.sleep(PARTITION_S)
        self.network.mend(node)

    def part_until_lost(self, node: int) -> None:
        self.num_struck[node] += 1
        self.network.cut(node)
        self.until_or_end(lambda: self.num_lost(node) == self.num_struck[node])
        self.network.mend(node)

    def has_started(self, node: int, slot: int) -> bool:
        """Whether the node has this slot since it last joined."""
        events = [*self.run.events("slot_started"), *self.run.events("slot_restarted")]
        return any(event["slot"] == slot and event["time"] > self._joined_s[node] for event in events)

    def num_lost(self, node: int) -> int:
        return sum(event["node"] == node for event in self.run.events("node_lost"))

    def reach(self, moment: Moment) -> bool:
        """Wait for the moment. Returns False where the run ends before."""

        def is_trained() -> bool:
            trained = [row["step"] for row in self.run.metrics()]
            return max(trained, default=0) >= moment.step and bool(self.run.events("setting"))

        def num_told() -> int:
            return sum(each["command"] == moment.command for each in commands_in(self._folder))

        self.until_or_end(is_trained)
        due = num_told() + moment.nth
        self.until_or_end(lambda: num_told() >= due)
        time.sleep(moment.after_s)
        return self.is_at_work

    @property
    def is_at_work(self) -> bool:
        return self.run.process.poll() is None

    def until_or_end(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition, or the end of the run. Returns whether the run is at work."""
        deadline = time.monotonic() + DEADLINE_S
        while self.is_at_work and not condition():
            assert time.monotonic() < deadline, f"nothing came of it in {DEADLINE_S:g} s:\n{self.run.said()}"
            time.sleep(0.005)
        return self.is_at_work

    def ends(self) -> int:
        """Wait for the run's exit code. Its agents have ended then, and nothing is left."""
        return self.run.ends(within_s=DEADLINE_S)

    def codes(self) -> dict[int, int]:
        """Exit codes of the agents, by node."""
        return {node: agent.wait(DEADLINE_S) for node, agent in self.agents.items()}

    def close(self) -> None:
        for process in self._others:
            process.kill()
            process.wait(10)
        self.run.close()

    @property
    def _how(self) -> dict[str, object]:
        return {
            "stdin": subprocess.DEVNULL,
            "stdout": self.run.output,
            "stderr": subprocess.STDOUT,
            "env": self.run.environment,
        }
