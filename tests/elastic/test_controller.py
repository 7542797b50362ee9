"""The controller against a scripted stage: which parts of a change come in which order, and what goes wrong."""

import asyncio
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from ductile.core.instances.instances import Instance, InstanceId, in_order, instance_on
from ductile.core.layout.choice.layout_text import compact
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.costs.cost import TrainSpeed
from ductile.core.scheduling.drains import CannotDrain
from ductile.core.scheduling.facts.cluster_state import SlotState
from ductile.core.scheduling.orders import Decision, Migration, Prediction, RoleChange
from ductile.core.scheduling.policies.rules import Home
from ductile.elastic import controller as controller_module
from ductile.elastic.controller import ElasticController
from ductile.elastic.execution import NotDone
from ductile.elastic.policy_decision import BadDecision
from ductile.events.decisions import DecisionJournal, StateReader, decision_row
from ductile.observe import Recorder, read_jsonl
from ductile.sim.replay import replay_run
from tests.core.scheduling.scenes import id_on, scene
from tests.orchestrator.doubles import clock, run
from tests.transport.transports import eventually

T, G, S, B, NONE = ("train",), ("generate",), ("score",), ("train", "generate"), ()
PART_S = 1.0


class ScriptedStage:
    """Every part takes a second, and notes when it begins; those in `broken` are not done."""

    def __init__(self, state):
        self.scene, self.diary, self.held, self.broken = state, [], False, set()
        self.roles = {slot.slot: slot.roles for slot in state.slots}
        self.layout = state.trainer.layout
        self.instances = state.instances
        self.under_way, self.where, self.lost, self.wanted = 0, {}, set(), False

    @property
    def now_s(self):
        return clock()

    def state(self):
        slots = tuple(SlotState(slot, roles, ready=slot not in self.lost) for slot, roles in self.roles.items())
        trainer = replace(self.scene.trainer, layout=self.layout, held=self.held)
        unfinished = tuple(
            each._replace(instance=self.where.get(each.id, each.instance)) for each in self.scene.unfinished
        )
        return replace(
            self.scene,
            now_s=clock(),
            slots=slots,
            instances=self.instances,
            trainer=trainer,
            unfinished=unfinished,
        )

    def begin(self, version):
        self.note(f"begin {version}")

    def hold_training(self, held):
        if held != self.held:
            self.note("hold" if held else "release")
        self.held = held

    def changing(self, moves):
        assert not moves or not self.under_way, "one change at a time"
        self.under_way = len(moves)

    async def release(self, release):
        failures = []
        if release.migrations:
            failures += await self.done(self.migrate(release.migrations))
        for said in await asyncio.gather(*(self.done(self.dismiss(each)) for each in release.instances)):
            failures += said
        return failures

    async def done(self, part):
        try:
            await part
        except NotDone as error:
            return [str(error)]
        return []

    async def migrate(self, migrations):
        await self.part("migrate " + " ".join(f"{each.id}>{each.target}" for each in migrations))
        self.where = self.where | {each.id: each.target for each in migrations}

    async def dismiss(self, instance):
        await self.part(f"dismiss {compact(instance.slots)}")
        self.instances = tuple(each for each in self.instances if each != instance)
        for slot in instance.slots:
            self.roles[slot] = tuple(held for held in self.roles[slot] if held != instance.role)

    async def park(self):
        await self.part("lend")

    async def unpark(self):
        await self.part("take back")

    async def admit(self, instance, after=None):
        if after is not None:
            await after()
        await self.part(f"admit {compact(instance.slots)}")
        self.instances = in_order((*self.instances, instance))
        for slot in instance.slots:
            held = (*self.roles[slot], instance.role)
            self.roles[slot] = tuple(name for name in ("train", "generate", "score") if name in held)

    async def resize(self, layout, release):
        await self.part("prepare")
        failures = await self.release(release)
        await self.part(f"resize {' '.join(map(str, sorted(layout.slots)))}")
        for slot in {*self.layout.slots} ^ {*layout.slots}:
            others = tuple(held for held in self.roles[slot] if held != "train")
            self.roles[slot] = ("train", *others) if slot in layout.slots else others
        self.layout = layout
        return failures

    async def part(self, what):
        self.note(what)
        if what in self.broken:
            raise NotDone(f"{what} failed")
        await asyncio.sleep(PART_S)

    def note(self, what):
        self.diary.append((round(clock(), 3), what))

    def what(self):
        return [what for _, what in self.diary]


