"""The faults that the memory transport makes on request."""

import asyncio

import pytest

from ductile.messages.workers import Done, OptimStep, Ping
from ductile.roles import Late, Refused, SlotLost
from ductile.transport.mailbox import Mailbox
from tests.transport.memory_transport import MemoryTransport


@pytest.fixture
def carrier():
    return MemoryTransport({0: lambda slot, command: Done(), 1: lambda slot, command: Done()})


@pytest.mark.parametrize(("kind", "error"), [("drop", Late), ("error", Refused), ("death", SlotLost)])
def test_fault_becomes_its_error_once_and_only_for_its_slot(carrier: MemoryTransport, kind, error):
    async def story():
        mailbox = Mailbox(carrier)
        carrier.on_death.add(mailbox.lose)
        carrier.fail(1, kind)
        with pytest.raises(error):
            await mailbox.ask(1, Ping(), 0.05)
        assert await mailbox.ask(0, Ping(), 1) == Done()
        if kind == "death":
            with pytest.raises(SlotLost, match="slot 1 died, as asked"):
                await mailbox.ask(1, Ping(), 1)
        else:
            assert await mailbox.ask(1, Ping(), 1) == Done()

    asyncio.run(story())


def test_fault_waits_for_its_command(carrier: MemoryTransport):
    async def story():
        mailbox = Mailbox(carrier)
        carrier.fail(0, "error", on=OptimStep, times=2)
        assert await mailbox.ask(0, Ping(), 1) == Done()
        for _ in range(2):
            with pytest.raises(Refused, match="OptimStep failed, as asked"):
                await mailbox.ask(0, OptimStep(1.0), 1)
        assert await mailbox.ask(0, OptimStep(1.0), 1) == Done()
        assert [type(command) for _, command in carrier.sent] == [Ping, OptimStep, OptimStep, OptimStep]

    asyncio.run(story())


def test_doubled_and_delayed_replies_are_counted_not_used(carrier: MemoryTransport):
    async def story():
        mailbox = Mailbox(carrier)
        carrier.fail(0, "duplicate")
        assert await mailbox.ask(0, Ping(), 1) == Done()
        carrier.fail(0, "delay", delay_s=0.05)
        with pytest.raises(Late):
            await mailbox.ask(0, Ping(), 0.01)
        await asyncio.sleep(0.1)
        assert mailbox.unused == {"Done": 2}
        assert await mailbox.ask(0, Ping(), 1) == Done()

    asyncio.run(story())
