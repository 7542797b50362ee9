"""The stage of a live run above slots in memory, in virtual time: what it measures, and as what."""

import asyncio
from types import SimpleNamespace

import pytest

from ductile.core.instances.instances import Instance
from ductile.core.layout.choice.layout_rules import NO_RULES
from ductile.core.layout.geometry.parallel_layout import ParallelLayout, RankShape
from ductile.core.scheduling.costs.cost_model import CostModel, FixedCost
from ductile.core.scheduling.facts.cluster_state import Unfinished
from ductile.core.scheduling.orders import Migration, Release
from ductile.elastic.actuator import MAX_HELD_S, LiveActuator
from ductile.elastic.execution import NotDone
from ductile.elastic.measuring import Measuring
from ductile.elastic.trainer_resizer import ResizeNotDone, TrainerResizer
from ductile.elastic.transaction import ResizeOptions
from ductile.fleet.requests.migration import MigrationResult
from ductile.fleet.run_roles import RunRoles
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.resizes import Finalize, Freeze
from ductile.messages.workers import ForwardBackward, Park, ReleaseRole, Unpark
from ductile.observe import Recorder, read_jsonl
from ductile.roles import Failure
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Mailbox
from tests.cluster.memory_cluster import MemoryCluster
from tests.core.scheduling.scenes import id_on
from tests.fleet.generate_slots import generator
from tests.fleet.train_slots import TrainSlots, play, sample
from tests.orchestrator.doubles import clock
from tests.transport.memory_transport import MemoryTransport

NUM_SLOTS = 4
SEQ_LEN = 10


class Told(CostModel):
    """Of each micro-step, whether it was the first of its trainer (F) or an ordinary one (o), and on how many slots."""

    def __init__(self) -> None:
        super().__init__(cache_bytes_per_token=1000)
        self.kinds: list[str] = []
        self.migrations: list[tuple[float, float]] = []
        self.fixed_costs: dict[FixedCost, float] = {}
        """The latest of each."""

    def micro_step(self, tokens_busiest: float, num_slots: int, seconds: float, shape: RankShape) -> None:
        self.kinds.append(f"o{num_slots}")
        super().micro_step(tokens_busiest, num_slots, seconds, shape)

    def first_micro_step(self, tokens_busiest: float, num_slots: int, seconds: float, shape: RankShape) -> None:
        self.kinds.append(f"F{num_slots}")
        super().first_micro_step(tokens_busiest, num_slots, seconds, shape)

    def migrated(self, tokens: float, seconds: float) -> None:
        self.migrations.append((tokens, seconds))
        super().migrated(tokens, seconds)

    def took(self, what: FixedCost, seconds: float) -> None:
        self.fixed_costs[what] = seconds
        super().took(what, seconds)

    def since(self) -> str:
        kinds, self.kinds = " ".join(self.kinds), []
        return kinds


class Rig:
    """A real stage, its real changes and trainer; the slots reply from memory."""

    def __init__(self, folder, *members: int) -> None:
        self.slots = TrainSlots(ParallelLayout.of(members), NUM_SLOTS)
        self.carrier = MemoryTransport(dict.fromkeys(self.slots.slots, self.slots.respond))
        self.slots.tell = self.carrier.emit
        mailbox = Mailbox(self.carrier, clock)
        self.trainer = RemoteTrainer(mailbox, ParallelLayout.of(members), Deadlines.same(100))
        cluster = MemoryCluster(mailbox, range(NUM_SLOTS))
        self.devices = cluster.devices
        self.record = Recorder(folder)
        terms = ResizeOptions({}, "127.0.0.1:1", timeout_s=5, leave_s=50)
        self.told = Told()
        self.generators = SimpleNamespace(all_instances=(), slots=(3,))
        fleet = RunRoles(self.trainer, self.generators, None, {"generate": {}})
        self.resizer = TrainerResizer(cluster, self.trainer, terms, self.record, NUM_SLOTS, fleet)
        self.recovery, activity = SimpleNamespace(under_way=()), SimpleNamespace()
        accounting = SimpleNamespace(batch=lambda pending, num_queued: None)
        setting = SimpleNamespace(home=None, limits=None, seq_len=SEQ_LEN, max_tokens=9, rules=NO_RULES)
        Measuring(mailbox, fleet, self.told)
        self.stage = LiveActuator(
            setting, cluster, fleet, self.resizer, self.recovery, activity, accounting, self.told, clock
        )

    async def train(self, num_micro_steps: int) -> str:
        """Each sample fills a micro-batch. Returns what was told of the micro-steps."""
        num_samples = num_micro_steps * self.trainer.num_ranks
        await self.trainer.forward_backward([sample(n, SEQ_LEN) for n in range(num_samples)], SEQ_LEN)
        await self.trainer.optim_step(1.0)
        return self.told.since()

    async def resize(self, *members: int) -> None:
        await self.stage.resize(ParallelLayout.of(members), Release())


