"""What becomes of a change, as a table; and its rule against a dumb twin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.geometry.parallel_layout import ParallelLayout, ResizeOrder
from ductile.core.scheduling.resize_rulings import (
    Phase,
    describe,
    judge,
    total,
    violation_in_bytes,
    violation_in_plans,
    violation_in_progress,
)
from ductile.records import TrainProgress

GROW = ResizeOrder(5, ParallelLayout.of((0, 1)), ParallelLayout.of((1, 2, 3)))
"""0 leaves, 1 stays, 2 and 3 join."""


@pytest.mark.parametrize(
    ("phase", "dead", "failed", "verdict", "reason"),
    [
        ("prepare", [], [], "proceed", ""),
        ("assign", [2], [], "rollback", "2 is dead"),
        ("prepare", [3], [2], "rollback", "3 is dead (and 1 more)"),
        ("prepare", [], [0, 3], "rollback", "0 failed; 3 failed"),
        ("prepare", [], [0, 1, 2, 3], "rollback", "0 failed; 1 failed; 2 failed (and 1 more)"),
        ("freeze", [], [0], "rollback", "0 failed"),
        ("transfer", [1], [2], "stop", "1 is dead; slot 1 held 1 of 2 parts of the trainer's state"),
        ("transfer", [0], [], "stop", "0 is dead; slot 0 held 1 of 2 parts of the trainer's state"),
        (
            "transfer",
            [0, 1],
            [],
            "stop",
            "0 is dead (and 1 more); slots 0-1 held 1 of 2 parts of the trainer's state each",
        ),
        ("commit", [0], [], "proceed", ""),
        ("commit", [], [0], "proceed", ""),
        ("commit", [2], [], "rollback", "2 is dead"),
        ("commit", [], [1], "rollback", "1 failed"),
        ("commit", [1], [], "stop", "1 is dead; slot 1 held 1 of 2 parts of the trainer's state"),
        ("commit", [0, 2], [], "stop", "0 is dead; slot 0 held 1 of 2 parts of the trainer's state"),
        ("finalize", [0], [1], "proceed", ""),
        ("finalize", [2], [], "stop", "2 is dead; slot 2 held 1 of 3 parts of the trainer's state"),
        ("rollback", [2, 3], [], "proceed", ""),
        ("rollback", [], [0], "stop", "0 failed; slot 0 held 1 of 2 parts of the trainer's state"),
    ],
)
def test_verdicts(phase: Phase, dead: list[int], failed: list[int], verdict: str, reason: str):
    ruling = judge(
        phase, GROW, {slot: f"{slot} is dead." for slot in dead}, {slot: f"{slot} failed" for slot in failed}
    )
    assert (ruling.verdict, ruling.reason) == (verdict, reason)


@pytest.mark.parametrize(
    ("phase", "verdict"), [("assign", "rollback"), ("freeze", "rollback"), ("transfer", "stop"), ("commit", "stop")]
)
def test_a_change_that_gives_the_old_state_up_on_its_way_cannot_be_taken_back(phase: Phase, verdict: str):
    assert judge(phase, GROW, {2: "2 is dead"}, {}, keeps_old=False).verdict == verdict


def test_a_trainer_on_one_slot_or_in_copies_says_what_was_lost():
    alone = ResizeOrder(1, ParallelLayout.of((0,)), ParallelLayout.of((0, 1)))
    assert judge("transfer", alone, {0: "it died"}, {}).reason == "it died; slot 0 held all of the trainer's state"
    copies = ResizeOrder(1, ParallelLayout.of((0, 1, 2, 3), dp_replicate=2), ParallelLayout.of((0, 1)))
    reason = judge("transfer", copies, {3: "it died"}, {}).reason
    held = "slot 3 held 1 of 2 parts of the trainer's state; restoring it from another copy is not supported yet"
    assert reason == f"it died; {held}"


LAYOUTS = st.lists(st.integers(0, 6), min_size=1, unique=True).map(ParallelLayout.of)


@given(
    phase=st.sampled_from(["assign", "prepare", "freeze", "transfer", "commit"]),
    before=LAYOUTS,
    after=LAYOUTS,
    dead=st.sets(st.integers(0, 6)),
    failed=st.sets(st.integers(0, 6)),
)
def test_a_layout_goes_on_only_when_all_its_slots_can(phase: Phase, before, after, dead: set, failed: set):
    change = ResizeOrder(1, before, after)
    dead, failed = dead & set(change.slots), (failed & set(change.slots)) - dead
    verdict = judge(phase, change, dict.fromkeys(dead, "dead"), dict.fromkeys(failed, "failed")).verdict
    old_is_whole, new_is_whole = not dead & set(before.slots), not (dead | failed) & set(after.slots)
    if phase == "commit":
        assert verdict == ("proceed" if new_is_whole else "rollback" if old_is_whole else "stop")
    else:
        assert verdict == ("proceed" if not dead | failed else "rollback" if old_is_whole else "stop")


def test_violations():
    assert violation_in_plans({0: b"a", 1: b"a"}) == ""
    assert violation_in_plans({0: b"a", 3: b"a", 1: b"b", 2: b"c"}) == "slots 1-2 made another plan than slots 0,3"
    far = TrainProgress(4, 3, True)
    assert violation_in_progress({1: far, 2: TrainProgress(4, 3, True, {"loss": 1.0})}) == ""
    assert violation_in_progress({1: far, 2: TrainProgress(4, 4, False)}) == (
        "slot 2 is at step 4, between batches, after 4 updates, "
        "slot 1 at step 4, in the middle of a batch, after 3 updates"
    )
    assert violation_in_bytes({0: {1: 7}, 1: {}}, {0: {}, 1: {0: 7}}) == ""
    assert violation_in_bytes({0: {1: 7}, 1: {}}, {0: {}, 1: {0: 8}}) == (
        "what arrived is not what was sent, from slot 0 to 1"
    )
    assert violation_in_bytes({0: {}, 1: {}}, {0: {}, 1: {0: 8}}) != "", "received what nobody sent"


def test_sums_add_up_over_slots_with_different_names():
    parts = {3: TrainProgress(2, 1, True, {"loss": 1.0, "metric/a": 2.0}), 0: TrainProgress(2, 1, True, {"loss": 0.5})}
    assert total(parts) == TrainProgress(2, 1, True, {"loss": 1.5, "metric/a": 2.0})


def test_layouts_in_words():
    assert describe(ParallelLayout.of((0, 1, 2, 5))) == "slots 0-2,5"
    assert describe(ParallelLayout.of((4,))) == "slot 4"
    assert describe(ParallelLayout.of((2, 0, 1, 3), dp_replicate=2)) == "slots 0-3 in 2 copies"
    mesh = ParallelLayout.of(range(8), pp=2, dp_replicate=2, tp=2)
    assert describe(mesh) == "slots 0-7 as pp 2 · dp_replicate 2 · tp 2"
