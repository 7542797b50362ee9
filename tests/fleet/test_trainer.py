"""Micro-steps over the memory transport, in virtual time."""

import asyncio

import pytest

from ductile.core.batch.packing import SampleTooLong
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fleet.trainer.micro_steps import AHEAD_S, IN_FLIGHT, MicroStepDone
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.workers import ExportModel, ForwardBackward, OptimStep, Publish, SaveState, Withdraw
from ductile.roles import Late, Refused, StateKept, TrainerLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Mailbox
from tests.fleet.train_slots import TrainSlots, play, sample
from tests.orchestrator.doubles import clock
from tests.transport.memory_transport import MemoryTransport

SEQ_LEN = 10


def make(layout: ParallelLayout, num_slots: int = 8) -> tuple[TrainSlots, MemoryTransport, RemoteTrainer]:
    slots = TrainSlots(layout, num_slots)
    carrier = MemoryTransport(dict.fromkeys(slots.slots, slots.respond))
    return slots, carrier, RemoteTrainer(Mailbox(carrier, clock), layout, Deadlines.same(100))


def test_every_rank_gets_one_micro_batch_at_a_time_and_every_sample_is_trained():
    async def story():
        slots, carrier, trainer = make(ParallelLayout.of((4, 2)))
        await trainer.forward_backward([sample(n, 4 + n % 5) for n in range(13)], SEQ_LEN)
        sent = {slot: [c for to, c in carrier.sent if to == slot] for slot in (4, 2)}
        assert len(sent[4]) == len(sent[2]) > 3
        assert all(isinstance(c, ForwardBackward) and len(c.micro_batches) == 1 for c in sent[4] + sent[2])
        await trainer.optim_step(1.0)
        assert slots.trained == [list(range(13))]
        assert slots.wrong == []

    play(story)


def test_the_next_micro_step_waits_in_the_slot_and_no_more():
    async def story():
        _, carrier, trainer = make(ParallelLayout.of((0,)))
        in_flight = []

        async def look():
            for _ in range(4):
                await asyncio.sleep(0.01)
                in_flight.append(len(carrier.sent))

        await asyncio.gather(trainer.forward_backward([sample(n, SEQ_LEN) for n in range(5)], SEQ_LEN), look())
        assert in_flight[0] == IN_FLIGHT
        assert clock() == pytest.approx(5 * 0.01), "the slot is never without work"

    play(story)


def test_the_next_micro_step_is_sent_shortly_before_the_end_of_the_one_that_runs():
    """As soon as one has said how long it takes, and longer ones take longer."""

    async def story():
        slots, carrier, trainer = make(ParallelLayout.of((0,)))
        slots.work_s = lambda number, command: 0.5 * command.count_tokens()
        sizes = [10, 10, 10, 8, 6]
        ends_s = [0.5 * sum(sizes[: number + 1]) for number in range(len(sizes))]
        training = asyncio.create_task(
            trainer.forward_backward([sample(number, size) for number, size in enumerate(sizes)], SEQ_LEN)
        )
        for number, end_s in enumerate(ends_s[1:-1], 1):
            await asyncio.sleep(end_s - AHEAD_S - 0.1 - clock())
            assert len(carrier.sent) == number + 1, "only the one that runs"
            await asyncio.sleep(0.2)
            assert len(carrier.sent) == number + 2
        await training
        assert clock() == pytest.approx(ends_s[-1]), "the slot is never without work"

    play(story)


def test_no_micro_step_waits_in_the_slot_while_a_change_is_under_way():
    async def story():
        slots, carrier, trainer = make(ParallelLayout.of((0,)))
        training = asyncio.create_task(trainer.forward_backward([sample(n, SEQ_LEN) for n in range(8)], SEQ_LEN))
        await asyncio.sleep(0.005)
        with trainer.expecting_change():
            await asyncio.sleep(0.02)  # the two that it has end
            for _ in range(3):
                asked = len(slots.asked)
                await asyncio.sleep(0.01)
                assert len(carrier.sent) == asked + 2, "one has ended, and the next one came"
        await asyncio.sleep(0.01)
        assert len(carrier.sent) == len(slots.asked) + IN_FLIGHT
        await training
        assert clock() == pytest.approx(8 * 0.01)

    play(story)