class Scripted:
    """Decides in turn; then nothing more."""

    def __init__(self, *decisions):
        self.decisions, self.asked = list(decisions), []

    def decide(self, state):
        self.asked.append(state)
        decision = self.decisions.pop(0) if self.decisions else Decision(hold_training=state.trainer.held)
        if isinstance(decision, Exception):
            raise decision
        return decision


def run_controller(tmp_path, state, policy, during, fallback=None, broken=(), kind=ScriptedStage):
    """What a stage was told to do, in order, and the events of it."""

    async def story():
        stage, errors = kind(state), []
        stage.broken |= set(broken)
        record = Recorder(tmp_path, clock=lambda: 0.0)
        journal = DecisionJournal(record, {"name": "scripted"})
        controller = ElasticController(policy, stage, record, fallback, lambda took_s: 0.5, journal)
        try:
            async with controller.at_work(errors.append):
                await during(controller, stage)
        except Exception as error:
            if errors != [error]:
                raise
        else:
            assert errors == [], "what ends the run is told, and raised"
        record.close()
        return stage, errors

    stage, errors = run(story())
    return stage, errors, read_jsonl(tmp_path / "events.jsonl")


async def one_event(controller, stage):
    controller.notify()
    await asyncio.sleep(30)


def moved(*orders, **more):
    return Decision(orders, "slots move", **more)


def test_who_joins_the_trainer_generates_until_the_trainer_stands_still(tmp_path):
    state = scene(running={2: [10], 3: [20, 30]})
    policy = Scripted(moved(RoleChange(2, G, T), Migration("2/0", id_on(2), id_on(3))))
    stage, errors, _ = run_controller(tmp_path, state, policy, one_event)
    assert stage.what() == ["prepare", "migrate 2/0>generator-3", "dismiss 2", "resize 0 1 2"]
    assert stage.roles[2] == T
    assert errors == []


def test_without_memory_for_both_it_leaves_first(tmp_path):
    state = scene(running={2: [10], 3: [20]}, limits=replace(scene().limits, may_share=False))
    policy = Scripted(moved(RoleChange(2, G, T), Migration("2/0", id_on(2), id_on(3))))
    stage, _, _ = run_controller(tmp_path, state, policy, one_event)
    assert stage.what() == ["migrate 2/0>generator-3", "dismiss 2", "prepare", "resize 0 1 2"]


ONE_ROLE = replace(scene().limits, may_share=False, offloads=True)
"""Slots have no memory for two roles, and may lend their devices."""


def test_devices_are_lent_once_the_state_is_parked_and_nobody_else_waits_for_that(tmp_path):
    state = scene(limits=ONE_ROLE, to_start=64, roles={5: NONE})
    lends = moved(RoleChange(0, T, B), RoleChange(1, T, B), RoleChange(5, NONE, G), hold_training=True)
    stage, errors, _ = run_controller(tmp_path, state, Scripted(lends), one_event)
    at = {what: at for at, what in stage.diary}
    assert at["lend"] == at["admit 5"] < at["admit 0"] == at["admit 1"]
    assert [what for _, what in stage.diary if what in ("hold", "release")] == ["hold", "release"], "until the run ends"
    assert errors == []


def test_devices_go_back_when_their_generators_have_ended_and_only_then_the_trainer_goes_on(tmp_path):
    state = scene(limits=ONE_ROLE, roles={0: B, 1: B}, running={0: [10], 2: [20]}, held=True)
    back = moved(RoleChange(0, B, T), RoleChange(1, B, T), RoleChange(2, G, T), Migration("0/0", id_on(0), id_on(3)))
    back = replace(back, orders=(*back.orders, Migration("2/0", id_on(2), id_on(3))))
    stage, errors, _ = run_controller(tmp_path, state, Scripted(back), one_event)
    assert stage.what()[0].startswith("migrate")
    order = [what for _, what in stage.diary]
    assert order.index("dismiss 0") < order.index("take back") < order.index("prepare") < order.index("resize 0 1 2")
    assert errors == []


@pytest.mark.parametrize("broken", ["lend", "admit 0 and 1"])
def test_devices_that_nobody_has_taken_go_back_at_once(tmp_path, broken):
    state = scene(limits=ONE_ROLE, to_start=64)
    lends = moved(RoleChange(0, T, B), RoleChange(1, T, B), hold_training=True)
    parts = {"lend": {"lend"}, "admit 0 and 1": {"admit 0", "admit 1"}}[broken]
    stage, errors, _ = run_controller(tmp_path, state, Scripted(lends), one_event, broken=parts)
    assert stage.what()[-2:] == ["take back", "release"]
    assert (stage.roles[0], errors) == (T, [])


