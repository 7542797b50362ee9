"""What a run has told of itself by its events, applied one after the other: what `ductile report` and `plan` go by.

Each start or resume of a run begins with its `WorkBegan`. What was told of slots, instances and steps before that is of
another start, and is dropped; sentences are kept from all starts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ductile.core.instances.instances import Instance, InstanceId
from ductile.core.scheduling.profile import Setting, StepProfile
from ductile.events.lines import KINDS, UnreadEvent, read_event
from ductile.events.resizes import TrainerResized
from ductile.events.scheduling import OrdersDone
from ductile.events.slots import SlotRestarted, SlotWasLost
from ductile.events.steps import StepProfiled, WorkBegan
from ductile.observe import RunEvent

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
class RunState:
    """A run since its latest start or resume."""

    began_s: float | None = None
    """Unix time at which the slots had their roles, or of the first event where none says so; None before any event."""
    setting: Setting | None = None
    profiles: list[StepProfile] = field(default_factory=list[StepProfile])
    instances: dict[InstanceId, InstanceSpan] = field(default_factory=dict[InstanceId, InstanceSpan])
    """Generators and scorers in the order in which they began; none of a run whose events do not name them."""
    num_resized: int = 0
    """Resizes of the trainer, whoever asked for them."""
    unreadable: str = ""
    """What is wrong with an event that the state goes by and another version of ductile wrote; empty when all are
    read."""
    unread_kinds: set[str] = field(default_factory=set[str])
    """Kinds of events that another version of ductile wrote and the state does without."""
    sentences: list[RunEvent] = field(default_factory=list[RunEvent])
    """Events of all starts that have a sentence."""

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> "RunState":
        """The state after all events of an `events.jsonl`."""
        state = RunState()
        for row in rows:
            state.apply(read_event(row))
        return state

    def apply(self, event: RunEvent) -> None:
        """Take one more event in."""
        if event.sentence:
            self.sentences.append(event)
        kind = KINDS.get(event.written) if isinstance(event, UnreadEvent) else type(event)
        if kind is WorkBegan:
            self.began_s, self.setting, self.profiles, self.instances = event.time_s, None, [], {}
            self.num_resized, self.unreadable, self.unread_kinds = 0, "", set()
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
                self.profiles.append(profile)
            case TrainerResized():
                self.num_resized += 1
            case OrdersDone(began=None):
                self.instances = {}  # slots change roles, and events of this format name no instances
            case OrdersDone(began=tuple(began), ended=ended) if self.setting:
                self._begin(began, at_s)
                self._end(ended, at_s)
            case SlotRestarted(began=began):
                self._begin(began, at_s)
            case SlotWasLost(slot=slot):
                self._end([name for name, each in self.instances.items() if slot in each.instance.slots], at_s)
            case _:
                pass

    def _begin(self, instances: Iterable[Instance], at_s: float) -> None:
        self.instances |= {each.id: InstanceSpan(each, at_s) for each in instances}

    def _end(self, instances: Iterable[InstanceId], at_s: float) -> None:
        for name in instances:
            if name in self.instances and self.instances[name].ended_s is None:
                self.instances[name] = replace(self.instances[name], ended_s=at_s)