def in_slots(rig: Rig) -> int:
    """Commands that slots have and have not replied to."""
    return len(rig.carrier.sent) - len(rig.slots.asked)


@pytest.fixture
def told_on(tmp_path):
    """Have a story told with a rig."""

    def tell(story, *members: int) -> None:
        async def whole() -> None:
            rig = Rig(tmp_path, *members)
            try:
                await story(rig)
            finally:
                rig.record.close()
            assert rig.slots.wrong == []

        play(whole)

    return tell


def test_a_policy_is_not_told_of_what_is_on_a_slot_that_is_started_again(told_on):
    async def story(rig: Rig) -> None:
        instances = (generator(2), generator(3))
        rig.generators.all_instances, rig.generators.slots, rig.generators.num_waiting = instances, (2, 3), 0
        rig.generators.unfinished = lambda: tuple(Unfinished(f"{each.id}/0", each.id, 3, 0, 9) for each in instances)
        rig.generators.lengths = lambda: None
        rig.recovery.under_way = frozenset({2})
        state = rig.stage.state()
        assert [slot.slot for slot in state.slots] == [0, 1, 3]
        assert [each.id for each in state.instances] == [id_on(3)]
        assert [each.instance for each in state.unfinished] == [id_on(3)]

    told_on(story, 0, 1)


def test_one_micro_step_is_the_first_of_a_trainer(told_on):
    async def story(rig: Rig) -> None:
        assert await rig.train(3) == "F2 o2 o2"
        assert await rig.train(2) == "o2 o2", "an optimizer step changes nothing"
        await rig.resize(0, 1, 2)
        assert await rig.train(3) == "F3 o3 o3"
        await rig.resize(0, 1)
        assert await rig.train(2) == "F2 o2"

    told_on(story, 0, 1)


def test_there_and_back_is_two_resizes_though_the_slots_are_the_same(told_on):
    async def story(rig: Rig) -> None:
        await rig.train(2)
        await rig.resize(0, 1, 2)
        await rig.resize(0, 1)
        assert await rig.train(2) == "F2 o2"

    told_on(story, 0, 1)


def test_a_resize_that_nobody_decided_is_one_too(told_on):
    async def story(rig: Rig) -> None:
        await rig.train(2)
        await rig.resizer.resize(ParallelLayout.of((0, 1, 2)))
        await rig.resizer.resize(ParallelLayout.of((0, 1)))
        assert await rig.train(2) == "F2 o2"

    told_on(story, 0, 1)


def test_a_resize_that_is_rolled_back_has_no_first_micro_step(told_on):
    async def story(rig: Rig) -> None:
        await rig.train(2)
        rig.carrier.fail(2, "error", on=Freeze)
        with pytest.raises(NotDone, match="stays on slots 0-1"):
            await rig.resize(0, 1, 2)
        assert await rig.train(2) == "o2 o2"

    told_on(story, 0, 1)


def test_the_trainer_trains_on_once_its_slots_have_finalized(told_on):
    async def story(rig: Rig) -> None:
        rig.slots.work_s = lambda number, command: 0.1 if isinstance(command, Finalize) else 0.01
        training = asyncio.create_task(rig.train(40))
        await asyncio.sleep(0.05)
        await rig.resize(1, 2, 3)
        assert rig.trainer.pending_samples, "it trains on"
        kinds = (await training).split()
        assert [kind for kind in kinds if kind != "o2" and kind != "o3"] == ["F2", "F3"]
        assert kinds.index("F3") == kinds.index("o3") - 1

    told_on(story, 0, 1)