def test_a_generator_that_stays_keeps_its_device(tmp_path):
    state = scene(limits=ONE_ROLE, roles={0: B, 1: B}, held=True)
    back = moved(RoleChange(0, B, T), RoleChange(1, B, T))
    waits = [Decision(hold_training=True)] * 9
    stage, errors, _ = run_controller(tmp_path, state, Scripted(back, *waits), one_event, broken={"dismiss 0"})
    assert "take back" not in stage.what()
    assert errors == []


def test_everybody_moves_at_once_and_what_can_be_done_together_is(tmp_path):
    """2 joins the trainer, 1 leaves it to generate, 0 generates besides, 3 scores, and 4 hands one to 0."""
    state = scene(running={2: [10], 4: [20, 30]})
    policy = Scripted(
        moved(
            RoleChange(0, T, B),
            RoleChange(1, T, G),
            RoleChange(2, G, T),
            RoleChange(3, G, S),
            Migration("2/0", id_on(2), id_on(5)),
            Migration("4/1", id_on(4), "generator-0.1"),
        )
    )
    stage, errors, _ = run_controller(tmp_path, state, policy, one_event)
    at = {what: at for at, what in stage.diary}
    assert at["dismiss 3"] < at["prepare"] == at["admit 0"] == at["admit 3"]
    assert at["prepare"] < at["migrate 2/0>generator-5"] < at["dismiss 2"] < at["resize 0 2"] < at["admit 1"]
    assert at["admit 1"] < at["migrate 4/1>generator-0.1"], "rollouts go to new generators last"
    assert stage.roles == {0: B, 1: G, 2: T, 3: S, 4: G, 5: G}
    assert errors == []


def test_a_slot_that_trains_and_is_to_generate_besides_is_only_admitted(tmp_path):
    stage, _, _ = run_controller(tmp_path, scene(), Scripted(moved(RoleChange(0, T, B))), one_event)
    assert stage.what() == ["admit 0"]


def test_the_only_generator_keeps_its_rollouts_until_the_next_one_is_there(tmp_path):
    state = scene({"actor": "0-1", "rollout": "2"}, running={2: [10]})
    policy = Scripted(moved(RoleChange(1, T, G), RoleChange(2, G, T), Migration("2/0", id_on(2), "generator-1.1")))
    stage, _, _ = run_controller(tmp_path, state, policy, one_event)
    assert stage.what() == ["prepare", "resize 0 2", "admit 1", "migrate 2/0>generator-1.1", "dismiss 2"]
    assert stage.roles == {0: T, 1: G, 2: T}


def test_it_stays_when_the_next_one_does_not_come(tmp_path):
    state = scene({"actor": "0-1", "rollout": "2"}, running={2: [10]})
    policy = Scripted(moved(RoleChange(1, T, G), RoleChange(2, G, T), Migration("2/0", id_on(2), "generator-1.1")))
    stage, _, events = run_controller(tmp_path, state, policy, one_event, broken={"admit 1"})
    assert stage.roles == {0: T, 1: NONE, 2: B}
    said = [row["sentence"] for row in events if row["kind"] == "switched"]
    assert "admit 1 failed; generator-2 goes on generating" in said[0]


def test_instances_are_called_after_the_change_that_began_them_and_events_name_them(tmp_path):
    policy = Scripted(moved(RoleChange(0, T, B)), moved(RoleChange(0, B, T)), moved(RoleChange(0, T, B)))
    stage, _, events = run_controller(tmp_path, scene(), policy, one_event)
    assert stage.instances[0].id == "generator-0.3"
    first, third = ({"id": f"generator-0.{number}", "role": "generate", "slots": [0]} for number in (1, 3))
    assert [(row["began"], row["ended"]) for row in events if row["kind"] == "switched"] == [
        ([first], []),
        ([], ["generator-0.1"]),
        ([third], []),
    ]


def test_a_generator_on_two_slots_joins_the_trainer_as_a_whole_and_its_rollouts_go_to_one_on_none(tmp_path):
    server = Instance(InstanceId("http://there"), "generate", ())
    limits = replace(scene().limits, slots_per_generator=2)
    state = scene(running={"generator-2-3": [10]}, limits=limits, servers=[server])
    leaving = Migration("generator-2-3/0", InstanceId("generator-2-3"), server.id)
    policy = Scripted(moved(RoleChange(2, G, T), RoleChange(3, G, T), leaving))
    stage, errors, _ = run_controller(tmp_path, state, policy, one_event)
    assert stage.what() == ["prepare", "migrate generator-2-3/0>http://there", "dismiss 2-3", "resize 0 1 2 3"]
    assert [each.id for each in stage.instances] == ["generator-4-5", "http://there"]
    assert errors == []


