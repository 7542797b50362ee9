from dataclasses import replace

import pytest

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.facts.cluster_state import Lengths, Limits
from ductile.core.scheduling.migration_targets import change, migrate, remaining_tokens
from ductile.core.scheduling.orders import Decision, Migration, RoleChange, layout_after, violations
from tests.core.scheduling.scenes import id_on, scene

GENERATE, TRAIN = ("generate",), ("train",)


@pytest.mark.parametrize(
    ("orders", "sentence"),
    [
        ([RoleChange(9, GENERATE, TRAIN)], "there is no slot 9"),
        ([RoleChange(2, TRAIN, GENERATE)], "slot 2 holds generate, not train"),
        ([RoleChange(2, GENERATE, GENERATE)], "slot 2 holds generate already"),
        ([RoleChange(5, GENERATE, ())], "slot 5 is not ready"),
        ([RoleChange(3, GENERATE, TRAIN), RoleChange(3, GENERATE, ())], "slot 3 is moved 2 times"),
        ([RoleChange(2, GENERATE, TRAIN)], "rollout 2/0 would be left behind on generator-2"),
        ([RoleChange(0, TRAIN, GENERATE), RoleChange(1, TRAIN, GENERATE)], "0 slots would train, and 1 is the least"),
        (
            [RoleChange(0, TRAIN, ("train", "generate"))],
            "slot 0 has no memory for a generator beside the trainer's state",
        ),
        ([Migration("2/0", id_on(3), id_on(4))], "rollout 2/0 is not on generator-3"),
        (
            [Migration("2/0", id_on(2), id_on(0))],
            "rollout 2/0 cannot go to generator-0, which does not",
        ),
        ([Migration("2/0", id_on(2), id_on(3)), Migration("2/0", id_on(2), id_on(4))], "a rollout migrates twice"),
    ],
)
def test_a_decision_with_a_bug_is_refused_with_a_sentence(orders, sentence):
    state = scene(running={2: [5]}, not_ready=[5], limits=Limits(may_share=False))
    assert any(said.startswith(sentence) for said in violations(state, Decision(tuple(orders))))


def test_the_trainer_s_slots_do_not_change_while_they_change():
    state = scene(at_boundary=False)
    assert violations(state, Decision((RoleChange(2, GENERATE, TRAIN),))) == [
        "the trainer is being resized already: one resize at a time"
    ]


def test_the_layout_follows_from_the_rules_and_the_number_of_slots():
    state, rules = scene(), LayoutRules(asked=AskedLayout(tp=2), listed=("pp=2,tp=2,dp_shard=1",))
    state = replace(state, trainer=replace(state.trainer, layout=ParallelLayout.of((0, 1), tp=2), rules=rules))
    grow = [RoleChange(slot, GENERATE, TRAIN) for slot in (2, 3, 4, 5)]
    after = {number: Decision(tuple(grow[:number])) for number in (2, 4)}
    assert [violations(state, decision) for decision in after.values()] == [[], []]
    layouts = [layout_after(state, decision) for decision in after.values()]
    expected = [{"pp": 2, "tp": 2}, {"tp": 2}]
    assert layouts == [ParallelLayout.of(range(2 + n), **sizes) for n, sizes in zip(after, expected, strict=True)]
    assert violations(state, Decision(tuple(grow[:1]))) == [
        "the trainer cannot go on so: 3 slots are no multiple of tp 2, which is asked for; it may have 2 or 4"
    ]


def test_as_many_slots_as_now_are_a_layout_whatever_the_rules_say():
    state, now = scene(), ParallelLayout.of((0, 1))
    rules = LayoutRules(asked=AskedLayout(tp=4))
    state = replace(state, trainer=replace(state.trainer, layout=now, rules=rules))
    swap = Decision((RoleChange(0, TRAIN, GENERATE), RoleChange(4, GENERATE, TRAIN)))
    assert violations(state, swap) == []
    assert layout_after(state, swap) == ParallelLayout.of((1, 4))


def test_generators_may_all_go_when_there_is_nothing_to_generate():
    moves = tuple(RoleChange(slot, GENERATE, TRAIN) for slot in (2, 3, 4, 5))
    assert violations(scene(), Decision(moves)) == []
    assert violations(scene(to_start=1), Decision(moves)) == ["0 generators would be left, and 1 is the least"]


