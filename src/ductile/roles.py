"""What the loop may ask of the others. Across processes `fleet.trainer` and `fleet.requests`
implement these; tests do in memory.

Every call either returns or raises a `Failure` within its deadline: `SlotLost` when a process died, `Late` when it did
not reply, `TrainerLost` when an earlier call has ended the trainer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from ductile.columns import Floats
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.rollouts.provenance import KnownWeights
from ductile.records import GenerateRequest, Generation, Manifest, Sample, StepReport


class Failure(Exception):
    """A failure that callers decide about by its class; the text is a sentence for people.

    A slot's failure crosses the wire as its code (`ductile.messages.workers.Failed`): both sides have the same class.
    """

    code: ClassVar[str]
    """Name of the class for programs; events have it."""
    retryable: ClassVar[bool] = False
    """The same may be asked again, of another instance or later: nothing that it needs is lost."""

    def __init__(self, text: str = "", slot: int | None = None) -> None:
        """slot: the one that failed, where it was asked for something."""
        super().__init__(text)
        self.slot = slot


class SlotLost(Failure):
    """A slot's process is gone. The text is a sentence: which slot, which role, what it did, how it ended."""

    code, retryable = "slot_lost", True


class TrainerLost(Failure):
    """The trainer has been given up: a resize lost a part of its state, or an earlier command to it was `Late`. Every
    later call raises this; the call in which a slot died or was late itself raised `SlotLost` or `Late`."""

    code = "trainer_lost"


class Late(Failure):
    """A deadline passed. The text says who was asked for what, and how long we waited."""

    code = "late"


class Refused(Failure):
    """A slot replied with an error. The text is the slot's sentence; `__notes__` has its traceback."""

    code = "refused"


class NotTaken(Refused):
    """An instance takes no requests at the moment: it has no weights, is about to leave, or is gone."""

    code, retryable = "not_taken", True


class Interrupted(Failure):
    """An instance did not do a request to its end, and lives on as far as one knows: it failed at it, or was silent."""

    code, retryable = "interrupted", True


class OutOfMemory(Refused):
    """A slot has no memory for what it was asked."""

    code = "out_of_memory"


class StaleEpoch(Refused):
    """A command is from before the latest change of membership."""

    code = "stale_epoch"


class StateKept(Refused):
    """A train slot failed at a command that changes no state, such as saving it, and its state is whole."""

    code, retryable = "state_kept", True


REFUSALS: dict[str, type[Refused]] = {
    each.code: each for each in (Refused, NotTaken, OutOfMemory, StaleEpoch, StateKept)
}
"""Classes of what a slot replies instead of a result, by code."""


class CustomCodeFailed(Failure):
    """A function of the user's raised, or returned what is of no use. The text names its key, and what and where."""

    code = "custom_code"


def _raise_unheard(event: Any) -> None:
    """Raises RuntimeError: an event that nobody hears is one that somebody waits for."""
    raise RuntimeError(f"nobody hears {event}: this role was given no `tell`")


@dataclass(frozen=True, slots=True)
class RoleAssignment:
    """Place where a role runs, as the orchestrator decided it. The constructor argument of every `SlotRole`."""

    slot: int
    layout: ParallelLayout
    """Slots that hold the role together; this one is among them."""
    epoch: int
    device: str
    """"cpu" or "cuda:0"."""
    rendezvous: str = ""
    """host:port of the run's store, for groups."""
    joining: bool = False
    """The role's state will come from the slots that hold it now (`messages.workers`: a trainer's with `Prepare`
    and `TransferState`, weights with `Receive`), not from disk."""
    instance: str = ""
    """Id of the instance (generate, score), which is not used again in the run; "" for the trainer."""
    tell: Callable[[Any], None] = _raise_unheard
    """Tells the orchestrator an event (`ductile.messages.workers.Event`), from any thread. Only a train role, which
    prepares resizes in a thread of its own, needs it."""