def test_one_decision_at_a_time_and_events_meanwhile_are_looked_at_together(tmp_path):
    policy = Scripted(moved(RoleChange(0, T, B)), moved(RoleChange(1, T, B)))

    async def many_events(controller, stage):
        for _ in range(20):
            controller.notify()
            await asyncio.sleep(0.1)
        await asyncio.sleep(30)

    stage, _, _ = run_controller(tmp_path, scene(), policy, many_events)
    assert stage.diary == [(0.0, "admit 0"), (1.0, "admit 1")]
    # While a change was carried out nobody asked; afterwards it is asked again, until nothing changes any more.
    assert [round(state.now_s, 3) for state in policy.asked] == [0.0, 1.0, 2.0]


def test_what_a_policy_is_asked_with_and_decides_is_written_down(tmp_path):
    """Also what a policy is asked with that fails, and what is decided instead."""
    policy = Scripted(moved(RoleChange(0, T, B)), moved(RoleChange(0, B, T)), ValueError("enough"))
    home = Scripted()
    run_controller(tmp_path, scene(running={2: [10]}), policy, one_event, fallback=home)
    rows, reader = read_jsonl(tmp_path / "decisions.jsonl"), StateReader()
    assert [reader.state(row["state"]) for row in rows] == [*policy.asked, *home.asked]
    assert [row.get("decision", {}).get("orders") for row in rows] == [
        [{"slot": 0, "before": ["train"], "after": ["train", "generate"]}],
        [{"slot": 0, "before": ["train", "generate"], "after": ["train"]}],
        None,
        None,
    ]
    assert ["refused" in row for row in rows] == [False, False, True, False]
    assert "ValueError: enough" in rows[2]["refused"]
    assert rows[3]["decision"] == decision_row(Decision())
    assert ["policy" in row for row in rows] == [True, False, False, False]


def test_nothing_is_asked_when_nothing_happens(tmp_path):
    policy = Scripted()

    async def nothing(controller, stage):
        controller.notify()
        await asyncio.sleep(1000)

    run_controller(tmp_path, scene(), policy, nothing)
    assert len(policy.asked) == 1


async def publish(controller, stage, live_s):
    """Version 7, as the loop does it; `live_s` after it is published, or once the joiners are there."""
    await controller.begin_step(7)
    await asyncio.sleep(0.25)
    stage.note("published")
    await controller.joined()
    stage.note("goes live")
    controller.notify()
    await asyncio.sleep(live_s)
    stage.note("live")
    controller.go_on()
    await asyncio.sleep(10)


def patient(state, seconds):
    train = TrainSpeed(tokens_per_s=1e12, micro_step_s=2 * seconds)
    return replace(state, speeds=replace(state.speeds, train=train))


def test_slots_settle_before_a_version_goes_live_and_stay_until_it_is(tmp_path):
    """New rollouts are shared with the joiners; publishing does not wait for them."""
    policy = Scripted(moved(RoleChange(0, T, B)), moved(RoleChange(0, B, T)))
    state = patient(scene(), 5.0)
    stage, _, _ = run_controller(tmp_path, state, policy, partial(publish, live_s=5.0))
    assert stage.diary == [
        (0.0, "begin 7"),
        (0.0, "admit 0"),
        (0.25, "published"),
        (1.0, "goes live"),
        (6.0, "live"),
        (6.0, "dismiss 0"),
    ]
    assert [(round(state.now_s, 1), state.asked) for state in policy.asked] == [(0.0, False), (6.0, True), (7.0, True)]


@pytest.mark.parametrize(
    "orders",
    [
        (RoleChange(0, T, B),),
        (RoleChange(1, T, G),),
        (RoleChange(1, T, G), RoleChange(2, G, T), Migration("2/0", id_on(2), id_on(3))),
    ],
    ids=["beside training", "from the trainer", "one for another"],
)
@pytest.mark.parametrize("patience_s", [0.1, 0.5])
def test_nobody_waits_for_a_change_for_longer_than_half_a_micro_step(tmp_path, orders, patience_s):
    policy, state = Scripted(moved(*orders)), patient(scene(running={2: [10], 3: [20]}), patience_s)
    stage, errors, _ = run_controller(tmp_path, state, policy, partial(publish, live_s=10.0))
    at = {what: at for at, what in stage.diary}
    assert at["published"] == 0.25
    assert at["goes live"] == pytest.approx(0.25 + patience_s)
    assert at.pop("live") > max(at.values()), "the change went on to its end meanwhile"
    for order in orders:
        if isinstance(order, RoleChange):
            assert stage.roles[order.slot] == order.after
    assert errors == []


