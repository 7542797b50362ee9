import asyncio

from ductile.launch.activity import ACTIVITIES, SlotActivity
from ductile.records import GenerateRequest, Sampling
from ductile.slot.worker import HANDLED_BY
from ductile.wire.mailbox import Mailbox
from ductile.wire.memory import MemoryCarrier
from ductile.wire.messages import Done, EngineStats, Generate, Hold, OptimStep


class Seen:
    def __init__(self) -> None:
        self.told: list[tuple[int, tuple[str, ...], str]] = []

    def on_slot(self, slot, roles, doing) -> None:
        if not self.told or self.told[-1] != (slot, roles, doing):
            self.told.append((slot, roles, doing))


def stats(running: int) -> EngineStats:
    return EngineStats(running, 0, 5, 0, 0.0, 0)


def test_commands_and_engines_make_activities():
    async def story():
        now_s = 0.0

        def answer(slot, command):
            nonlocal now_s
            now_s += 2.0
            return Done()

        carrier = MemoryCarrier({0: answer, 1: answer})
        mailbox, view = Mailbox(carrier), Seen()
        activity = SlotActivity(mailbox, view, lambda: now_s)
        await mailbox.ask(0, Hold("train", {}, (0,)), 1)
        await mailbox.ask(1, Hold("generate", {}, (1,)), 1)
        await mailbox.ask(0, OptimStep(1.0), 1)
        await mailbox.ask(1, Generate((GenerateRequest("a", (1,), Sampling()),)), 1)
        carrier.emit(1, stats(1))
        await asyncio.sleep(0)
        carrier.emit(1, stats(0))
        await asyncio.sleep(0.01)
        assert view.told == [
            (0, ("train",), "switch"),
            (0, ("train",), "idle"),
            (1, ("generate",), "switch"),
            (1, ("generate",), "idle"),
            (0, ("train",), "train"),
            (0, ("train",), "idle"),
            (1, ("generate",), "generate"),
            (1, ("generate",), "idle"),
        ]
        assert activity.ledger(0).totals(10.0) == {"switch": 2.0, "idle": 6.0, "train": 2.0}

    asyncio.run(story())


def test_every_command_of_a_role_is_some_activity():
    assert {command.__name__ for command in HANDLED_BY} <= set(ACTIVITIES)