def test_a_floor_that_is_broken_before_a_decision_is_not_its_fault():
    """The only scorer may just be started again."""
    state = scene(to_start=1, limits=Limits(min_score=1))
    assert not any(each.role == "score" for each in state.instances)
    assert violations(state, Decision((RoleChange(2, GENERATE, TRAIN),))) == []


def test_who_stays_in_the_layout_keeps_its_place():
    state = scene()
    decision = Decision(
        (RoleChange(0, TRAIN, GENERATE), RoleChange(4, GENERATE, TRAIN), RoleChange(3, GENERATE, TRAIN))
    )
    assert layout_after(state, decision) == ParallelLayout.of((1, 3, 4))


@pytest.mark.parametrize(
    ("configured", "slots", "expected"), [(2, 3, 1), (2, 4, 2), (4, 6, 2), (4, 8, 4), (1, 4, 1), (3, 4, 1)]
)
def test_the_state_has_the_copies_that_the_config_asks_for_where_the_slots_allow_it(configured, slots, expected):
    """However many there are now: a policy may have gone through a number of slots that does not allow them."""
    state = scene(placement={"actor": "0", "rollout": "1-7"})
    rules = LayoutRules(asked=AskedLayout(dp_replicate=configured))
    state = replace(state, trainer=replace(state.trainer, rules=rules))
    joining = tuple(RoleChange(slot, GENERATE, TRAIN) for slot in range(1, slots))
    assert layout_after(state, Decision(joining)).dims.dp_replicate == expected


def test_the_longest_rollouts_go_to_whoever_has_the_least_to_do():
    state = scene(running={2: [0, 300, 320], 3: [0, 0], 4: []}, lengths=Lengths(tuple(range(1, 400))))
    left = remaining_tokens(state)
    assert left["2/0"] > left["2/1"] > left["2/2"]
    migrations = migrate(state, [id_on(2)], [id_on(3), id_on(4)])
    assert [order.id for order in migrations] == ["2/0", "2/1", "2/2"]
    assert {order.target for order in migrations} == {id_on(4)}


def test_a_full_generator_gets_no_more_while_another_has_room():
    state = scene(running={2: [5, 5], 3: [5] * 7, 4: [5] * 8})
    remaining = {rollout.id: 100.0 if rollout.instance == id_on(3) else 1.0 for rollout in state.unfinished}
    receivers = [id_on(3), id_on(4)]
    assert [order.target for order in migrate(state, [id_on(2)], receivers, remaining)] == receivers


def test_leaving_without_a_receiver_is_an_error():
    with pytest.raises(ValueError, match="there is no generator for 1 rollout of generator-2, "):
        change(scene(running={2: [5]}), dict.fromkeys((2, 3, 4, 5), TRAIN))


BOTH = ("train", "generate")
LEND_0 = RoleChange(0, TRAIN, BOTH)
RETURN_0, RETURN_1 = RoleChange(0, BOTH, TRAIN), RoleChange(1, BOTH, TRAIN)


@pytest.mark.parametrize(
    ("lent", "batch", "orders", "waits", "wrong"),
    [
        (False, {"to_start": 8}, [LEND_0], True, ""),
        (False, {"to_start": 8}, [LEND_0], False, "slot 0 would lend the trainer's devices while training goes on"),
        (False, {"ready": 64}, [LEND_0], True, "training waits for no rollout"),
        (
            False,
            {"to_start": 8},
            [LEND_0, RoleChange(2, GENERATE, TRAIN)],
            True,
            "cannot be resized while slot 0 would",
        ),
        (True, {"ready": 64}, [], True, ""),
        (True, {"to_start": 8}, [], False, "slots 0-1 would lend the trainer's devices while training goes on"),
        (True, {"to_start": 8}, [RETURN_0, RETURN_1], False, ""),
        (True, {"to_start": 8}, [RETURN_0], False, "slot 1 would lend the trainer's devices while training goes on"),
        (
            True,
            {"to_start": 8},
            [RoleChange(0, BOTH, GENERATE), RETURN_1],
            False,
            "slot 0 cannot leave the trainer and",
        ),
    ],
)
def test_a_device_that_is_lent_has_nothing_of_the_trainer(lent, batch, orders, waits, wrong):
    limits = Limits(max_num_seqs=8, may_share=False, offloads=True)
    state = scene(roles={0: BOTH, 1: BOTH} if lent else {}, limits=limits, held=lent, **batch)
    assert state.lending == ((0, 1) if lent else ())
    found = violations(state, Decision(tuple(orders), hold_training=waits))
    assert bool(found) == bool(wrong)
    assert wrong in " ".join(found)