@pytest.mark.parametrize("broken", [frozenset(), {"admit 1"}, {"resize 0"}], ids=["done", "refused", "rolled back"])
def test_weights_wait_for_joiners_and_for_nobody_else(tmp_path, broken):
    """Not for their migrations, for who leaves, or for who is not to come after all."""
    orders = (RoleChange(1, T, G), Migration("2/0", id_on(2), "generator-1.1"))
    state = patient(scene(running={2: [10, 20]}), 60.0)
    stage, _, _ = run_controller(
        tmp_path, state, Scripted(moved(*orders)), partial(publish, live_s=10.0), broken=broken
    )
    at = {what: at for at, what in stage.diary}
    assert at["goes live"] == (3.0 if not broken else at[min(broken)])

    both_ways = (RoleChange(2, G, T), Migration("2/0", id_on(2), id_on(3)), Migration("2/1", id_on(2), id_on(3)))
    for orders, live_s in [(both_ways, 0.25), ((*both_ways, RoleChange(0, T, B)), 1.0)]:
        stage, _, _ = run_controller(
            tmp_path / str(live_s), state, Scripted(moved(*orders)), partial(publish, live_s=10.0)
        )
        at = {what: at for at, what in stage.diary}
        assert at["goes live"] == live_s < at["resize 0 1 2"]


@pytest.mark.parametrize(("live_s", "asked_s"), [(0.25, 1.0), (5.0, 5.75)], ids=["weights first", "change first"])
def test_a_change_that_is_under_way_goes_on_beside_publishing(tmp_path, live_s, asked_s):
    """A slot that trains on waits neither until others have prepared nor until they are admitted elsewhere."""
    policy = Scripted(moved(RoleChange(0, B, T)), moved(RoleChange(0, T, B)))

    async def in_a_change(controller, stage):
        controller.notify()
        await asyncio.sleep(0.5)
        await publish(controller, stage, live_s)

    state = scene()
    slots = (SlotState(0, B), *state.slots[1:])
    state = replace(state, slots=slots, instances=(instance_on("generate", (0,)), *state.instances))
    stage, _, _ = run_controller(tmp_path, state, policy, in_a_change)
    assert [what for what in stage.diary if "live" not in what[1]] == [
        (0.0, "dismiss 0"),
        (0.5, "begin 7"),
        (0.75, "published"),
        (asked_s, "admit 0"),
    ]
    assert [(round(state.now_s, 2), state.asked) for state in policy.asked[:2]] == [(0.0, True), (asked_s, False)]
    assert all(state.asked for state in policy.asked[2:]), "only the first request of a step is"


def test_what_nobody_thought_of_in_settling_ends_the_run_and_nobody_waits_for_it(tmp_path):
    class Breaks(ScriptedStage):
        async def admit(self, instance, after=None):
            await self.part(f"admit {compact(instance.slots)}")
            raise ZeroDivisionError

    async def settling(controller, stage):
        await controller.begin_step(1)
        await controller.joined()
        assert clock() == PART_S
        controller.go_on()
        await asyncio.sleep(5)
        assert not stage.held, "training is not to wait for its deadline while the run ends"
        with pytest.raises(ZeroDivisionError):
            await controller.begin_step(2)

    policy = Scripted(*[moved(RoleChange(0, T, B), hold_training=True) for _ in range(9)])
    _, errors, _ = run_controller(tmp_path, patient(scene(), 60.0), policy, settling, kind=Breaks)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert len(policy.asked) == 1


def test_a_change_that_was_begun_in_settling_is_given_up_with_the_run(tmp_path):
    policy = Scripted(moved(RoleChange(2, G, T), hold_training=True))

    async def ends(controller, stage):
        await controller.begin_step(7)
        await asyncio.sleep(0.5)

    stage, errors, _ = run_controller(tmp_path, scene(), policy, ends)
    assert stage.what() == ["begin 7", "hold", "prepare", "release"]
    assert stage.under_way == 0
    assert errors == []


def test_held_training_is_always_released_in_the_end(tmp_path):
    policy = Scripted(Decision(hold_training=True, reason="wait"))
    stage, _, _ = run_controller(tmp_path, scene(), policy, one_event)
    assert stage.what() == ["hold", "release"]