def test_of_two_changes_under_way_the_one_that_ends_first_leaves_the_other_expected():
    async def story():
        slots, carrier, trainer = make(ParallelLayout.of((0,)))
        training = asyncio.create_task(trainer.forward_backward([sample(n, SEQ_LEN) for n in range(8)], SEQ_LEN))
        with trainer.expecting_change():
            with trainer.expecting_change():
                await asyncio.sleep(0.025)
            await asyncio.sleep(0.02)
            assert len(carrier.sent) == len(slots.asked) + 1
        await training

    play(story)


def test_a_change_that_is_cancelled_as_its_turn_comes_does_not_hold_training():
    """The wait for its turn ends in the turn of the loop in which the last micro-step in flight is heard to have
    ended."""

    async def story():
        slots, _, trainer = make(ParallelLayout.of((0,)))

        async def change():
            async with trainer.boundary():
                raise AssertionError("it was cancelled")

        training = asyncio.create_task(trainer.forward_backward([sample(n, SEQ_LEN) for n in range(8)], SEQ_LEN))
        await asyncio.sleep(0.005)
        changing, ended = asyncio.create_task(change()), []
        await asyncio.sleep(0)

        def on_micro_step(done: object) -> None:
            ended.append(done)
            if len(ended) == 2:
                changing.cancel()

        trainer.on_micro_step.add(on_micro_step)
        await training
        assert len(ended) == 8
        assert changing.cancelled()
        assert slots.wrong == []

    play(story)


def test_the_time_in_which_a_micro_step_waits_in_the_slot_is_none_of_its_own():
    async def story():
        slots, _, trainer = make(ParallelLayout.of((0,)))
        slots.work_s = lambda number, command: 90.0
        await trainer.forward_backward([sample(n, SEQ_LEN) for n in range(4)], SEQ_LEN)
        assert clock() == pytest.approx(4 * 90), "each took less than a command may, and two together more"
        slots.work_s = lambda number, command: 0.01

    play(story)


def test_a_pipeline_is_filled_by_each_message_and_stands_still_between_two():
    async def story():
        slots, carrier, trainer = make(ParallelLayout.of((0, 1, 2, 3), pp=2))
        told: list[MicroStepDone] = []
        trainer.on_micro_step.add(told.append)
        training = asyncio.create_task(trainer.forward_backward([sample(n, SEQ_LEN) for n in range(46)], SEQ_LEN))
        await asyncio.sleep(0.005)
        async with trainer.boundary():
            trained = {number: len(slots.slots[number].live.gradient) for number in range(4)}
            assert trained == dict.fromkeys(range(4), 2 * 8), "two messages were in flight"
        await training
        sizes = {slot: [len(c.micro_batches) for to, c in carrier.sent if to == slot] for slot in range(4)}
        assert list(sizes.values()) == [[8, 8, 7]] * 4
        assert [(done.per_rank, done.num_ranks, done.tokens_fullest, done.tokens_all) for done in told] == [
            (number, 2, number * SEQ_LEN, 2 * number * SEQ_LEN) for number in (8, 8, 7)
        ]
        assert trainer.pending_samples == trainer.pending_tokens == 0

    play(story)


def test_few_samples_are_split_over_the_micro_batches_of_a_message():
    async def story():
        slots, carrier, trainer = make(ParallelLayout.of((0, 1, 2, 3), pp=2))
        assert trainer.micro_batches_per_rank == 8
        await trainer.forward_backward([sample(n, 2000) for n in range(32)], 65_536)
        sizes = {len(command.micro_batches) for _, command in carrier.sent if isinstance(command, ForwardBackward)}
        assert sizes == {8}
        await trainer.optim_step(1.0)
        assert slots.trained == [sorted([*range(32)] * 2)], "both stages have run each sample"

    play(story)