def test_a_slot_that_trains_hears_of_another_role_after_the_micro_step_that_it_is_at(told_on):
    async def story(rig: Rig) -> None:
        under_way, over = asyncio.Event(), asyncio.Event()

        async def takes_long(*about: object) -> bool:
            under_way.set()
            await over.wait()
            return True

        rig.generators.admit, rig.generators.version = takes_long, 0
        training = asyncio.create_task(rig.train(20))
        await asyncio.sleep(0.005)
        changing = asyncio.create_task(rig.stage.admit(generator(1)))
        await under_way.wait()
        await asyncio.sleep(0.03)
        assert in_slots(rig) == 2, "one micro-step of two slots"
        over.set()
        await changing
        await training

    told_on(story, 0, 1)


def test_a_release_that_takes_long_does_not_hold_the_trainer_for_ever(told_on):
    async def story(rig: Rig) -> None:
        async def dismiss(instance: object) -> None:
            await asyncio.sleep(30.0)

        rig.generators.all_instances = (generator(1), generator(3))
        rig.generators.dismiss, rig.generators.unfinished = dismiss, lambda: ()
        releasing = asyncio.create_task(rig.stage.release(Release((), (generator(1),))))
        await asyncio.sleep(0.001)
        began_s = clock()
        await rig.train(3)
        assert MAX_HELD_S <= clock() - began_s < MAX_HELD_S + 1.0
        assert await releasing == []

    told_on(story, 0, 1)


@pytest.mark.parametrize(("device", "parts", "cost_s"), [("cpu", "role left", 0.1), ("cuda:0", "left role", 0.6)])
def test_a_slot_that_leaves_the_trainer_gets_ready_beside_that_where_it_has_a_core_to_do_so(
    told_on, device, parts, cost_s
):
    async def story(rig: Rig) -> None:
        diary = list[str]()

        async def left() -> None:
            diary.append("left")
            await asyncio.sleep(2.0)

        async def admit(instance: Instance, settings: object, after=None) -> bool:
            diary.append("role")
            await asyncio.sleep(0.5)
            if after is not None:
                await after()
            await asyncio.sleep(0.1)
            return True

        rig.devices[1] = device
        rig.generators.admit, rig.generators.version = admit, 0
        await rig.stage.admit(generator(1), left)
        assert " ".join(diary) == parts
        assert rig.told.fixed_costs["assign"] == pytest.approx(cost_s), "what is done beside the resize costs nothing"

    told_on(story, 0, 1)


@pytest.mark.parametrize("slot", [1, 2])
def test_all_of_a_release_is_between_two_micro_steps_where_its_slots_train(told_on, slot: int):
    async def story(rig: Rig) -> None:
        in_slots_then = list[int]()

        async def migrate(migrations: object) -> tuple[()]:
            in_slots_then.append(in_slots(rig))
            await asyncio.sleep(0.05)
            return ()

        async def dismiss(instance: object) -> None:
            in_slots_then.append(in_slots(rig))

        rig.generators.all_instances = (generator(slot), generator(3))
        rig.generators.migrate, rig.generators.dismiss, rig.generators.unfinished = migrate, dismiss, lambda: ()
        training = asyncio.create_task(rig.train(20))
        await asyncio.sleep(0.005)
        await rig.stage.release(Release((Migration("a/0", id_on(slot), id_on(3)),), (generator(slot),)))
        assert rig.trainer.pending_samples, "it trains on"
        assert [bool(number) for number in in_slots_then] == [slot not in rig.trainer.layout.slots] * 2
        await training

    told_on(story, 0, 1)


def test_what_first_ones_take_longer_is_a_cost_of_resizing_and_no_speed(told_on):
    async def story(rig: Rig) -> None:
        await rig.train(5)
        usual_s = rig.told.speeds().train.seconds(SEQ_LEN, 2)
        rig.told.took("resize", 0.0)
        before_s = rig.told.costs().resize_s
        rig.slots.work_s = lambda number, command: 3.0 if isinstance(command, ForwardBackward) else 0.01
        await rig.resizer.resize(ParallelLayout.of((1, 2)))
        await rig.train(1)
        assert rig.told.speeds().train.seconds(SEQ_LEN, 2) == pytest.approx(usual_s)
        assert rig.told.costs().resize_s == pytest.approx(before_s + 3.0 - usual_s)

    told_on(story, 0, 1)


