"""Lines of `events.jsonl` as typed events. Reading goes on over what another version of ductile wrote."""

from collections.abc import Mapping
from typing import Any

from ductile.events import checkpoints, ending, nodes, resizes, rollouts, scheduling, servers, slots, steps
from ductile.observe import JournalUnwritable, ListenerFailed, RunEvent

KINDS: dict[str, type[RunEvent]] = {
    str(each.__struct_config__.tag): each
    for each in (
        slots.SlotStarted,
        slots.SlotWasLost,
        slots.SlotRestarting,
        slots.SlotRestarted,
        slots.SlotGivenBack,
        slots.SlotNoticed,
        slots.SlotGone,
        slots.SlotNotEmptied,
        slots.SlotIsBack,
        nodes.NodesAwaited,
        nodes.NodesRequested,
        nodes.NodeJoined,
        nodes.NodeWasLost,
        nodes.NodeWasNoticed,
        servers.ServerJoined,
        servers.ServerChanged,
        servers.ServerLeft,
        servers.ServerNoted,
        servers.WeightUpdateEnded,
        steps.WorkBegan,
        steps.StepProfiled,
        steps.BatchesReady,
        steps.NothingToLearn,
        steps.StepSkipped,
        steps.Evaluated,
        rollouts.PromptSkipped,
        rollouts.DataNoted,
        rollouts.GroupDropped,
        rollouts.GroupRefused,
        rollouts.PromptDroppedTwice,
        rollouts.CanaryDisagreed,
        rollouts.RequestRestarted,
        rollouts.RewardError,
        rollouts.GradersNotFenced,
        checkpoints.OldRunReplaced,
        checkpoints.RunResumed,
        checkpoints.StartedAnew,
        checkpoints.CheckpointRenamed,
        checkpoints.CheckpointSaved,
        checkpoints.ModelExported,
        checkpoints.CheckpointNotSaved,
        checkpoints.ModelNotExported,
        scheduling.OrdersGiven,
        scheduling.TrainingHeld,
        scheduling.OrdersDone,
        scheduling.StateParked,
        scheduling.PolicyFailed,
        resizes.TrainerResized,
        resizes.ResizeRolledBack,
        resizes.TrainerWentBack,
        ending.StopAsked,
        ending.EndedAsAsked,
        ending.EndedByDeath,
        ending.EndedByFailure,
        ListenerFailed,
        JournalUnwritable,
    )
}
"""Every kind of event, by its word in the file."""
EARLIER = {"restarted": "request_restarted", "refused": "policy_failed"}
"""Words of earlier versions, which other things have, too, with those of today."""


class UnreadEvent(RunEvent, tag="", frozen=True):
    """A line that is no event of this version: its kind is unknown, or it lacks a field. Its sentence is read."""

    written: str
    """Kind of the line."""
    why: str
    """What is wrong with it."""


def read_event(row: Mapping[str, Any]) -> RunEvent:
    """The event of a line; an `UnreadEvent` where this version cannot read it."""
    row = {**row, "kind": EARLIER.get(row["kind"], row["kind"])}
    kind = KINDS.get(row["kind"])
    why = f"the kind {row['kind']!r} is unknown"
    if kind is not None:
        try:
            return kind.from_row(row)
        except (KeyError, TypeError, ValueError) as error:
            why = repr(error)
    return UnreadEvent(written=row["kind"], why=why, sentence=row["sentence"], time_s=row["time"])
