"""What the socket lets in."""

import asyncio
import time

import numpy as np
import pytest
import zmq
import zmq.asyncio

from ductile.messages.workers import Abort, Command, Done, Envelope, Finished, Hello, Ping, Score
from ductile.records import Generation, Sample
from ductile.roles import SlotLost
from ductile.transport import parcel
from ductile.transport.codec import LONG_FRAME_BYTES, encode, encode_body
from ductile.transport.dealer import Dealer
from ductile.transport.mailbox import Mailbox
from ductile.transport.router import Router
from tests.transport.transports import ON_LOOPBACK, TOKEN, SocketSlot, eventually, socket_slots

HELLO = encode(Envelope(0, 0, Hello(pid=1, device="cpu")))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"wrong token", b"0", HELLO], "unknown token"),
        ([b"", b"0", HELLO], "unknown token"),
        ([TOKEN, b"0", b"garbage"], "unreadable"),
        ([TOKEN, b"zero", HELLO], "unreadable"),
        ([TOKEN, HELLO], "wrong number of frames"),
        ([TOKEN, b"0", encode(Envelope(0, 1, Done()))], "no Hello"),
    ],
)
def test_strangers_are_dropped_counted_and_disturb_nobody(frames: list[bytes], reason: str):
    async def story():
        async with socket_slots({0: lambda slot, command: Done()}) as (mailbox, _):
            router = mailbox._transport
            stranger = zmq.asyncio.Context()
            socket = stranger.socket(zmq.DEALER)
            socket.connect(router.address)
            await socket.send_multipart(frames)
            await eventually(lambda: router.dropped)
            assert router.dropped == {reason: 1}
            assert await mailbox.ask(0, Ping(), 5) == Done()
            stranger.destroy(linger=0)

    asyncio.run(asyncio.wait_for(story(), 100))


def test_a_receiver_that_fails_is_told_of():
    async def story():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        told = []
        router = Router(TOKEN, ON_LOOPBACK, on_error=lambda sentence, error: told.append((sentence, repr(error))))
        router.listen(lambda slot, envelope: {}["books"])
        slot = SocketSlot(0, router.address, lambda slot, command: Done())
        await eventually(lambda: told)
        assert told == [("the slots cannot be heard any more", "KeyError('books')")]
        slot.stop()
        await router.close()

    asyncio.run(asyncio.wait_for(story(), 100))


def test_a_stale_token_never_becomes_a_slot():
    async def story():
        router = Router(TOKEN, ON_LOOPBACK)
        mailbox = Mailbox(router)
        stale = SocketSlot(0, router.address, lambda slot, command: Done(), token=b"the token of yesterday's run....")
        await eventually(lambda: router.dropped)
        with pytest.raises(SlotLost, match="slot 0 has not said Hello"):
            await mailbox.ask(0, Ping(), 5)
        stale.stop()
        await router.close()

    asyncio.run(asyncio.wait_for(story(), 100))


def test_a_command_of_an_older_epoch_never_comes_after_one_of_a_newer():
    """A slot refuses it then: so whoever changes the epoch need not wait for what is on its way."""

    async def story():
        router = Router(TOKEN, ON_LOOPBACK)
        mailbox = Mailbox(router)
        dealer = Dealer(router.address, TOKEN, 0)
        dealer.send(HELLO)
        await eventually(lambda: 0 in mailbox.heard_at_s)
        asked = []
        for number in range(300):
            asked.append(asyncio.create_task(mailbox.ask(0, Abort((str(number),) * 500), 10)))
            mailbox.epoch += number % 3 == 0
            if number % 7 == 0:
                await asyncio.sleep(0)
        epochs: list[int] = []

        def received() -> bool:
            while envelope := dealer.receive():
                epochs.append(envelope.epoch)
                dealer.send(encode(Envelope(envelope.epoch, envelope.seq, Done())))
            return len(epochs) == len(asked)

        await eventually(received)
        assert epochs == sorted(epochs)
        assert len(set(epochs)) > 10
        await asyncio.gather(*asked)
        dealer.close()
        await router.close()

    asyncio.run(asyncio.wait_for(story(), 100))


