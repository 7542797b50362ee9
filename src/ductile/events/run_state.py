"""What a run has told of itself by its events, applied one after the other: what the live view, `ductile status`,
`ductile report` and `ductile plan` go by.

Each start or resume of a run begins with its `WorkBegan`. What was told of slots, instances and steps before that is of
another start, and is dropped; sentences are kept from all starts.

What changes without an event is asked where it is: metrics come to listeners of their own, and the seconds of a slot's
ledger, the roles of this moment and the phase of a resize are with the run's own processes (`LiveRun`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ductile.core.instances.instances import Instance, InstanceId
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.events.lines import KINDS, UnreadEvent, read_event
from ductile.events.resizes import ResizeRolledBack, TrainerResized, TrainerWentBack
from ductile.events.rollouts import CanaryDisagreed
from ductile.events.scheduling import OrdersDone, TrainingHeld
from ductile.events.servers import ServerChanged, ServerJoined, ServerLeft
from ductile.events.slots import SlotGivenBack, SlotRestarted, SlotRestarting, SlotWasLost
from ductile.events.steps import StepProfiled, WorkBegan
from ductile.observe import Listener, RunEvent

T = TypeVar("T")

GOES_BY = frozenset({WorkBegan, StepProfiled, TrainerResized, OrdersDone, SlotRestarted, SlotWasLost})
"""Events without which the state is not that of the run."""


@dataclass(frozen=True, slots=True)
class InstanceSpan:
    """A generator or scorer, and when it was there. Seconds are those of the profiles."""

    instance: Instance
    began_s: float
    ended_s: float | None = None
    """Moment from which it was gone; None while it is there."""


@dataclass(slots=True)
class RunState(Listener):
    """A run since its latest start or resume."""

    num_kept: int | None = None
    """How many profiles, resizes, waits and sentences are kept, the latest of each; the instances that have ended are
    not. None: all are kept, and the instances too."""
    began_s: float | None = None
    """Unix time at which the slots had their roles, or of the first event where none says so; None before any event."""
    setting: Setting | None = None
    profiles: list[StepProfile] = field(default_factory=list[StepProfile])
    instances: dict[InstanceId, InstanceSpan] = field(default_factory=dict[InstanceId, InstanceSpan])
    """Generators and scorers in the order in which they began; none of a run whose events do not name them."""
    given_back: set[int] = field(default_factory=set[int])
    """Lost slots that are not started again."""
    restarting: set[int] = field(default_factory=set[int])
    """Lost slots that are being started again."""
    servers: dict[str, str] = field(default_factory=dict[str, str])
    """State of each server that is in the run's fleet."""
    resizes: list[TrainerResized | ResizeRolledBack] = field(default_factory=list[TrainerResized | ResizeRolledBack])
    """Resizes of the trainer, done or not, those by a policy and those by `ductile resize`."""
    goings_back: list[TrainerWentBack] = field(default_factory=list[TrainerWentBack])
    """Times that the trainer lost slots and went back to a checkpoint, of all starts."""
    disagreements: list[CanaryDisagreed] = field(default_factory=list[CanaryDisagreed])
    """Canaries of which a generator did not say what the trainer says."""
    waits: list[TrainingHeld] = field(default_factory=list[TrainingHeld])
    """Events of all starts in which training began to wait, or went on: several a step."""
    unreadable: str = ""
    """What is wrong with an event that the state goes by and another version of ductile wrote; empty when all are
    read."""
    unread_kinds: set[str] = field(default_factory=set[str])
    """Kinds of events that another version of ductile wrote and the state does without."""
    sentences: list[RunEvent] = field(default_factory=list[RunEvent])
    """All other events of all starts that have a sentence."""

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> "RunState":
        """The state after all events of an `events.jsonl`."""
        state = RunState()
        for row in rows:
            state.apply(read_event(row))
        return state

    def apply(self, event: RunEvent) -> None:
        """Take one more event in."""
        if event.sentence and not isinstance(event, TrainingHeld):
            self._keep(self.sentences, event)
        kind = KINDS.get(event.written) if isinstance(event, UnreadEvent) else type(event)
        if kind is WorkBegan:
            self.began_s, self.setting, self.profiles, self.instances = event.time_s, None, [], {}
            self.given_back, self.restarting, self.resizes, self.servers = set(), set(), [], {}
            self.disagreements = []
            self.unreadable, self.unread_kinds = "", set()
        if self.began_s is None:
            self.began_s = event.time_s
        at_s = event.time_s - self.began_s
        match event:
            case UnreadEvent(why=why) if kind in GOES_BY:
                self.unreadable = self.unreadable or why
            case UnreadEvent(written=written):
                self.unread_kinds.add(written)
            case WorkBegan(setting=setting):
                self.setting, self.instances = setting, {each.id: InstanceSpan(each, 0.0) for each in setting.instances}
            case StepProfiled(profile=profile):
                self._keep(self.profiles, profile)
            case TrainerResized() | ResizeRolledBack():
                self._keep(self.resizes, event)
            case TrainerWentBack():
                self._keep(self.goings_back, event)
            case CanaryDisagreed():
                self._keep(self.disagreements, event)
            case TrainingHeld():
                self._keep(self.waits, event)
            case OrdersDone(began=None):
                self.instances = {}  # slots change roles, and events of this format name no instances
            case OrdersDone(began=tuple(began), ended=ended) if self.setting:
                self._begin(began, at_s)
                self._end(ended, at_s)
            case SlotRestarted(slot=slot, began=began):
                self.given_back.discard(slot)
                self.restarting.discard(slot)
                self._begin(began, at_s)
            case SlotGivenBack(slot=slot):
                self.given_back.add(slot)
                self.restarting.discard(slot)
            case SlotRestarting(slot=slot):
                self.restarting.add(slot)
            case SlotWasLost(slot=slot):
                self._end([name for name, each in self.instances.items() if slot in each.instance.slots], at_s)
            case ServerJoined(server=server):
                self.servers[server] = "ready"
            case ServerChanged(server=server, after=after):
                self.servers[server] = after
            case ServerLeft(server=server):
                self.servers.pop(server, None)
            case _:
                pass

    on_event = apply

    def _keep(self, kept: list[T], latest: T) -> None:
        kept.append(latest)
        if self.num_kept is not None:
            del kept[: -self.num_kept]

    def _begin(self, instances: Iterable[Instance], at_s: float) -> None:
        for each in instances:  # one that came back while slots changed roles is told twice
            self.instances.setdefault(each.id, InstanceSpan(each, at_s))

    def _end(self, instances: Iterable[InstanceId], at_s: float) -> None:
        for name in instances:
            if self.num_kept is not None:
                self.instances.pop(name, None)
            elif name in self.instances and self.instances[name].ended_s is None:
                self.instances[name] = replace(self.instances[name], ended_s=at_s)
