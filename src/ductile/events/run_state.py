"""What a run has told of itself by its events, one applied after the other: what `ductile report` and `plan` go by.

Each start or resume of a run begins with its `setting`. What was told of slots, instances and steps before that is of
another start, and is dropped; sentences are kept from all starts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ductile.core.instances.instances import Instance, InstanceId, instances_from
from ductile.core.scheduling.profile import Setting, StepProfile
from ductile.observe import LoggedEvent


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
    """Resizes of the trainer, those by a policy and those by `ductile resize`."""
    unreadable: str = ""
    """What is wrong with an event that another version of ductile wrote; empty when all are read."""
    sentences: list[LoggedEvent] = field(default_factory=list[LoggedEvent])
    """Events of all starts that have a sentence."""

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> "RunState":
        """The state after all events of an `events.jsonl`."""
        state = RunState()
        for row in rows:
            state.apply(LoggedEvent.from_row(row))
        return state

    def apply(self, event: LoggedEvent) -> None:
        """Take one more event in. What it should have and has not is told in `unreadable`."""
        if event.sentence:
            self.sentences.append(event)
        if event.kind == "setting":
            self.began_s, self.setting, self.profiles, self.instances = event.time_s, None, [], {}
            self.num_resized, self.unreadable = 0, ""
        elif self.began_s is None:
            self.began_s = event.time_s
        try:
            self._apply(event, event.time_s - (self.began_s or 0.0))
        except (KeyError, TypeError, ValueError) as error:
            self.unreadable = self.unreadable or repr(error)

    def _apply(self, event: LoggedEvent, at_s: float) -> None:
        match event.kind:
            case "setting":
                self.setting = Setting.from_fields(event.fields)
                self.instances = {each.id: InstanceSpan(each, 0.0) for each in self.setting.instances}
            case "profile":
                self.profiles.append(StepProfile.from_fields(event.fields))
            case "resized":
                self.num_resized += 1
            case "switched" if self.setting and self.setting.version == 1:
                self.instances = {}  # slots change roles, and events of this format name no instances
            case "switched" if self.setting:
                self._begin(instances_from(event.fields["began"]), at_s)
                self._end(event.fields["ended"], at_s)
            case "slot_restarted":
                self._begin(instances_from(event.fields["began"]), at_s)
            case "slot_lost":
                lost = [name for name, each in self.instances.items() if event.fields["slot"] in each.instance.slots]
                self._end(lost, at_s)
            case _:
                pass

    def _begin(self, instances: Iterable[Instance], at_s: float) -> None:
        for each in instances:  # one that came back while slots changed roles is told twice
            self.instances.setdefault(each.id, InstanceSpan(each, at_s))

    def _end(self, instances: Iterable[InstanceId], at_s: float) -> None:
        for name in instances:
            if name in self.instances and self.instances[name].ended_s is None:
                self.instances[name] = replace(self.instances[name], ended_s=at_s)