@pytest.mark.parametrize(
    ("device", "beside", "prepared_s", "taken_s"),
    [
        pytest.param("cpu", ("carrier", "plan", "groups", "build", "load"), 31, 4 + 8 + 16, id="a CPU"),
        pytest.param("cuda:0", ("carrier", "plan", "groups", "build", "load"), 31, 0, id="one GPU for all"),
        pytest.param("cuda:0", ("carrier", "plan"), 5, 0, id="NCCL"),
    ],
)
def test_what_is_prepared_in_the_pause_is_not_a_cost_twice(told_on, device, beside, prepared_s, taken_s):
    async def story(rig: Rig) -> None:
        rig.devices.update(dict.fromkeys(rig.devices, device))
        rig.slots.phases |= {"carrier": 1.0, "groups": 2.0, "plan": 4.0, "build": 8.0, "load": 16.0}
        rig.slots.beside = beside
        await rig.train(2)
        await rig.resize(0, 1, 2)
        (resized,) = (row for row in read_jsonl(rig.record.folder / "events.jsonl") if row["kind"] == "resized")
        assert rig.told.fixed_costs["prepare"] == prepared_s
        still_s = resized["pause_s"] - resized["seconds"]["release"]
        assert rig.told.fixed_costs["resize"] == pytest.approx(still_s + taken_s)

    told_on(story, 0, 1)


def test_a_slot_that_leaves_is_left_alone_until_the_resize_has_ended(told_on):
    """Were it started anew in between, the resize would ask the new process for what the old one had."""

    async def story(rig: Rig) -> None:
        rig.slots.work_s = lambda number, command: 0.5 if isinstance(command, ReleaseRole) else 0.01
        resizing = asyncio.create_task(rig.resize(1, 2))
        while not any(isinstance(command, ReleaseRole) for _, command in rig.carrier.sent):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert 0 not in rig.trainer.layout.slots
        left = asyncio.create_task(rig.resizer.change_over(0))
        await asyncio.sleep(0.1)
        assert not left.done()
        await resizing
        await left

    told_on(story, 0, 1)


def test_a_resize_that_is_cancelled_after_its_commit_is_written_down(told_on):
    async def story(rig: Rig) -> None:
        rig.slots.work_s = lambda number, command: 0.5 if isinstance(command, Finalize) else 0.01
        resizing = asyncio.create_task(rig.resize(0, 1, 2))
        while not any(isinstance(command, Finalize) for _, command in rig.carrier.sent):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        resizing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resizing
        (resized,) = (row for row in read_jsonl(rig.record.folder / "events.jsonl") if row["kind"] == "resized")
        assert sorted(resized["after"]) == [0, 1, 2]
        assert resized["num_bytes"] > 0

    told_on(story, 0, 1)


def test_what_is_released_in_the_pause_is_not_a_cost_twice(told_on):
    async def story(rig: Rig) -> None:
        async def takes_long(instance: Instance) -> None:
            await asyncio.sleep(7)

        rig.generators.dismiss, rig.generators.unfinished = takes_long, lambda: ()
        await rig.stage.resize(ParallelLayout.of((0, 1, 2)), Release((), (generator(2),)))
        assert rig.told.fixed_costs["release"] == pytest.approx(7.0)
        assert rig.told.fixed_costs["resize"] < 1.0

    told_on(story, 0, 1)


@pytest.mark.parametrize(
    ("outcomes", "tokens"),
    [
        ({"a": (2, True), "b": (2, True), "c": (3, True)}, 700),  # slot 2 takes 300 and 400 in, slot 3 beside it 500
        ({"a": (2, True), "b": (3, True), "c": (2, False)}, 400),  # a prompt that is prefilled again is no cache
        ({"a": (2, False), "b": (3, False), "c": (None, False)}, 0),
        ({"a": (None, False), "b": (1, False), "c": (None, False)}, None),  # b stays; nothing has migrated
        ({"a": (3, True), "b": (None, False), "c": (None, True)}, 300),  # to slot 3 instead; the others had ended
    ],
)
def test_caches_are_measured_by_the_slot_that_takes_in_the_most(told_on, outcomes, tokens):
    """That is how a migration is reckoned: from many sources to one slot, it takes as long as that slot takes."""
    contexts = {"a": 300, "b": 400, "c": 500}
    orders = [Migration(name, id_on(source), id_on(2), True) for source, name in enumerate(contexts)]

    async def story(rig: Rig) -> None:
        async def migrate(migrations):
            await asyncio.sleep(0.25)
            found = [(order, *outcomes[order.id]) for order in migrations]
            return tuple(MigrationResult(order, None if at is None else id_on(at), cache) for order, at, cache in found)

        rig.generators.unfinished = lambda: [
            SimpleNamespace(id=name, context_tokens=context) for name, context in contexts.items()
        ]
        rig.generators.migrate = migrate
        assert await rig.stage.release(Release(tuple(orders))) == []
        assert rig.told.migrations == ([] if tokens is None else [(tokens, pytest.approx(0.25))])

    told_on(story, 0, 1)


