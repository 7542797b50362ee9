"""What the socket lets in."""

import asyncio

import pytest
import zmq
import zmq.asyncio

from ductile.roles import SlotLost
from ductile.wire.codec import encode
from ductile.wire.dealer import Dealer
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Abort, Done, Envelope, Hello, Ping
from ductile.wire.router import Router
from tests.wire.transports import ON_LOOPBACK, TOKEN, SocketSlot, eventually, socket_slots

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

    asyncio.run(asyncio.wait_for(story(), 20))


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

    asyncio.run(asyncio.wait_for(story(), 20))


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

    asyncio.run(asyncio.wait_for(story(), 20))


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

    asyncio.run(asyncio.wait_for(story(), 20))
