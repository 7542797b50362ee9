"""What a request without a reply says of who was asked, over real sockets, and the failure that it is."""

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable

import pytest

from ductile.fleet.servers.server_http import ServerDeadlines, ServerHttp
from ductile.roles import Failure, Interrupted, Late, NotTaken, SlotLost
from ductile.transport.http_client import HttpClient, Kind, NoReply, classify

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
LATE_S = 0.1


def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


def ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    writer.close()


def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...


def says_too_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + 100 * b"x")


FOUND: list[tuple[Handler | None, Kind, type[Failure] | None]] = [
    (None, "closed", SlotLost),
    (resets, "lost", Interrupted),
    (ends, "lost", Interrupted),
    (says_nothing, "silent", Late),
    (says_too_much, "odd", None),
]


@pytest.mark.parametrize(("handle", "kind", "failure"), FOUND)
def test_why_there_is_no_reply(handle: Handler | None, kind: Kind, failure: type[Failure] | None) -> None:
    async def story() -> None:
        taken: list[asyncio.StreamWriter] = []

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken.append(writer)
            assert handle is not None
            handle(reader, writer)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            server = None if handle is None else await asyncio.start_server(take, sock=listener)
            if server is None:
                listener.close()
            await fails(f"http://127.0.0.1:{port}", kind, failure)
            if server is not None:
                server.close()
        for writer in taken:  # that a handler has left open
            writer.transport.abort()
        await asyncio.sleep(0)  # each is closed in the loop's next turn

    asyncio.run(story())


def test_no_server_is_to_blame_when_we_have_no_files_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*args: object, **kwargs: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def story() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", no_more)
            await fails("http://127.0.0.1:9", "unasked", NotTaken)

    asyncio.run(story())


def test_nobody_listens_at_a_host_of_which_one_address_refuses_and_another_has_no_way_there() -> None:
    error = OSError("All connection attempts failed")
    no_way = OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
    refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    error.__cause__ = ExceptionGroup("attempts", [no_way, refused])
    assert classify(error) == "closed"
    assert classify(no_way) == "unasked"


async def fails(url: str, kind: Kind, failure: type[Failure] | None) -> None:
    client, server = HttpClient(), ServerHttp(url, None, None, ServerDeadlines())
    try:
        with pytest.raises(NoReply) as found:
            await client.ask("GET", url, LATE_S, most_bytes=50)
        assert found.value.kind == kind
        assert url in str(found.value)
        if failure is not None:
            with pytest.raises(failure):
                await server.ask("GET", "/", deadline_s=LATE_S)
    finally:
        await client.close()
        await server.close()
