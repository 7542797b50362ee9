"""The run's sockets between machines: who has the key is let in, and nobody else."""

import asyncio
import os

import pytest
import zmq

from ductile.transport.curve import NoKey, RunKey
from ductile.transport.frames import FrameDealer, FrameRouter
from tests.transport.transports import ON_LOOPBACK, eventually

KEY = RunKey.new()


def test_a_key_is_shown_nowhere_and_is_itself_when_it_is_read():
    assert KEY.secret not in repr(KEY)
    assert RunKey.of(f" {KEY.secret}\n") == KEY
    assert RunKey.of(KEY.secret).public == KEY.public != KEY.secret
    assert RunKey.new().token != KEY.token == RunKey(KEY.secret).token


@pytest.mark.parametrize("text", ["", "short", "x" * 41, "ü" * 40, "~" * 40])
def test_what_is_no_key_is_not_repeated(text: str):
    with pytest.raises(NoKey) as raised:
        RunKey.of(text)
    assert not text or text not in str(raised.value)


def test_those_with_the_key_talk_and_strangers_are_counted():
    async def story() -> None:
        router = FrameRouter(KEY.token, ON_LOOPBACK, KEY)
        ours = FrameDealer(router.address, KEY.token, 3, KEY)
        strangers = zmq.Context()
        try:
            await ours.send(b"hello")
            async with asyncio.timeout(100):
                connection, number, payload = await router.receive()
            assert (number, payload) == (3, b"hello")
            await router.send(connection, b"welcome")
            async with asyncio.timeout(100):
                assert await ours.receive() == b"welcome"
            hearing = asyncio.create_task(router.receive())
            # One that is not kept would wait, as it is freed, for a message that nobody takes.
            knocking = [knock(strangers, router.address) for knock in (plain, garbage, knows_the_public_key)]
            await eventually(lambda: router.dropped["unknown key"] > 0)
            assert not hearing.done()
            await ours.send(b"again")
            async with asyncio.timeout(100):
                assert (await hearing)[2] == b"again"
            assert set(router.dropped) == {"unknown key"}
            assert all(not each.closed for each in knocking)
        finally:
            strangers.destroy(linger=0)
            ours.close(0)
            router.close()

    asyncio.run(story())


def test_a_connection_that_ends_is_noticed():
    async def story() -> None:
        router = FrameRouter(KEY.token, ON_LOOPBACK, KEY)
        dealer = FrameDealer(router.address, KEY.token, 0, KEY)
        watching = asyncio.create_task(dealer.broken(0.1))
        await dealer.send(b"hello")
        async with asyncio.timeout(100):
            await router.receive()
        await eventually(lambda: dealer.was_connected)
        assert not watching.done()
        router.close()
        async with asyncio.timeout(100):
            await watching
        dealer.close(0)

    asyncio.run(story())


def plain(context: zmq.Context, address: str) -> zmq.Socket:
    """The token without the key."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(address)
    dealer.send_multipart([KEY.token, b"0", b"let me in"])
    return dealer


def garbage(context: zmq.Context, address: str) -> zmq.Socket:
    dealer = context.socket(zmq.STREAM)
    dealer.connect(address)
    name = dealer.recv()
    dealer.recv()
    dealer.send_multipart([name, os.urandom(1000)])
    return dealer


def knows_the_public_key(context: zmq.Context, address: str) -> zmq.Socket:
    dealer = context.socket(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    dealer.setsockopt(zmq.CURVE_SERVERKEY, KEY.public.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
    dealer.connect(address)
    dealer.send_multipart([KEY.token, b"0", b"let me in"])
    return dealer
