"""Everything the orchestrator and a slot say to each other; what belongs to a resize is in `ductile.messages.resizes`,
to an update of servers in `outgoing_updates`. One class a verb; the class name is the tag on the wire.

Commands go to one slot and have exactly one reply (its own class, or `Failed`). Events are unsolicited.
`Envelope` carries epoch and sequence number; a slot refuses an older epoch than the newest it has seen.
"""

from typing import Any, Literal

import msgspec

from ductile.columns import Floats
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.model.peak import Arithmetic
from ductile.messages.message import Message, RoleName
from ductile.messages.outgoing_updates import BeginUpdate, FinishUpdate, LeaveOut, UpdateBegun, UpdateSent
from ductile.messages.resizes import (
    Commit,
    Finalize,
    Freeze,
    Frozen,
    Prepare,
    Rollback,
    StateTransferred,
    TransferState,
)
from ductile.messages.updates import LiveDigest
from ductile.records import (
    AS_IN_SOURCE,
    ChatFormat,
    GenerateRequest,
    Generation,
    KVHandle,
    Manifest,
    MicroBatch,
    Sample,
    StepReport,
)

# -- Commands: any slot ------------------------------------------------------------------------------------------


class AssignRole(Message):
    """Take a role. Reply: `Done` when the role is ready to work (model built, weights loaded, groups joined)."""

    role: RoleName
    settings: dict[str, Any]
    """The role's config section, dumped (`ductile.config`); the role validates it again on its side."""
    layout: ParallelLayout
    """Layout of the slots that hold this role together (train); of those of the instance otherwise."""
    rendezvous: str = ""
    """host:port of the run's store; empty when no groups are needed."""
    joining: bool = False
    """Build what needs no state, and read no weights from disk: they come from the slots that have them, by `Prepare`
    (train) or by `Receive` (generate, score). Until then the role can do nothing else."""
    instance: str = ""
    """Id of the instance (generate, score); "" for the trainer."""

    @property
    def is_beside(self) -> bool:
        return self.joining

    def roles_after(self, roles: tuple[RoleName, ...]) -> tuple[RoleName, ...]:
        return roles if self.role in roles else (*roles, self.role)


class ReleaseRole(Message):
    """Give the role up and free what it held. Reply: `Done`."""

    role: RoleName

    def roles_after(self, roles: tuple[RoleName, ...]) -> tuple[RoleName, ...]:
        return tuple(role for role in roles if role != self.role)


class Ping(Message):
    """Reply: `Done` from the main thread: it proves that the slot executes commands, not only that it lives."""


class Stop(Message):
    """Leave. Reply: `Done`, then the process exits 0."""


class Survey(Message):
    """Say what the device is, can do and has used. Reply: `Surveyed`."""

    measure: Arithmetic | None = None
    """Arithmetic of which the slot also says how fast it multiplies matrices; None: of none. Where no table knows, the
    slot measures it, and nothing else should run on the machine meanwhile."""


class BeginTrace(Message):
    """Trace what the main thread and the GPU do from now on. Reply: `Done`."""

    file: str = ""
    """File that the trace is written to at its end, in Chrome's format; "" writes none. A slot that leaves before
    `EndTrace` writes what it has."""


class EndTrace(Message):
    """End what `BeginTrace` began. Reply: `Traced`."""


CLOCK_EVENT = "ductile: unix time in ns: "
"""How the name of a trace's first event begins; the number that follows says when that was."""


# -- Commands: train -----------------------------------------------------------------------------------------------


class ForwardBackward(Message):
    """Run these micro-batches and add to the accumulated, un-normalised gradient. All train slots get equally many."""

    micro_batches: tuple[MicroBatch, ...]

    def count_tokens(self) -> int:
        return sum(each.num_tokens for each in self.micro_batches)


class OptimStep(Message):
    """Divide the gradient by `loss_denominator`, clip it, step, advance the schedule. Reply: `Stepped`."""

    loss_denominator: float
    """0: there is no gradient, and only the schedule advances."""