def test_training_that_waited_waits_until_rollouts_have_left(tmp_path):
    """A slot that trains would hear of the migration only after its micro-steps."""
    state = scene({"actor,rollout": "0-1"}, running={0: [10], 1: [20]})
    policy = Scripted(Decision(hold_training=True, reason="wait"), moved(Migration("0/0", id_on(0), id_on(1))))

    async def two_events(controller, stage):
        await one_event(controller, stage)
        await one_event(controller, stage)

    stage, _, _ = run_controller(tmp_path, state, policy, two_events)
    assert stage.what() == ["hold", "migrate 0/0>generator-1", "release"]


def test_held_training_is_released_when_the_run_breaks_off_in_a_change(tmp_path):
    policy = Scripted(moved(RoleChange(2, G, T), hold_training=True))

    async def breaks_off(controller, stage):
        controller.notify()
        await asyncio.sleep(0.5)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        run_controller(tmp_path, scene(), policy, breaks_off)


def test_a_bad_decision_is_refused_and_the_slots_go_home(tmp_path):
    policy = Scripted(moved(RoleChange(2, G, T), hold_training=True), moved(RoleChange(3, S, T)))

    async def twice(controller, stage):
        controller.notify()
        await asyncio.sleep(10)
        controller.notify()
        await asyncio.sleep(10)

    stage, errors, events = run_controller(tmp_path, scene(), policy, twice, fallback=Home())
    assert errors == []
    assert stage.roles == {0: T, 1: T, 2: G, 3: G, 4: G, 5: G}
    assert not stage.held
    refused = [row for row in events if row["kind"] == "policy_failed"]
    assert len(refused) == 1
    assert "slot 3 holds generate, not score" in refused[0]["sentence"]
    assert len(policy.asked) == 2, "it is never asked again"


def test_a_policy_that_fails_is_refused_as_well(tmp_path):
    _, errors, events = run_controller(tmp_path, scene(), Scripted(KeyError("slot")), one_event, fallback=Home())
    assert errors == []
    assert "KeyError" in next(row["sentence"] for row in events if row["kind"] == "policy_failed")


def test_without_a_substitute_a_bad_decision_ends_the_run(tmp_path):
    _, errors, _ = run_controller(tmp_path, scene(), Scripted(moved(RoleChange(9, G, T))), one_event)
    assert [type(error) for error in errors] == [BadDecision]
    assert "there is no slot 9" in str(errors[0])


def test_a_change_that_fails_is_told_and_not_tried_again_at_once(tmp_path):
    again = [moved(RoleChange(2, G, T), prediction=Prediction(9.0, 5.0, 1.0)) for _ in range(4)]
    stage, errors, events = run_controller(tmp_path, scene(), Scripted(*again), one_event, broken={"prepare"})
    assert [at for at, what in stage.diary if what == "prepare"] == [0.0, 1.0, 3.0, 7.0]
    assert stage.roles[2] == G, "who was to join goes on as before"
    assert errors == []
    decided = next(row for row in events if row["kind"] == "decided")
    assert (decided["cost_s"], decided["gain_s"]) == (1.0, 4.0)
    switched = next(row for row in events if row["kind"] == "switched")
    assert switched["failures"] == ["prepare failed"]


def test_nor_when_it_fails_while_a_decision_rests(tmp_path):
    class FailsFast(ScriptedStage):
        async def admit(self, instance, after=None):
            await asyncio.sleep(0.2)
            raise NotDone("no")

    async def many_events(controller, stage):
        for _ in range(60):
            controller.notify()
            await asyncio.sleep(0.1)

    policy = Scripted(*[moved(RoleChange(0, T, B)) for _ in range(9)])
    run_controller(tmp_path, scene(), policy, many_events, kind=FailsFast)
    assert [round(state.now_s, 1) for state in policy.asked] == [0.0, 1.2, 3.4]


def test_what_nobody_thought_of_ends_the_run(tmp_path):
    class Breaks(ScriptedStage):
        async def admit(self, instance, after=None):
            raise ZeroDivisionError

    stage, errors, _ = run_controller(tmp_path, scene(), Scripted(moved(RoleChange(0, T, B))), one_event, kind=Breaks)
    assert stage.under_way == 0
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_training_that_waits_without_orders_is_told_when_that_begins_changes_and_ends(tmp_path):
    """And not after each rollout of which there is one fewer."""
    policy = Scripted(
        *(
            Decision(hold_training=True, reason=f"training waits for {left}", topic="rollouts")
            for left in ("12 rollouts", "2 rollouts", "1 rollout")
        ),
        *[Decision(hold_training=True, reason="training waits for scores")] * 3,
        *[Decision()] * 3,
        *[Decision(reason="training does not wait")] * 3,
        Decision(reason="not wait"),
        Decision(hold_training=True),
        Decision(),
    )

    async def many_events(controller, stage):
        for _ in range(15):
            controller.notify()
            await asyncio.sleep(1)

    _, _, events = run_controller(tmp_path, scene(), policy, many_events)
    assert [(event["sentence"], event["holds"]) for event in events if event["kind"] == "held"] == [
        ("Training waits for 12 rollouts.", True),
        ("Training waits for scores.", True),
        ("Training goes on.", False),
        ("Training does not wait.", False),
        ("Not wait.", False),
        ("Training waits.", True),
        ("Training goes on.", False),
    ]
    assert len(policy.asked) == 15