def test_a_short_command_never_overtakes_a_long_one():
    """Long ones are encoded in a thread, and ranks of one layout must get their commands in the same order."""
    long = Score((Sample((1,) * 400_000, (True,) * 400_000),), "policy")

    async def story():
        router = Router(TOKEN, ON_LOOPBACK)
        mailbox = Mailbox(router)
        dealers = [Dealer(router.address, TOKEN, slot) for slot in (0, 1)]
        for slot, dealer in enumerate(dealers):
            dealer.send(encode(Envelope(0, 0, Hello(slot, "cpu"))))
        await eventually(lambda: {0, 1} <= mailbox.heard_at_s.keys())
        commands = [long, Ping(), Ping(), long, Ping()]
        asked = [asyncio.create_task(mailbox.ask(slot, command, 15)) for command in commands for slot in (0, 1)]
        got: list[list[type]] = [[], []]

        def received() -> bool:
            for kinds, dealer in zip(got, dealers, strict=True):
                while envelope := dealer.receive():
                    kinds.append(type(envelope.body))
                    dealer.send(encode(Envelope(0, envelope.seq, Done())))
            return all(len(kinds) == len(commands) for kinds in got)

        await eventually(received)
        assert got == [[type(command) for command in commands]] * 2
        await asyncio.gather(*asked)
        for dealer in dealers:
            dealer.close()
        await router.close()

    asyncio.run(asyncio.wait_for(story(), 100))


@pytest.mark.parametrize("num_tokens", [4, 400_000])
def test_the_same_command_for_several_slots_is_encoded_once(num_tokens, monkeypatch):
    encoded = []
    monkeypatch.setattr(parcel, "encode_body", lambda command: encoded.append(command) or encode_body(command))

    async def story():
        got: dict[int, Command] = {}
        first, second = (Score((Sample((n,) * num_tokens, (True,) * num_tokens),), "policy") for n in (1, 2))

        def respond(slot: int, command: Command) -> Done:
            got[slot] = command
            return Done()

        async with socket_slots(dict.fromkeys(range(4), respond)) as (mailbox, _):
            commands = {0: first, 1: second, 2: first, 3: first}
            await mailbox.ask_all(commands, 15)
        assert got == commands
        assert encoded == [first, second]

    asyncio.run(asyncio.wait_for(story(), 100))


def test_long_messages_arrive_in_order():
    """They are decoded in a thread; a short one that comes after a long one still comes after it."""
    length = LONG_FRAME_BYTES // 4
    draw = np.random.default_rng(1)
    long = Generation("long", (7,) * length, draw.standard_normal(length), (0,) * length, "length")

    async def story():
        router = Router(TOKEN, ON_LOOPBACK)
        heard: list[object] = []
        router.listen(lambda slot, envelope: heard.append(envelope.body))
        dealer = Dealer(router.address, TOKEN, 0)
        dealer.send(HELLO)
        for _ in range(3):
            dealer.send(encode(Envelope(0, 0, Finished((long,)))))
            dealer.send(encode(Envelope(0, 0, Finished(()))))
        await eventually(lambda: len(heard) == 7)
        assert heard[1::2] == [Finished((long,))] * 3
        assert heard[2::2] == [Finished(())] * 3
        dealer.close()
        await router.close()

    asyncio.run(asyncio.wait_for(story(), 100))


def test_other_tasks_have_a_turn_between_two_messages_however_many_wait():
    num_messages = 300

    async def story():
        router = Router(TOKEN, ON_LOOPBACK)
        num_turns, heard_at = 0, []

        async def others():
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        router.listen(lambda slot, envelope: heard_at.append(num_turns))
        dealer = Dealer(router.address, TOKEN, 0)
        dealer.send(HELLO)
        await eventually(lambda: heard_at)
        for _ in range(num_messages):
            dealer.send(encode(Envelope(0, 0, Finished(()))))
        time.sleep(0.3)  # noqa: ASYNC251  (they wait in the socket then)
        turning = asyncio.create_task(others())
        await eventually(lambda: len(heard_at) == num_messages + 1)
        turning.cancel()
        assert len(set(heard_at[1:])) == num_messages
        dealer.close()
        await router.close()

    asyncio.run(asyncio.wait_for(story(), 100))