class Publish(Message):
    """Make a version available. Reply: `Published`; only that of the layout's first slot carries the manifest."""

    version: int
    with_frozen: bool = True
    """Make the tensors available, too, that training does not change. Without them it is for those that have them."""


class Withdraw(Message):
    """Free what `Publish` of this version and older ones holds. Reply: `Done`."""

    version: int


class Park(Message):
    """Move this slot's part of the trainer to host memory, and free what it had on the device, which is lent to another
    role. Reply: `StateMoved`. Done already: nothing happens."""


class Unpark(Message):
    """Take the state back to where it was on the device, which no other role uses any more. Reply: `StateMoved`.
    Nothing happens where it is there."""


class SaveState(Message):
    """Write the trainer's state under `path` (DCP). Reply: `Done`."""

    path: str


class LoadState(Message):
    path: str


class ExportModel(Message):
    """Write an HF folder. Reply: `Done`."""

    path: str
    dtype: str
    """Dtype of the exported weights, spelled as in `ckpt.export_dtype`."""
    chat_format: ChatFormat = AS_IN_SOURCE
    """Chat format of the folder."""


# -- Commands: generate and score --------------------------------------------------------------------------------


class Generate(Message):
    """Take these requests. Reply: `Done` at once; results come later in `Finished` events, each request in one."""

    requests: tuple[GenerateRequest, ...]
    caches: dict[str, KVHandle] = msgspec.field(default_factory=dict[str, KVHandle])
    """KV caches that another generator has computed, by request id. A cache that cannot be read any more, or was
    computed under other weights, is computed again."""

    def count_tokens(self) -> int:
        return sum(len(request.prompt) + len(request.generated) for request in self.requests)


class Abort(Message):
    """Finish these requests now with what they have (`finish_reason="abort"`). None means all. Reply: `Done`."""

    ids: tuple[str, ...] | None = None


class MigrateOut(Message):
    """Give these requests away: this generator forgets them. Reply: `MigratedOut`."""

    ids: tuple[str, ...]
    with_cache: tuple[str, ...] = ()
    """Requests of `ids` whose KV cache goes along; the slot keeps it for the receivers until `Forget`."""


class Forget(Message):
    """Free the caches that `MigrateOut` kept for others. Reply: `Done`."""

    ids: tuple[str, ...]


class OfferWeights(Message):
    """Offer the live weights to an instance that joins the role, or another one. Reply: `Published`, whose
    manifest is good until `EndOffer`."""

    role: RoleName


class EndOffer(Message):
    """Free what `OfferWeights` offers. Reply: `Done`."""

    role: RoleName


class Receive(Message):
    """Make the version live. Requests in flight go on under the new weights. Reply: `Done`."""

    role: RoleName
    manifest: Manifest
    joining: bool = False
    """The role has no weights yet, and so no requests."""

    @property
    def is_beside(self) -> bool:
        return self.joining


class DigestWeights(Message):
    """Read the generator's live weights. Reply: `WeightDigests`."""


class Score(Message):
    """Log-probs of each sample's tokens. Reply: `Scores`, of the first of the slots that are asked."""

    samples: tuple[Sample, ...]
    model: Literal["policy", "reference"]
    role: RoleName = "score"
    """train: by the trainer as it is now, which every train slot is asked."""

    def count_tokens(self) -> int:
        return sum(map(len, self.samples))


# -- Replies -------------------------------------------------------------------------------------------------------


class Done(Message):
    pass


class Failed(Message):
    error: str
    """One sentence for a person."""
    traceback: str = ""
    code: str = "refused"
    """Code of the failure's class (`ductile.roles.REFUSALS`), by which callers decide."""


class ForwardBackwardDone(Message):
    num_tokens: int
    """Trained tokens on this rank."""
    busy_s: float


class Stepped(Message):
    report: StepReport


class Surveyed(Message):
    device_name: str
    """"NVIDIA H200", "cpu"."""
    used_bytes: int
    """Peak memory so far: on a GPU what the slot's tensors took, else what its process had resident."""
    reserved_bytes: int | None
    """Peak GPU memory that torch has reserved so far; None on a CPU."""
    peak_flops_per_s: float | None = None
    """Floating-point operations a second in matrix products; None where `Survey` did not ask for it."""
    peak_source: Literal["known", "measured"] | None = None
    total_bytes: int | None = None
    """Memory of the GPU; None on a CPU."""