def test_a_hold_that_came_with_orders_is_told_with_them_and_its_end_alone(tmp_path):
    policy = Scripted(moved(RoleChange(0, T, B), hold_training=True), Decision(hold_training=True), Decision())

    async def three_events(controller, stage):
        for _ in range(3):
            controller.notify()
            await asyncio.sleep(5)

    _, _, events = run_controller(tmp_path, scene(), policy, three_events)
    assert [event["sentence"] for event in events] == [
        "Slots move.",
        "Done in 1.00 s: slot 0 train → train+generate.",
        "Training goes on.",
    ]


def test_the_layout_keeps_its_order_and_joiners_come_last(tmp_path):
    stage, _, _ = run_controller(
        tmp_path, scene(), Scripted(moved(RoleChange(0, T, G), RoleChange(4, G, T))), one_event
    )
    assert stage.layout == ParallelLayout.of((1, 4))


class Slow:
    """Decides nothing, in 0.3 real seconds."""

    def __init__(self):
        self.num_deciding, self.asked, self.overlapped = 0, [], False

    def decide(self, state):
        self.overlapped |= self.num_deciding > 0
        self.num_deciding += 1
        time.sleep(0.3)
        self.num_deciding -= 1
        self.asked.append(state.asked)
        return Decision()


def test_the_event_loop_goes_on_while_the_policy_decides(tmp_path):
    policy, errors, num_turns = Slow(), [], 0

    async def decides():
        nonlocal num_turns
        controller = ElasticController(policy, ScriptedStage(scene()), Recorder(tmp_path))
        async with controller.at_work(errors.append):
            controller.notify()
            while not policy.asked:
                await asyncio.sleep(0.01)
                num_turns += 1

    asyncio.run(decides())
    assert num_turns > 5
    assert errors == []


def test_a_step_that_begins_waits_for_the_decision_that_is_under_way(tmp_path):
    policy, errors = Slow(), []

    async def begins():
        controller = ElasticController(policy, ScriptedStage(scene()), Recorder(tmp_path))
        async with controller.at_work(errors.append):
            controller.notify()
            await eventually(lambda: policy.num_deciding)
            await controller.begin_step(3)
            assert policy.asked == [True, False], "both decisions were made, the step's own one last"

    asyncio.run(begins())
    assert not policy.overlapped
    assert errors == []


def test_a_policy_that_does_not_decide_in_time_is_not_asked_any_more(tmp_path, monkeypatch):
    """A thread takes real time, so the stage and its event loop do too. A replay does not wait for that policy."""

    class Endless:
        def decide(self, state):
            assert released.wait(60)
            return Decision()

    async def story():
        record = Recorder(tmp_path, clock=lambda: 0.0)
        journal = DecisionJournal(record, {"name": "static", "pre_process": None, "wait_before_last_iter": None})
        controller = ElasticController(Endless(), ScriptedStage(scene()), record, Home(), journal=journal)
        async with controller.at_work(errors.append):
            await controller.begin_step(0)
        record.close()
        return controller.refused

    errors, released = [], threading.Event()
    monkeypatch.setattr(controller_module, "MAX_DECIDING_S", 0.2)
    refused = asyncio.run(story())
    assert not released.is_set(), "the run went on while the policy was still at it"
    released.set()
    assert refused.endswith("it was asked, and 0.2 s later it had not decided.")
    assert errors == []
    assert ["late" in row for row in read_jsonl(tmp_path / "decisions.jsonl")] == [True, False]
    assert replay_run(tmp_path).num_decisions == 1


