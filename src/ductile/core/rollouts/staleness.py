"""How far generation may run ahead of training, and when a rollout is too old to learn from.

Step `s` trains on `groups_per_step` groups, starting from weight version `s`. Three decisions:

- `admission`: how many more groups may be started now? Groups that are started and not yet trained on never exceed
  `1 + ahead` steps' worth, where `ahead` is `max_async_level`, or `max_off_policy_steps` when that is smaller: what
  is certain to be too old on arrival is not started.
- `freshness`: may a group with this oldest token be trained on? Its age never exceeds `max_off_policy_steps`.
- `take_order`: which finished groups may the trainer take, in which order? With `on_stale` "drop", all, as they
  finished: what then becomes too old is dropped, which falls on long completions. With "wait", the oldest first, and a
  younger one only while the steps that are left to the older ones still have room for those that are being generated.

Invariants (tests/core/scheduling/test_staleness.py): no group is trained on beyond the bound, whatever the delays; with
`ahead` 0 every token comes from the version that is trained; a step can always get its groups, so nothing deadlocks;
with "wait" no group is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ductile.core.instances.placement import many

OnStale = Literal["drop", "wait"]
"""Fate of a group whose completions take longer than `max_off_policy_steps`: it is dropped and its prompt asked
again; or the trainer waits for it."""


@dataclass(frozen=True, slots=True)
class StalenessBound:
    groups_per_step: int
    max_async_level: int
    max_off_policy_steps: int
    on_stale: OnStale = "drop"

    @property
    def ahead(self) -> int:
        return min(self.max_async_level, self.max_off_policy_steps)


@dataclass(frozen=True, slots=True)
class Admission:
    num_groups: int
    """Groups that may be started now."""
    reason: str


@dataclass(frozen=True, slots=True)
class Freshness:
    fresh: bool
    age: int
    """Versions between the group's oldest token and the weights that would be trained."""
    reason: str


def admission(bound: StalenessBound, *, outstanding: int, taken: int, steps_left: int) -> Admission:
    """How many groups may be started, while step `s` is being trained and generators sample from version `s`.

    outstanding: groups started and not taken by the trainer, running or waiting in the buffer.
    taken: groups that the current step has taken already.
    steps_left: steps until the end, the current one included; what would not be trained on is not started.
    """
    steps = min(1 + bound.ahead, steps_left)
    room = steps * bound.groups_per_step - taken - outstanding
    if room > 0:
        return Admission(room, f"{many(outstanding, 'group')} outstanding, {many(steps, 'step')} to fill")
    if steps == steps_left:
        return Admission(0, "every step that is left has its groups")
    return Admission(
        0,
        f"{many(outstanding, 'group')} outstanding and {taken} in training fill the current step and the {bound.ahead} "
        f"that generation may run ahead (max_async_level {bound.max_async_level}, "
        f"max_off_policy_steps {bound.max_off_policy_steps})",
    )


def freshness(bound: StalenessBound, *, version: int, oldest_version: int) -> Freshness:
    """Return whether a group whose oldest token was sampled from `oldest_version` may train version `version`."""
    age = max(0, version - oldest_version)
    if age <= bound.max_off_policy_steps:
        return Freshness(True, age, f"{many(age, 'version')} old, with at most {bound.max_off_policy_steps} allowed")
    return Freshness(
        False,
        age,
        f"its oldest token is {many(age, 'version')} old, max_off_policy_steps is {bound.max_off_policy_steps}",
    )


def take_order(
    bound: StalenessBound, *, version: int, taken: int, finished: Sequence[int], running: Sequence[int]
) -> list[int]:
    """Return the places in `finished` of the groups that may be taken now, in the order in which to take them. However
    many are taken, from the first on, all others can still be trained on in time.

    taken: groups that the step, which trains `version`, has taken already. finished: oldest version of each finished
    group, in the order in which they finished. running: versions in which the groups in generation were started.

    A group of version v must be taken in step `v + max_off_policy_steps` at the latest. Those in generation that are as
    old as v or older keep places in the steps until then, and a younger group takes none of these. Because `admission`
    never starts more than the steps until then have places for, whoever waits, waits only for generation.
    """
    if bound.on_stale == "drop":
        return list(range(len(finished)))
    places = sorted(range(len(finished)), key=lambda place: finished[place])
    # Nobody waits for what is too old already.
    awaited = sorted(each for each in running if freshness(bound, version=version, oldest_version=each).fresh)
    most, num_older = len(places), 0
    for number, place in enumerate(places):
        while num_older < len(awaited) and awaited[num_older] < finished[place]:
            steps = awaited[num_older] + bound.max_off_policy_steps + 1 - version
            num_older += 1
            most = min(most, steps * bound.groups_per_step - taken - num_older)
        if number >= most:
            return places[:number]
    return places
