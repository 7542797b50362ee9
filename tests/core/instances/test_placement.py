import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.instances.placement import MAX_SLOTS, Placement, PlacementError, place
from ductile.core.layout.choice.layout_text import compact
from ductile.core.scheduling.facts.cluster_state import may_share

# entries -> train, generate, score
PLACED = [
    ({"actor": 0, "rollout": "1-2", "inference": 3}, (0,), (1, 2), (3,)),
    ({"rollout": "0-3", "inference": "4-5", "actor": "6-7"}, (6, 7), (0, 1, 2, 3), (4, 5)),
    ({"actor": "0-1", "rollout": "2-5", "inference": "6-7"}, (0, 1), (2, 3, 4, 5), (6, 7)),
    ({"train": "0", "generate": "1", "score": "2"}, (0,), (1,), (2,)),
    ({"trainer": 0, "generator": 1, "scorer": 1}, (0,), (1,), (1,)),
    ({"actor": "0-1,3-4", "rollout": 2}, (0, 1, 3, 4), (2,), ()),
    ({"actor": [0, "3-4"], "rollout": [1, 2]}, (0, 3, 4), (1, 2), ()),
    ({"actor,rollout": "0-1"}, (0, 1), (0, 1), ()),
    ({"Actor , rollout": " 0 - 1 ", "inference": " 2"}, (0, 1), (0, 1), (2,)),
    ({"actor": "0-1", "rollout": "1-2"}, (0, 1), (1, 2), ()),
    ({"actor,rollout,inference": "all"}, (0, 1), (0, 1), (0, 1)),
    ({"actor": "all", "rollout": "0-2"}, (0, 1, 2), (0, 1, 2), ()),
]


@pytest.mark.parametrize(("entries", "train", "generate", "score"), PLACED)
def test_places(entries: dict, train: tuple, generate: tuple, score: tuple) -> None:
    placed = place(entries)
    assert (placed.train, placed.generate, placed.score) == (train, generate, score)


REFUSED = [
    (
        {"actr": 0, "rollout": 1},
        "`actr` is not a role: the roles are actor (train), rollout (generate) and inference (score). "
        "Did you mean `actor`?",
    ),
    (
        {"actor": 0, "train": 1, "rollout": 2},
        "train slots are named twice, by `actor` and by `train`: keep one of them, with all of its slots in it "
        '("0-1,3"). A flag can change an entry of a file, and remove none.',
    ),
    ({"actor": "2-0", "rollout": 3}, "`actor: 2-0` runs backwards: write `actor: 0-2`."),
    (
        {"actor": "-1", "rollout": 0},
        "`actor: -1` is not a slot. Write a number from 0 (0), a range (0-3), a list of them (0-1,3) or all.",
    ),
    (
        {"actor": "", "rollout": 0},
        "`actor: ` is not a slot. Write a number from 0 (0), a range (0-3), a list of them (0-1,3) or all.",
    ),
    ({"actor": [], "rollout": 0}, "`actor` has no slots: leave it out, or give it some."),
    ({"actor": "0-2,1", "rollout": 3}, "`actor` names slot 1 twice: write `actor: 0-2`."),
    (
        {"actor": "0-3:0-7", "rollout": 4},
        "`actor: 0-3:0-7` gives processes to devices; here a slot is one process on one device: write `actor: 0-3`.",
    ),
    ({"actor": 0, "rollout": "1-9999"}, f"`rollout: 1-9999` goes past slot {MAX_SLOTS - 1}, the highest there can be."),
    (
        {"actor": 0, "rollout": "2,5-6"},
        "Slots 1,3-4 would do nothing: slots are numbered from 0 without gaps. Write `actor: 0, rollout: 1-3`; "
        "CUDA_VISIBLE_DEVICES chooses the physical devices.",
    ),
    (
        {"rollout": "0-1"},
        "No slot has the role train, which this run needs: add `actor: 2`, or let it share a slot "
        "(`rollout,actor: 0-1`).",
    ),
    (
        {},
        "No slot has the role train, which this run needs: add `actor: 0`, or let it share a slot (`actor: 0`). "
        "No slot has the role generate, which this run needs: add `rollout: 0`, or let it share a slot (`rollout: 0`). "
        "A run needs none where servers generate: orchestrator.client.base_url, inference.registry.",
    ),
]


@pytest.mark.parametrize(("entries", "said"), REFUSED, ids=[str(entries) for entries, _ in REFUSED])
def test_refuses(entries: dict, said: str) -> None:
    with pytest.raises(PlacementError) as error:
        place(entries)
    assert str(error.value) == said


def test_says_everything_at_once() -> None:
    with pytest.raises(PlacementError) as error:
        place({"actr": 0, "rollout": "2-1,x"})
    assert len(error.value.violations) == 3


def test_deployment_numbers_generate_first() -> None:
    placed = place(None, num_train=2, num_generate=6)
    assert placed == Placement((6, 7), (0, 1, 2, 3, 4, 5), (), "as the deployment numbers say")


def test_deployment_numbers_have_no_scorer() -> None:
    with pytest.raises(PlacementError, match="with `rollout: 0-1, actor: 2, inference: 3`"):
        place(None, num_train=1, num_generate=2, needs=("train", "generate", "score"))


def test_only_needed_roles_get_slots() -> None:
    assert place(None, num_train=2, num_generate=0, needs=("train",)).slots == (0, 1)
    assert place({"rollout": "0-1"}, needs=("generate",)).generate == (0, 1)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"actor": "all", "rollout": "0-4"}, "`all` is 5 slots, because the other roles name so many"),
        ({"actor,rollout": "all"}, "`all` is 2 slots, because the deployment numbers add up to so many"),
    ],
)
def test_says_what_all_is(entries: dict, why: str) -> None:
    assert why in place(entries).reason


def test_knows_what_a_slot_does() -> None:
    placed = place({"actor": 0, "rollout,inference": 1})
    assert [placed.roles(slot) for slot in placed.slots] == [("train",), ("generate", "score")]


@given(st.sets(st.integers(0, 20), min_size=1).map(sorted))
def test_compact_form_reads_back(slots: list[int]) -> None:
    # Slot 21 onward is the other role's, so that the numbers need not be without gaps for the role under test.
    others = sorted(set(range(21)) - set(slots))
    entries = {"actor": compact(slots), "rollout": compact([*others, 21])}
    assert place(entries).train == tuple(slots)


@pytest.mark.parametrize(
    ("entries", "on_cpus", "on_gpus"),
    [
        ({"actor": "0-1", "rollout": "2-3"}, True, False),
        ({"actor,rollout": "0-3"}, True, True),
        ({"actor": "0-1", "rollout": "1-3"}, True, True),
        ({"actor": 0, "rollout,inference": "1-2"}, True, False),
    ],
)
def test_train_slots_have_memory_for_a_generator_too(entries: dict, on_cpus: bool, on_gpus: bool) -> None:
    placed = place(entries)
    assert (may_share(placed, on_gpu=False), may_share(placed, on_gpu=True)) == (on_cpus, on_gpus)
