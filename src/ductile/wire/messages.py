"""Everything the orchestrator and a slot say to each other. One class a verb; the class name is the tag on the wire.

Commands go to one slot and are answered by exactly one reply (its own class, or `Failed`). Events are unsolicited.
`Envelope` carries epoch and sequence number; a slot refuses an older epoch than the newest it has seen.
"""

from typing import Literal

import msgspec

from ductile.records import GenerateRequest, Generation, Manifest, MicroBatch, Sample, StepReport

RoleName = Literal["train", "generate", "score"]


class Message(msgspec.Struct, tag=True):
    pass


# -- Commands: any slot ------------------------------------------------------------------------------------------


class Hold(Message):
    """Take a role. Answered by `Done` when the role is ready to work (model built, weights loaded, groups joined)."""

    role: RoleName
    settings: dict[str, object]
    """The role's config section, dumped (`ductile.config`); the role validates it again on its side."""
    members: tuple[int, ...]
    """The slots that hold this role together, in rank order (train); the slot alone otherwise."""
    rendezvous: str = ""
    """host:port of the run's store; empty when no groups are needed."""


class Drop(Message):
    """Give the role up and free what it held. Answered by `Done`."""

    role: RoleName


class Ping(Message):
    """Answered by `Done` from the main thread: it proves that the slot executes commands, not only that it lives."""


class Stop(Message):
    """Leave. Answered by `Done`, then the process exits 0."""


# -- Commands: train -----------------------------------------------------------------------------------------------


class ForwardBackward(Message):
    """Run these micro-batches and add to the accumulated, un-normalised gradient. All train slots get equally many."""

    micro_batches: tuple[MicroBatch, ...]


class OptimStep(Message):
    """Divide the accumulated gradient by `divisor`, clip, step, advance the schedule. Answered by `Stepped`."""

    divisor: float


class Publish(Message):
    """Make a version available. Answered by `Published`; only the first member's carries the manifest."""

    version: int


class Withdraw(Message):
    """Free what `Publish` of this version and older ones holds. Answered by `Done`."""

    version: int


class SaveState(Message):
    """Write the trainer's state under `path` (DCP). Answered by `Done`."""

    path: str


class LoadState(Message):
    path: str


class ExportModel(Message):
    """Write an HF folder. Answered by `Done`."""

    path: str


# -- Commands: generate and score --------------------------------------------------------------------------------


class Generate(Message):
    """Take these requests. Answered by `Done` at once; results come later in `Finished` events, each request in one."""

    requests: tuple[GenerateRequest, ...]


class Abort(Message):
    """Finish these requests now with what they have (`finish_reason="abort"`). None means all. Answered by `Done`."""

    ids: tuple[str, ...] | None = None


class Receive(Message):
    """Make the version live. Requests in flight go on under the new weights. Answered by `Done`."""

    role: RoleName
    manifest: Manifest


class Score(Message):
    """Log-probs of each sample's tokens. Answered by `Scores`."""

    samples: tuple[Sample, ...]
    model: Literal["policy", "reference"]


# -- Replies -------------------------------------------------------------------------------------------------------


class Done(Message):
    pass


class Failed(Message):
    error: str
    """One sentence for a person."""
    traceback: str = ""


class ForwardBackwardDone(Message):
    num_tokens: int
    """Trained tokens on this rank."""
    busy_s: float


class Stepped(Message):
    report: StepReport


class Published(Message):
    manifest: Manifest | None = None


class Scores(Message):
    logprobs: tuple[tuple[float, ...], ...]
    """One list a sample, as long as its tokens; entry 0 is 0."""


# -- Events (slot to orchestrator) -----------------------------------------------------------------------------------


class Hello(Message):
    pid: int
    device: str


class Heartbeat(Message):
    """Sent by a side thread every second, also while the main thread works."""

    busy_with: str
    """Name of the command in execution, or ""."""
    busy_for_s: float


class Finished(Message):
    generations: tuple[Generation, ...]


class EngineStats(Message):
    """About once a second while the engine works."""

    num_running: int
    num_waiting: int
    num_tokens: int
    """Sampled since start."""
    num_preempted: int
    cache_used: float
    """Share of the KV blocks in use, 0 to 1."""
    version: int


class Died(Message):
    """Not sent by a slot: the launcher or the mailbox reports that one is gone."""

    reason: str


Command = (
    Hold | Drop | Ping | Stop
    | ForwardBackward | OptimStep | Publish | Withdraw | SaveState | LoadState | ExportModel
    | Generate | Abort | Receive | Score
)  # fmt: skip
Reply = Done | Failed | ForwardBackwardDone | Stepped | Published | Scores
Event = Hello | Heartbeat | Finished | EngineStats | Died


class Envelope(msgspec.Struct, frozen=True):
    """What goes over the socket, with the run's token beside it (`ductile.wire.mailbox`)."""

    epoch: int
    seq: int
    """Of the command; its reply carries the same. 0 for events."""
    body: Command | Reply | Event