def test_what_needs_the_state_waits_until_it_is_back_and_the_policy_hears_of_commands(told_on):
    async def story(rig: Rig) -> None:
        heard = []
        rig.stage.on_change.add(lambda: heard.append(rig.stage.wanted))
        rig.slots.work_s = lambda number, command: 0.2 + number if isinstance(command, Park | Unpark) else 0.01
        await rig.trainer.publish(0)
        rig.stage.begin(0)
        await rig.stage.park()
        training = asyncio.create_task(rig.trainer.forward_backward([sample(0, SEQ_LEN)] * 2, SEQ_LEN))
        await asyncio.sleep(5)
        assert (training.done(), heard) == (False, []), "a policy that parks the state knows that training waits"
        saving = asyncio.create_task(rig.trainer.save("somewhere"))
        await rig.trainer.withdraw(0)
        await asyncio.sleep(5)
        assert (saving.done(), heard, rig.stage.wanted) == (False, [True], True)
        assert await rig.trainer.score([sample(0, SEQ_LEN)], 0) is None
        with pytest.raises(ResizeNotDone, match="is parked"):
            await rig.resizer.resize(ParallelLayout.of((0, 1, 2)))
        await rig.stage.unpark()
        await asyncio.gather(training, saving)
        assert not rig.stage.wanted
        assert (rig.told.fixed_costs["park"], rig.told.fixed_costs["unpark"]) == (1.2, 1.2), "of the slowest slot"

    told_on(story, 0, 1)


def test_the_state_is_parked_once_the_step_s_weights_are_published_and_stay_so_where_nobody_has_them(told_on):
    async def story(rig: Rig) -> None:
        rig.generators.slots = ()
        rig.stage.begin(3)
        parking = asyncio.create_task(rig.stage.park())
        await asyncio.sleep(5)
        assert not parking.done()
        manifest = await rig.trainer.publish(3)
        await parking
        await rig.trainer.withdraw(3)  # all that it was published for have it
        assert rig.trainer.can_offer(3)
        assert await rig.trainer.offer(3) == manifest
        await rig.trainer.withdraw(3)
        await rig.stage.unpark()
        assert not rig.trainer.publishers, "it is withdrawn"

    told_on(story, 0, 1)


def test_a_trainer_that_cannot_be_parked_goes_on_as_before(told_on):
    async def story(rig: Rig) -> None:
        rig.slots.cannot_park = {1}
        await rig.trainer.publish(0)
        rig.stage.begin(0)
        with pytest.raises(NotDone, match=r"are not lent: .*no host memory"):
            await rig.stage.park()
        assert await rig.train(2) == "F2 o2"

    told_on(story, 0, 1)


@pytest.mark.parametrize("how", ["a slot dies", "a slot cannot"])
def test_who_waits_for_a_state_that_does_not_come_back_hears_of_it_at_once(told_on, how: str):
    async def story(rig: Rig) -> None:
        await rig.trainer.publish(0)
        rig.stage.begin(0)
        await rig.stage.park()
        saving = asyncio.create_task(rig.trainer.save("somewhere"))
        await asyncio.sleep(1)
        if how == "a slot dies":
            rig.trainer._mailbox.lose(1, "slot 1 is gone")
        else:
            rig.carrier.fail(1, "error", on=Unpark)
            with pytest.raises(Failure):
                await rig.stage.unpark()
        began_s = clock()
        with pytest.raises(Failure):
            await saving
        assert clock() - began_s < 1

    told_on(story, 0, 1)
