import asyncio

from ductile.core.cluster.placement import Placement
from ductile.launch.activity import ACTIVITIES, SlotActivity
from ductile.records import GenerateRequest, Sampling
from ductile.slot.worker import HANDLED_BY
from ductile.wire.mailbox import Mailbox
from ductile.wire.memory import MemoryCarrier
from ductile.wire.messages import Done, EngineStats, Generate, OptimStep


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
        carrier = MemoryCarrier({0: lambda slot, command: Done(), 1: lambda slot, command: Done()})
        mailbox, view = Mailbox(carrier), Seen()
        SlotActivity(mailbox, Placement((0,), (1,), (), ""), view)
        await mailbox.ask(0, OptimStep(1.0), 1)
        await mailbox.ask(1, Generate((GenerateRequest("a", (1,), Sampling()),)), 1)
        carrier.emit(1, stats(1))
        await asyncio.sleep(0)
        carrier.emit(1, stats(0))
        await asyncio.sleep(0.01)
        assert view.told == [
            (0, ("train",), "train"),
            (0, ("train",), "idle"),
            (1, ("generate",), "generate"),
            (1, ("generate",), "idle"),
        ]

    asyncio.run(story())


def test_every_command_of_a_role_is_some_activity():
    assert {command.__name__ for command in HANDLED_BY} <= set(ACTIVITIES)