class TrainerClient(Protocol):
    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks at the moment."""
        ...

    @property
    def micro_batches_per_rank(self) -> int:
        """Micro-batches that a rank wants at a time: one, or as many as fill a pipeline's stages."""
        ...

    async def forward_backward(self, samples: Sequence[Sample], seq_len: int) -> None:
        """Accumulate the samples' gradients, each sample's once, in micro-batches of at most `seq_len` tokens.

        How many ranks there are may change on the way.
        """
        ...

    async def optim_step(self, loss_denominator: float) -> StepReport:
        """Divide what was accumulated by `loss_denominator`, and step. 0: nothing was; only the schedule goes on."""
        ...

    async def publish(self, version: int) -> Manifest: ...

    async def withdraw(self, version: int) -> None: ...

    async def save(self, path: str) -> None: ...

    async def load(self, path: str) -> None: ...

    async def export(self, path: str, dtype: str) -> None:
        """Write an HF folder. dtype: as `ckpt.export_dtype`."""
        ...


class Generators(Protocol):
    @property
    def capacity(self) -> int:
        """How many sequences all generators together run at once. Those that may be about to fail count only where none
        is well."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Wait for one sequence. Cancelling the call aborts the request."""
        ...

    async def receive(self, manifest: Manifest) -> KnownWeights:
        """Return, once every generator samples from this version, what they have been given. Requests in flight go
        on."""
        ...


class Scorer(Protocol):
    async def score(self, samples: Sequence[Sample], model: Literal["policy", "reference"]) -> list[Floats]: ...

    async def receive(self, manifest: Manifest) -> KnownWeights:
        """Return, once every scorer has this version, what they have been given."""
        ...


class Task(Protocol):
    """Prompts and rewards. Plain Python without torch; `ductile.tasks` has the built-in ones.

    A task of one turn needs `__len__`, `messages` and `reward`. One of several turns also overrides `reply`; the others
    have a default that a task need not repeat.
    """

    name: str

    def __len__(self) -> int:
        """Number of examples. Procedural tasks say how many they can make."""
        ...

    def messages(self, example: int) -> list[dict[str, str]]:
        """The conversation that asks example `example`: `[{"role": "user", "content": "1 + 2 ="}]`."""
        ...

    def reward(self, example: int, completion: str) -> "float | tuple[float, dict[str, float]]":
        """Score the policy's last words: a reward, or (reward, metrics); also as an `async def`.

        It may ask for more by name: `def reward(self, example, completion, num_tokens, finish_reason)`
        (`ductile.config.checks.reward_signature.FACTS`).
        """
        ...

    def reply(self, example: int, messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
        """The environment's next words after the policy spoke; None ends the rollout."""
        return None

    def template_variables(self, example: int) -> Mapping[str, Any]:
        """Return variables of the chat template for this example, such as its `tools`."""
        return {}

    def source(self, example: int) -> str:
        """Return where the example comes from, for messages: `train.jsonl:3`."""
        return f"example {example}"


@dataclass(frozen=True, slots=True)
class Later:
    """A reply that is not known yet, as the device still works for it; the slot's main thread takes the next command
    meanwhile."""

    wait: Callable[[], Any]
    """Function that returns the reply once the device is done, called in a thread of its own. What it raises is the
    command's failure."""


class SlotRole(Protocol):
    """A role as its slot holds it, made by `Role(settings, assignment)`. `settings` is the dumped config section that
    came with `AssignRole`.

    The slot's main thread alone calls these, one at a time. But where a message is done beside other work
    (`messages.workers.Message.is_beside`), it is another thread that makes the role, or calls `handle`.
    """

    def handle(self, command: Any) -> Any:
        """Execute one command (`ductile.messages.workers`) and return its reply, or `Later`."""
        ...

    def has_work(self) -> bool:
        """True while `step` would do something. The slot then does not sleep between commands."""
        ...

    def step(self) -> list[Any]:
        """Do one short piece of own work (an engine step) and return the events it caused. A thread that the role has
        started uses `RoleAssignment.tell`."""
        ...

    def close(self) -> None:
        """Free everything; called on `ReleaseRole` and before the process exits."""
        ...