def test_a_boundary_comes_after_the_micro_steps_in_flight():
    async def story():
        slots, carrier, trainer = make(ParallelLayout.of((0,)))
        training = asyncio.create_task(trainer.forward_backward([sample(n, SEQ_LEN) for n in range(9)], SEQ_LEN))
        await asyncio.sleep(0.015)
        async with trainer.boundary():
            done = len(slots.asked)
            assert done == len(carrier.sent) == 3
            await asyncio.sleep(1)
            assert len(carrier.sent) == done
        await training
        assert len(slots.asked) == 9

    play(story)


def test_what_is_left_is_packed_for_the_new_layout():
    async def story():
        slots, carrier, trainer = make(ParallelLayout.of((0,)))
        training = asyncio.create_task(trainer.forward_backward([sample(n, SEQ_LEN) for n in range(9)], SEQ_LEN))
        await asyncio.sleep(0.015)
        async with trainer.boundary():
            trainer.layout = ParallelLayout.of((1, 2))
            for number in (1, 2):
                slots.slots[number].live = slots.slots[0].live
        await training
        micro_batches = {slot: sum(to == slot for to, _ in carrier.sent) for slot in range(3)}
        assert micro_batches == {0: 3, 1: 3, 2: 3}

    play(story)


def test_commands_take_turns_with_a_change():
    async def story():
        slots, _, trainer = make(ParallelLayout.of((0, 1)))
        async with trainer.boundary():
            saving = asyncio.create_task(trainer.save("there"))
            await asyncio.sleep(1)
            assert slots.asked == []
        await saving
        assert [type(command) for _, command in slots.asked] == [SaveState, SaveState]

    play(story)


def test_a_version_is_withdrawn_from_the_slot_that_published_it():
    async def story():
        _, carrier, trainer = make(ParallelLayout.of((3, 1)))
        assert (await trainer.publish(7)).location == "slot 3"
        trainer.layout = ParallelLayout.of((1, 2))
        assert trainer.publishers == {3}
        waiting = asyncio.create_task(trainer.has_withdrawn(3, 100))
        await asyncio.sleep(1)
        assert not waiting.done()
        await trainer.withdraw(7)
        await waiting
        assert trainer.publishers == frozenset()
        assert [(to, c) for to, c in carrier.sent if isinstance(c, Withdraw)] == [(3, Withdraw(7))]
        await trainer.has_withdrawn(3, 0)

    play(story)


def test_no_slot_keeps_a_version_that_goes_to_servers_alone():
    async def story():
        layout = ParallelLayout.of((3, 1))
        _, carrier, _ = make(layout)
        trainer = RemoteTrainer(Mailbox(carrier, clock), layout, Deadlines.same(100), receivers="servers")
        assert (await trainer.publish(7)).carrier == "none"
        trainer.layout = ParallelLayout.of((1, 2))
        assert (trainer.publishers, trainer.needs(3)) == (frozenset(), False)
        await asyncio.wait_for(trainer.has_withdrawn(3, 100), 1.0)
        await trainer.withdraw(7)
        assert carrier.sent == [], "nobody has a snapshot to free"

    play(story)


def test_a_failed_micro_step_ends_the_batch():
    async def story():
        _, carrier, trainer = make(ParallelLayout.of((0, 1)))
        carrier.fail(1, "error", on=ForwardBackward)
        with pytest.raises(Refused, match="ForwardBackward failed, as asked"):
            await trainer.forward_backward([sample(n, SEQ_LEN) for n in range(9)], SEQ_LEN)
        assert len(carrier.sent) <= 2 * (IN_FLIGHT + 1)

    play(story)


def test_a_lost_trainer_says_so_to_whoever_asks():
    async def story():
        _, carrier, trainer = make(ParallelLayout.of((0, 1)))
        training = asyncio.create_task(trainer.forward_backward([sample(n, SEQ_LEN) for n in range(9)], SEQ_LEN))
        await asyncio.sleep(0.001)
        async with trainer.boundary():
            trainer.lose(TrainerLost("slot 1 held half of it"))
        with pytest.raises(TrainerLost, match="half of it"):
            await training
        with pytest.raises(TrainerLost, match="half of it"):
            await trainer.optim_step(1.0)
        assert not any(isinstance(command, OptimStep) for _, command in carrier.sent)

    play(story)


