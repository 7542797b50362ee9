"""What befalls the nodes of a trial, and when: a function of its seed (`tests.cluster.node_trials`)."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tests.cluster.node_run import NUM_NODES, SPARE, Moment

MAX_STEPS = 6
PATIENT_S, WATCHFUL_S = 30.0, 10.0
"""`cluster.heartbeat_timeout_s`: its default, or less, where silence has to be noticed."""

How = Literal["kill", "cut power", "part", "part until lost", "drain", "join", "grow"]
"""grow: the trainer, onto the first slot of a node, once that has joined."""
LOSING: tuple[How, ...] = ("kill", "cut power", "part until lost")
SILENT: tuple[How, ...] = ("cut power", "part until lost")


@dataclass(frozen=True, slots=True)
class Placement:
    """Slots of three nodes."""

    train: tuple[int, ...]
    generate: tuple[int, ...]
    per_node: int

    def trains(self, node: int) -> bool:
        return any(slot // self.per_node == node for slot in self.train)

    @property
    def trainers(self) -> tuple[int, ...]:
        """Nodes that train, without the orchestrator's."""
        return tuple(node for node in range(1, NUM_NODES) if self.trains(node))

    @property
    def generators(self) -> tuple[int, ...]:
        """Nodes that only generate, without the orchestrator's."""
        return tuple(node for node in range(1, NUM_NODES) if not self.trains(node))


PLACEMENTS = {
    "at home": Placement((0,), (1, 2), 1),
    "on two": Placement((0, 2), (1, 3, 4, 5), 2),
    "away": Placement((1,), (0, 2), 1),
    "both away": Placement((1, 2), (0,), 1),
}


@dataclass(frozen=True, slots=True)
class Fault:
    how: How
    node: int
    at: Moment | None = None
    """None: at once."""

    def __str__(self) -> str:
        return f"{self.how} {self.node}" + (f" at {self.at}" if self.at else "")


@dataclass(frozen=True, slots=True)
class Trial:
    seed: int
    kind: str
    name: str
    """Name of the placement."""
    faults: tuple[Fault, ...]

    @staticmethod
    def of(seed: int) -> "Trial":
        kind = list(KINDS)[seed % len(KINDS)]
        return Trial(seed, kind, *KINDS[kind](random.Random(seed)))

    @property
    def placement(self) -> Placement:
        return PLACEMENTS[self.name]

    @property
    def heartbeat_timeout_s(self) -> float:
        return WATCHFUL_S if any(fault.how in SILENT for fault in self.faults) else PATIENT_S

    @property
    def has_time(self) -> bool:
        """Whether its steps are to take a while, for a node to join meanwhile."""
        return any(fault.how == "join" for fault in self.faults)

    @property
    def relayouts(self) -> bool:
        """Whether the trainer may come to have another layout."""
        return any(
            fault.how == "grow" or (fault.how in (*LOSING, "drain") and self.placement.trains(fault.node))
            for fault in self.faults
        )

    def __str__(self) -> str:
        return f"trial {self.seed}, {self.kind}, {self.name}: {', '.join(map(str, self.faults))}"


def lost_by(faults: tuple[Fault, ...]) -> Counter[int]:
    """How often each node is lost."""
    return Counter(fault.node for fault in faults if fault.how in LOSING)


Plan = tuple[str, tuple[Fault, ...]]


def moment(chance: random.Random) -> Moment:
    """While it generates, trains or publishes, with two steps to go at least."""
    command, most = chance.choice(
        (("Generate", 4), ("Generate", 4), ("ForwardBackward", 12), ("OptimStep", 1), ("Publish", 1), ("Receive", 2))
    )
    return Moment(chance.randrange(MAX_STEPS - 2), command, chance.randint(1, most), 0.1 * chance.random() ** 2)


def of_generators(how: How, *then: How) -> Callable[[random.Random], Plan]:
    """A node that only generates is struck; what comes afterwards is for the same one."""

    def plan(chance: random.Random) -> Plan:
        name, node = chance.choice([(name, node) for name, each in PLACEMENTS.items() for node in each.generators])
        return name, (Fault(how, node, moment(chance)), *(Fault(each, node) for each in then))

    return plan


def of_trainers(how: How, *then: How) -> Callable[[random.Random], Plan]:
    """A node that trains is struck; what comes afterwards is for the same one."""

    def plan(chance: random.Random) -> Plan:
        able = [(name, node) for name, each in PLACEMENTS.items() for node in each.trainers]
        name, node = chance.choice([each for each in able if each[0] != "away" or not then])
        return name, (Fault(how, node, moment(chance)), *(Fault(each, node) for each in then))

    return plan


def drained(chance: random.Random) -> Plan:
    return chance.choice(list(PLACEMENTS)), (Fault("drain", chance.randrange(1, NUM_NODES), moment(chance)),)


def parted(chance: random.Random) -> Plan:
    """The orchestrator's node, too."""
    name, node = chance.choice(list(PLACEMENTS)), chance.randrange(NUM_NODES)
    at, other = moment(chance), chance.choice([each for each in range(NUM_NODES) if each != node])
    return name, (Fault("part", node, at), Fault("part", other, moment(chance)))


def grown(chance: random.Random) -> Plan:
    return chance.choice(list(PLACEMENTS)), (Fault("join", SPARE, moment(chance)), Fault("grow", SPARE))


def combined(chance: random.Random) -> Plan:
    name, node = chance.choice([(name, node) for name, each in PLACEMENTS.items() for node in each.generators])
    return name, chance.choice(
        (
            (Fault("part", chance.randrange(NUM_NODES), moment(chance)), Fault("drain", node)),
            (Fault("join", SPARE, moment(chance)), Fault("kill", node, moment(chance)), Fault("grow", SPARE)),
            (Fault("drain", node, moment(chance)), Fault("join", SPARE), Fault("grow", SPARE), Fault("part", SPARE)),
            (Fault("part", 0, moment(chance)), Fault("kill", node)),
        )
    )


KINDS: Mapping[str, Callable[[random.Random], Plan]] = {
    "a node of generators is killed": of_generators("kill"),
    "a node is drained": drained,
    "two partitions of 5 s": parted,
    "a node joins and trains": grown,
    "a node that trains is lost": lambda chance: of_trainers(chance.choice(("kill", "cut power")))(chance),
    "the power of a node of generators is cut": of_generators("cut power"),
    "a node of generators is killed, and another one joins": of_generators("kill", "join"),
    "a partition until the node is lost, and it joins again": of_generators("part until lost", "join"),
    "a node that trains is killed, and another one joins and trains": of_trainers("kill", "join", "grow"),
    "several": combined,
}
