"""Messages that the orchestrator and the agent of a node send to each other (`ductile.cluster.agent`). Slots speak for
themselves (`ductile.messages.workers`); an agent starts and kills their processes and reports how they end.

Each side says something several times in `lease_s`: `Renew` if there is nothing else. An agent that hears nothing for
so long kills its slots and ends; an orchestrator that hears nothing for so long gives up all slots of the node.
"""

from typing import Literal

import msgspec


class AgentMessage(msgspec.Struct, tag=True):
    pass


class Renew(AgentMessage):
    """The sender is alive, and the lease begins anew."""


# -- From the orchestrator


class StartSlot(AgentMessage):
    """Reply: `SlotSpawned` or `SlotNotSpawned`. The slot itself says `Hello` to the orchestrator."""

    slot: int
    attempt: int
    """Number of the start among all of the node; the reply has it, too."""


class SignalSlot(AgentMessage):
    """Send a signal to the slot's process, unless it has ended."""

    slot: int
    pid: int
    signum: int


# -- From an agent


class AgentHello(AgentMessage):
    """The first message of an agent."""

    pid: int


class NodeReady(AgentMessage):
    """The process server has imported what slots need."""

    num_devices: int | None
    """CUDA devices of the node; None where slots are processes, of which there may be any number."""


class NodeLost(AgentMessage):
    """There are no slots on the node from now on: the agent kills those that are left, and ends."""

    why: str


class SlotSpawned(AgentMessage):
    slot: int
    attempt: int
    pid: int


class SlotNotSpawned(AgentMessage):
    slot: int
    attempt: int
    sentence: str


class SlotEnded(AgentMessage):
    slot: int
    pid: int
    code: int
    """Exit code of the process, as in subprocess: negative is a signal's number."""
    ending: str
    """The same in words, with the cause that the node's machine tells."""


ToAgent = Renew | StartSlot | SignalSlot
FromAgent = Renew | AgentHello | NodeReady | NodeLost | SlotSpawned | SlotNotSpawned | SlotEnded


class NodeSettings(msgspec.Struct, frozen=True):
    """Facts of the run that the processes of a node need."""

    run: str
    """Name of the run, in the environment of all its processes."""
    address: str
    """Address at which slots find the orchestrator."""
    token: str
    """The run's token, in hex."""
    logs: str
    """Folder of the logs."""
    roles: dict[str, str]
    """Class of each role by the role's name: "package.module:Class"."""
    device: Literal["auto", "cpu", "cuda"]
    slots_per_device: int
    cpu_slot_fraction: float | None
    start_timeout_s: float
    node: int = 0
    first_slot: int = 0
    """Slot that has the node's first device."""


class AgentSettings(msgspec.Struct, frozen=True):
    """Line of JSON that an agent reads from its standard input when it starts. Its input stays open as long as the
    orchestrator wants it."""

    address: str
    """Address at which the agent finds the orchestrator."""
    lease_s: float
    node: NodeSettings