def test_a_sample_that_is_too_long_is_refused_before_anything_is_sent():
    async def story():
        _, carrier, trainer = make(ParallelLayout.of((0,)))
        with pytest.raises(SampleTooLong):
            await trainer.forward_backward([sample(0, SEQ_LEN + 1)], SEQ_LEN)
        assert carrier.sent == []

    play(story)


def test_held_training_begins_no_micro_step_until_it_is_released():
    async def story():
        slots, carrier, trainer = make(ParallelLayout.of((0,)))
        training = asyncio.create_task(trainer.forward_backward([sample(n, SEQ_LEN) for n in range(9)], SEQ_LEN))
        await asyncio.sleep(0.015)
        trainer.hold_training(True)
        await asyncio.sleep(1)
        assert (len(slots.asked), trainer.pending_samples, trainer.pending_tokens) == (3, 6, 6 * SEQ_LEN)
        async with trainer.boundary():
            trainer.layout = ParallelLayout.of((1,))
            slots.slots[1].live = slots.slots[0].live
        await trainer.save("there")
        assert isinstance(carrier.sent[-1][1], SaveState), "everything else goes on"
        trainer.hold_training(False)
        await training
        assert sum(isinstance(command, ForwardBackward) for _, command in slots.asked) == 9
        assert (trainer.pending_samples, trainer.pending_tokens) == (0, 0)

    play(story)


def test_training_is_not_held_for_ever():
    async def story():
        _, _, trainer = make(ParallelLayout.of((0,)))
        trainer.hold_training(True)
        with pytest.raises(
            Late, match=r"held training back for 100 s \(cluster.patience_timeout_s\), with 9 samples waiting"
        ):
            await trainer.forward_backward([sample(n, SEQ_LEN) for n in range(9)], SEQ_LEN)
        assert trainer.pending_samples == 0

    play(story)


def test_a_trainer_that_did_not_reply_is_not_waited_for_again():
    """A run that ends because of it tries to save, and would wait for as long once more."""

    async def story():
        _, carrier, trainer = make(ParallelLayout.of((0, 1)))
        carrier.fail(1, "drop", OptimStep)
        with pytest.raises(Late, match=r"slot 1.* did not reply to OptimStep within 100 s"):
            await trainer.optim_step(1.0)
        assert clock() == pytest.approx(100)
        with pytest.raises(TrainerLost, match=r"slot 1.* did not reply to OptimStep within 100 s"):
            await trainer.save("nowhere")
        assert clock() == pytest.approx(100)

    play(story)


def test_a_lost_trainer_is_not_waited_for_while_it_is_held():
    async def story():
        _, _, trainer = make(ParallelLayout.of((0,)))
        trainer.hold_training(True)
        training = asyncio.create_task(trainer.forward_backward([sample(0, SEQ_LEN)], SEQ_LEN))
        await asyncio.sleep(1)
        trainer.lose(TrainerLost("slot 0 held all of it"))
        with pytest.raises(TrainerLost, match="all of it"):
            await training
        assert clock() < 2

    play(story)


def test_micro_steps_tell_how_long_the_slowest_slot_worked_and_not_how_long_it_waited():
    async def story():
        slots, _, trainer = make(ParallelLayout.of((0, 1)))
        slots.work_s = lambda slot, command: 0.01 + 0.02 * slot
        told: list[MicroStepDone] = []
        trainer.on_micro_step.add(told.append)
        await trainer.forward_backward([sample(n, 3 + n) for n in range(6)], SEQ_LEN)
        assert len(told) == 2
        assert [(done.num_ranks, done.per_rank, done.busy_s) for done in told] == [(2, 1, 0.03)] * 2
        assert sum(done.tokens_all for done in told) == 3 + 4 + 5 + 6 + 7 + 8
        assert all(done.tokens_all / 2 <= done.tokens_fullest <= SEQ_LEN for done in told)

    play(story)


