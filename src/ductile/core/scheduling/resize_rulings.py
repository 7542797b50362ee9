"""What becomes of a resize when something happens in the middle of it.

Until `Finalize` every slot still has what it had (in streaming mode: until bytes move), so as long as all slots of a
layout are well, that layout can go on with the state as it was frozen. Hence one rule:

- before all slots have voted for the new state, only the old layout can go on;
- afterwards the new layout goes on if its slots are well, else the old one;
- a layout that lacks a slot lacks that slot's part of the state: when neither can go on, the trainer stops.

A ruling comes with its reason, a sentence for a person. `ductile.elastic.transaction` waits, asks and kills.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ductile.core.instances.placement import many, slots_of
from ductile.core.layout.choice.layout_text import in_words
from ductile.core.layout.geometry.parallel_layout import ONE_SLOT_RANK, ParallelLayout, ResizeOrder
from ductile.records import TrainProgress

Phase = Literal["assign", "prepare", "freeze", "transfer", "commit", "finalize", "rollback"]
"""Step of a resize, whose outcomes are to be judged."""

Verdict = Literal["proceed", "rollback", "stop"]


@dataclass(frozen=True, slots=True)
class Ruling:
    verdict: Verdict
    reason: str
    """Why the verdict is not `proceed`, in a sentence; "" when it is."""


PROCEED = Ruling("proceed", "")

MOST_REASONS = 3
"""Number of slots' reasons that one ruling repeats. When a collective fails, its slots seldom say more than that."""


def judge(
    phase: Phase, order: ResizeOrder, dead: Mapping[int, str], failed: Mapping[int, str], keeps_old: bool = True
) -> Ruling:
    """How to go on after a step of the transaction.

    Args:
        phase: the step. `commit` and `finalize` are told after every slot has voted for the change.
        dead: slots whose process is gone, with the sentence that says how.
        failed: slots that live and did not do the step, with what they said, or that they said nothing.
        keeps_old: the old state stays whole while the new one is built; without, a change that has begun to move
            cannot be taken back.
    """
    lacking = {*dead, *failed}
    if phase == "rollback":
        # Taking back is all that is left; a joiner that cannot even do that has nothing that is needed.
        bad = lacking.intersection(order.before.slots)
        return _stop(order.before, bad, dead, failed) if bad else PROCEED
    voted = phase in ("commit", "finalize")
    going_on = lacking.intersection(order.after.slots if voted else order.slots)
    if not going_on:
        return PROCEED
    lost = set(dead).intersection(order.before.slots)
    if phase == "finalize":  # some slots may have freed what taking back would need
        lost = going_on.intersection(dead)
        return _stop(order.after, lost, dead, failed) if lost else PROCEED
    if lost:
        return _stop(order.before, lost, dead, failed)
    if not keeps_old and phase in ("transfer", "commit"):
        return Ruling("stop", f"{_reasons(going_on, dead, failed)}; the old state was given up while it moved")
    return Ruling("rollback", _reasons(going_on, dead, failed))


def violation_in_plans(keys: Mapping[int, bytes]) -> str:
    """A sentence when not all slots have made the same plan; "" when they have."""
    makers: dict[bytes, list[int]] = {}
    for slot, key in sorted(keys.items()):
        makers.setdefault(key, []).append(slot)
    if len(makers) <= 1:
        return ""
    most, *others = sorted(makers.values(), key=len, reverse=True)
    differing = [slot for group in others for slot in group]
    return f"{slots_of(differing)} made another plan than {slots_of(most)}"


def violation_in_progress(progress: Mapping[int, TrainProgress]) -> str:
    """A sentence when slots that train together are not equally far; "" when they are."""
    first, *others = sorted(progress)
    known = _far(progress[first])
    for slot in others:
        if _far(progress[slot]) != known:
            return f"slot {slot} is at {_at(progress[slot])}, slot {first} at {_at(progress[first])}"
    return ""


def violation_in_bytes(sent: Mapping[int, Mapping[int, int]], received: Mapping[int, Mapping[int, int]]) -> str:
    """A sentence when a slot has not received what another one sent it, by their fingerprints; "" when all have."""
    wrong = [
        (source, target)
        for source in sorted(sent)
        for target in sorted(sent)
        if sent[source].get(target) != received[target].get(source)
    ]
    if not wrong:
        return ""
    pairs = ", ".join(f"{source} to {target}" for source, target in wrong)
    return f"what arrived is not what was sent, from slot {pairs}"


def total(progress: Mapping[int, TrainProgress]) -> TrainProgress:
    """Progress of the trainer as a whole: its slots' sums added up, in ascending order of slots."""
    first = progress[min(progress)]
    sums: dict[str, float] = {}
    for slot in sorted(progress):
        for name, value in progress[slot].sums.items():
            sums[name] = sums.get(name, 0.0) + value
    return TrainProgress(first.step, first.num_updates, first.with_gradient, sums)


def describe(layout: ParallelLayout) -> str:
    """The layout in words: "slots 0-3", "slots 0-3 in 2 copies", "slots 0-7 as pp 2 · dp_shard 2 · tp 2"."""
    where, dims = slots_of(layout.slots), layout.dims
    if dims.rank_shape != ONE_SLOT_RANK or dims.ep > 1:
        return f"{where} as {in_words(dims)}"
    return f"{where} in {dims.dp_replicate} copies" if dims.dp_replicate > 1 else where


def _stop(layout: ParallelLayout, slots: Collection[int], dead: Mapping[int, str], failed: Mapping[int, str]) -> Ruling:
    parts = layout.num_shards
    held = "all of the trainer's state" if parts == 1 else f"1 of {parts} parts of the trainer's state"
    each = " each" if len(slots) > 1 else ""
    copies = "; restoring it from another copy is not supported yet" if layout.dims.dp_replicate > 1 else ""
    return Ruling("stop", f"{_reasons(slots, dead, failed)}; {slots_of(slots)} held {held}{each}{copies}")


def _reasons(slots: Collection[int], dead: Mapping[int, str], failed: Mapping[int, str]) -> str:
    """What the slots say; of a death alone if there is one, as the others' failures usually follow from it."""
    deaths = [dead[slot] for slot in sorted(slots) if slot in dead]
    failures = [failed[slot] for slot in sorted(slots) if slot not in dead]
    sentences = list(dict.fromkeys(sentence.rstrip(".") for sentence in (*deaths, *failures)))
    repeated = sentences[: 1 if deaths else MOST_REASONS]
    num_more = len(sentences) - len(repeated)
    return "; ".join(repeated) + (f" (and {num_more} more)" if num_more else "")


def _far(progress: TrainProgress) -> tuple[int, int, bool]:
    return progress.step, progress.num_updates, progress.with_gradient


def _at(progress: TrainProgress) -> str:
    inside = "in the middle of a batch" if progress.with_gradient else "between batches"
    return f"step {progress.step}, {inside}, after {many(progress.num_updates, 'update')}"
