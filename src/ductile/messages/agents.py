"""Messages that the orchestrator and the agent of a node send to each other (`ductile.cluster.agent`). Slots speak for
themselves (`ductile.messages.workers`); an agent starts and kills their processes and reports how they end.

    agent           AgentHello                                 who it is
    orchestrator    Admit, with the node's settings            or Refuse, with a sentence
    agent           NodeReady                                  slots can be started now
    ...
    orchestrator    Leave                                      the run is over
    agent           NodeLeft                                   nothing of the run is left there

Each side says something several times in `lease_s`: `Renew` if there is nothing else. An agent that hears nothing for
so long kills its slots and ends; an orchestrator that hears nothing for so long gives up all slots of the node.
"""

from typing import Literal

import msgspec


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
    key: str = ""
    """The run's secret key, where what is said between processes is encrypted; "" on one machine."""
    host: str = ""
    """Address of the node at which other nodes reach its processes; "" where there are no other nodes."""


class AgentMessage(msgspec.Struct, tag=True):
    pass


class Renew(AgentMessage):
    """The sender is alive, and the lease begins anew."""


# -- From the orchestrator


class Admit(AgentMessage):
    """The agent's machine is a node of the run."""

    node: NodeSettings
    lease_s: float


class Refuse(AgentMessage):
    """The run does not take this machine; the agent ends."""

    why: str
    """A sentence without its full stop."""
    is_for_now: bool = False
    """Another try may be taken: the number that the node wants is another's, which may have ended just now."""


class Leave(AgentMessage):
    """The node is not needed any more: the agent kills its slots, says `NodeLeft`, and ends. Reason: the run is over,
    or it has given the node up."""


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
    host: str
    """Name of the machine, for people."""
    address: str
    """Address of the machine, at which the other nodes reach it."""
    num_gpus: int
    """CUDA devices that the machine seems to have. torch counts them later (`NodeReady`)."""
    node_rank: int | None = None
    """Number that the node wants to have; None: the next one."""
    version: str = ""
    """Version of ductile."""


class NodeReady(AgentMessage):
    """The process server has imported what slots need."""

    num_devices: int | None
    """CUDA devices of the node; None where slots are processes, of which there may be any number."""


class NodeNoticed(AgentMessage):
    """SIGTERM has come to the agent, which works on until its slots have ended: the machine is about to be taken
    away."""


class NodeLost(AgentMessage):
    """There are no slots on the node from now on: the agent kills those that are left, and ends."""

    why: str


class NodeLeft(AgentMessage):
    """The reply to `Leave`."""


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


ToAgent = Renew | Admit | Refuse | Leave | StartSlot | SignalSlot
FromAgent = (
    Renew | AgentHello | NodeReady | NodeNoticed | NodeLost | NodeLeft | SlotSpawned | SlotNotSpawned | SlotEnded
)