def test_a_version_is_offered_in_the_middle_of_a_batch_as_long_as_the_weights_are_it():
    async def story():
        _, _, trainer = make(ParallelLayout.of((0, 1)))
        await trainer.publish(3)
        await trainer.withdraw(3)
        training = asyncio.create_task(trainer.forward_backward([sample(n, SEQ_LEN) for n in range(40)], SEQ_LEN))
        await asyncio.sleep(0.015)
        assert trainer.can_offer(3)
        await trainer.offer(3)
        assert not training.done()
        await trainer.withdraw(3)
        await training
        stepping = asyncio.create_task(trainer.optim_step(1.0))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="the trainer has gone on from version 3, and cannot offer it"):
            await trainer.offer(3)
        await stepping
        assert not trainer.can_offer(3)

    play(story)


def test_a_version_is_whole_for_those_who_have_none_and_else_what_is_trained():
    async def story():
        _, _, trainer = make(ParallelLayout.of((0, 1)))
        assert (await trainer.publish(0)).is_whole, "nobody has any"
        assert not (await trainer.publish(1)).is_whole
        assert (await trainer.offer(1)).is_whole, "it is for who joins"
        assert (await trainer.offer(1)).is_whole
        assert not (await trainer.publish(2)).is_whole
        for _ in range(3):
            await trainer.withdraw(1)
        assert trainer.can_offer(2)
        trainer.want_whole()
        assert (await trainer.publish(3)).is_whole
        assert not (await trainer.publish(4)).is_whole

    play(story)


def test_a_version_that_is_gone_is_refused_at_once_though_a_change_has_the_turn():
    """The change may wait until the slot that asks for the version has joined."""

    async def story():
        _, _, trainer = make(ParallelLayout.of((0, 1)))
        await trainer.publish(3)
        await trainer.withdraw(3)
        await trainer.optim_step(1.0)
        async with trainer.boundary():
            with pytest.raises(Refused, match="the trainer has gone on from version 3"):
                await asyncio.wait_for(trainer.offer(3), 1.0)

    play(story)


def test_an_offer_of_a_version_that_is_published_does_not_publish_it_again():
    async def story():
        _, carrier, trainer = make(ParallelLayout.of((0,)))
        manifest = await trainer.publish(3)
        await trainer.optim_step(1.0)
        assert await trainer.offer(3) == manifest
        await trainer.withdraw(3)
        assert trainer.publishers == {0}, "the second user has it still"
        await trainer.withdraw(3)
        assert trainer.publishers == frozenset()
        assert [type(command).__name__ for _, command in carrier.sent] == ["Publish", "OptimStep", "Withdraw"]

    play(story)


@pytest.mark.parametrize("command", ["publish", "save", "export"])
def test_a_command_that_failed_and_lost_no_state_is_tried_once_more(command: str):
    async def story():
        _, carrier, trainer = make(ParallelLayout.of((4, 2)))
        kind, arguments = {
            "publish": (Publish, (1,)),
            "save": (SaveState, ("x",)),
            "export": (ExportModel, ("x", "auto")),
        }[command]
        carrier.fail(4, "error", on=kind, code=StateKept.code)
        await getattr(trainer, command)(*arguments)
        assert [slot for slot, sent in carrier.sent if isinstance(sent, kind)] == [4, 2, 4, 2]
        carrier.fail(2, "error", on=kind, code=StateKept.code, times=2)
        with pytest.raises(StateKept, match=rf"slot 2.*{kind.__name__} failed, as asked"):
            await getattr(trainer, command)(*(2 if argument == 1 else argument for argument in arguments))

    play(story)


def test_a_command_that_failed_otherwise_is_not_tried_again():
    async def story():
        _, carrier, trainer = make(ParallelLayout.of((4, 2)))
        carrier.fail(4, "error", on=SaveState, code=StateKept.code)
        carrier.fail(2, "error", on=SaveState)
        with pytest.raises(Refused, match=r"slot 2.*SaveState failed, as asked"):
            await trainer.save("x")
        assert sum(isinstance(sent, SaveState) for _, sent in carrier.sent) == 2

    play(story)