def test_a_decision_about_a_slot_that_was_lost_meanwhile_is_not_carried_out(tmp_path):
    class Kills:
        """The slot that it would move is lost while it decides."""

        def decide(self, state):
            if stage.lost:
                return Decision()
            stage.lost.add(2)
            return Decision((RoleChange(2, G, T),), reason="nothing left to generate")

    async def story():
        record = Recorder(tmp_path)
        controller = ElasticController(Kills(), stage, record)
        async with controller.at_work(errors.append):
            controller.notify()
            await asyncio.sleep(10)
        record.close()
        assert controller.num_changes == 0

    stage, errors = ScriptedStage(scene()), []
    run(story())
    assert [errors, stage.diary] == [[], []]
    told = [row["sentence"] for row in read_jsonl(tmp_path / "events.jsonl")]
    assert told == ["Not carried out, as slot 2 was lost meanwhile: nothing left to generate."]


def test_a_step_whose_first_decision_is_dropped_begins_with_the_next_one(tmp_path):
    class Kills:
        def decide(self, state):
            asked.append(state.asked)
            if stage.lost:
                return Decision()
            stage.lost.add(2)
            return Decision((RoleChange(2, G, T),))

    async def story():
        controller = ElasticController(Kills(), stage, Recorder(tmp_path))
        async with controller.at_work(errors.append):
            await controller.begin_step(0)
            controller.go_on()
            await asyncio.sleep(10)
            controller.notify()
            await asyncio.sleep(10)

    stage, errors, asked = ScriptedStage(scene()), [], []
    run(story())
    assert errors == []
    assert asked == [False, False, True]


def test_when_the_run_fails_a_change_that_hangs_is_not_waited_for(tmp_path):
    class Stuck(ScriptedStage):
        async def resize(self, layout, release):
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(60)  # taking it back hangs, too

    async def story():
        stage = Stuck(scene())
        orders = [Decision((RoleChange(2, G, T),)), Decision()]
        policy = type("Once", (), {"decide": lambda self, state: orders.pop(0)})()
        controller = ElasticController(policy, stage, Recorder(tmp_path))
        began_s = clock()

        async def fails():
            async with controller.at_work(lambda error: None):
                controller.notify()
                await asyncio.sleep(5)
                raise OSError("a slot is lost")

        with pytest.raises(OSError, match="a slot is lost"):
            await fails()
        assert clock() - began_s <= 5 + controller_module.MAX_CANCEL_S
        await asyncio.sleep(60)

    run(story())


def test_slots_are_emptied_before_the_policy_is_asked_again_and_it_sees_them_no_more(tmp_path):
    seen = []

    class Watching:
        def decide(self, state):
            seen.append(([slot.slot for slot in state.slots], state.home.train))
            return Decision()

    async def story() -> None:
        stage = ScriptedStage(scene({"actor": 0, "rollout": "1-2"}, running={1: [5]}))
        record = Recorder(tmp_path)
        controller = ElasticController(Watching(), stage, record)
        async with controller.at_work(lambda error: None):
            await controller.begin_step(1)
            controller.go_on()
            async with controller.emptied([0]):
                assert stage.roles == {0: NONE, 1: B, 2: G}
                controller.notify()
                await asyncio.sleep(1)
            assert seen[-1] == ([1, 2], (1,)), "who stands in trains at home"
            del stage.roles[0]
            async with controller.emptied([1]):
                assert (stage.roles[1], stage.roles[2]) == (NONE, B)
                assert stage.where == {"1/0": "generator-2"}, "with what it has"
            stage.roles |= {0: NONE}
            await controller.restore([0])
            await asyncio.sleep(1)
            assert sorted(seen[-1][0]) == [0, 2]
        record.close()

    run(story())


def test_without_a_policy_slots_come_back_to_what_they_held(tmp_path):
    async def story() -> None:
        stage = ScriptedStage(scene({"actor": 0, "rollout": "1-2", "inference": 3}))
        record = Recorder(tmp_path)
        controller = ElasticController(None, stage, record)
        async with controller.emptied([0]):
            assert (stage.roles[0], stage.roles[1], stage.held) == (NONE, B, False)
        async with controller.emptied([3]):
            assert (stage.roles[3], stage.roles[2]) == (NONE, ("generate", "score"))
        await controller.restore([3, 0])
        assert stage.roles == {0: T, 1: G, 2: G, 3: S}
        with pytest.raises(CannotDrain, match="no other slot can take the trainer's state over"):
            async with controller.emptied([0, 1, 2, 3]):
                raise AssertionError("it is not empty")
        stage.broken.add("prepare")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(9), controller.emptied([0]):
                raise AssertionError("it is not empty")
        stage.broken.clear()
        await asyncio.sleep(9)
        async with controller.emptied([0]):
            assert stage.roles[0] == NONE
        await controller.stop()
        record.close()

    run(story())