class Traced(Message):
    seconds: float
    """Seconds from `BeginTrace` to `EndTrace`."""
    communication_s: float
    """Those of them in which a collective was under way, waits for other ranks included."""


class Published(Message):
    manifest: Manifest | None = None


class StateMoved(Message):
    """A train slot has parked its part of the trainer in host memory, or has it back."""

    num_bytes: int
    """Bytes that were moved."""
    device_bytes: int
    """Bytes of the trainer on the device while it is parked: right after it was moved to host memory, or right before
    it came back."""
    seconds: float


class Scores(Message):
    logprobs: tuple[Floats, ...]
    """One column a sample, as long as its tokens; entry 0 is 0."""


class WeightDigests(Message):
    live: LiveDigest


class MigratedOut(Message):
    requests: tuple[GenerateRequest, ...]
    """The requests with the tokens that they have so far, ready to be sent to another generator under the same ids.
    Requests that ended before are missing: their `Finished` was sent before this."""
    caches: dict[str, KVHandle] = msgspec.field(default_factory=dict[str, KVHandle])


# -- Events (slot to orchestrator) -----------------------------------------------------------------------------------


class Hello(Message):
    pid: int
    device: str


class Heartbeat(Message):
    """Sent by a side thread every second, also while the main thread works."""

    busy_with: str
    """Name of the command that the main thread executes; "" when there is none."""
    busy_for_s: float


class Terminating(Message):
    """SIGTERM has come to the slot's process, which works on: somebody is about to end it."""


class PreparationEnded(Message):
    """The end of what `Prepare` began. The thread that did it says so, whatever the main thread is at."""

    epoch: int
    failure: Failed | None = None
    """Reason for which the slot cannot take part in the change; None when it can."""


class Finished(Message):
    generations: tuple[Generation, ...]


class EngineStats(Message):
    """Sent twice a second while the engine works, and when it has nothing more to do."""

    num_running: int
    num_waiting: int
    num_tokens: int
    """Tokens that the engine has sampled since its start."""
    num_preempted: int
    cache_used: float
    """Share of the KV blocks in use, 0 to 1."""
    version: int
    generated: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Tokens sampled so far, by request in flight."""
    decoded: tuple[tuple[float, float, float], ...] = ()
    """Steps since the last statistics that only decoded: (sequences, tokens in their contexts, seconds), each the mean
    of some steps of about the same size. Steps that copied a migrated cache are neither here nor below."""
    prefilled: tuple[int, float] = (0, 0.0)
    """Tokens of prompts or migrated contexts that were computed since the last statistics, and the seconds that this
    took. A step in which others decoded counts with the seconds that it took longer than one that only decoded."""


TrainCommand = (
    ForwardBackward | OptimStep | Publish | Withdraw | Park | Unpark | SaveState | LoadState | ExportModel
    | BeginUpdate | FinishUpdate | LeaveOut | Prepare | Freeze | TransferState | Commit | Rollback | Finalize
)  # fmt: skip
Command = (
    AssignRole | ReleaseRole | Ping | Stop | Survey | BeginTrace | EndTrace | TrainCommand
    | Generate | Abort | MigrateOut | Forget | OfferWeights | EndOffer | Receive | DigestWeights | Score
)  # fmt: skip
Reply = (
    Done | Failed | Surveyed | Traced
    | ForwardBackwardDone | Stepped | StateMoved | Frozen | StateTransferred | Published | UpdateBegun
    | Scores | WeightDigests | MigratedOut
)  # fmt: skip
Event = Hello | Heartbeat | Terminating | PreparationEnded | UpdateSent | Finished | EngineStats


class Envelope(msgspec.Struct, frozen=True):
    """All that goes over the socket, with the run's token beside it (`transport.router`, `transport.dealer`)."""

    epoch: int
    seq: int
    """Number of the command; its reply carries the same. 0 for events."""
    body: Command | Reply | Event
