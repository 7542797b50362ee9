"""Strangers at the port of a rank that sends weights: nothing gets in, and the servers that they are for get all."""

import random
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from ductile.messages.updates import PrepareUpdate, Receiver, WeightUpdate
from ductile.weights.carriers.channel import Challenge, ReceiverHello
from ductile.weights.carriers.control import MAX_UNPROVEN, proof
from tests.cluster.listening import inodes_of, listening
from tests.cluster.strangers import NUM_ATTEMPTS, PATIENCE_S, Recording, recorded, wait_for
from tests.weights.member import Task, content, fingerprint, offer_of
from tests.weights.test_carriers import Member

SIZES = (70_001, 3, 300_000)


def update_for(*names: str) -> WeightUpdate:
    receivers = tuple(Receiver(name, "point_to_point") for name in names)
    return WeightUpdate("run-1.7", 3, 7, receivers, bucket_timeout_s=PATIENCE_S)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def hello_of(name: str, secret: str, nonce: bytes) -> bytes:
    said = ReceiverHello(name, "point_to_point", b"n" * 16, proof(secret, "receiver", name, nonce))
    return framed(msgspec.msgpack.encode(said))


def knock(location: tuple[str, int], number: int, secret: str, session: Recording) -> bytes:
    """Try by a seed, and return what comes after the challenge."""
    seeded = random.Random(number)
    with socket.create_connection(location, PATIENCE_S) as one:
        challenge = one.recv(1 << 16)
        nonce = msgspec.msgpack.decode(challenge[4:], type=Challenge).nonce
        kinds = [
            hello_of("server-b", seeded.randbytes(16).hex(), nonce),
            hello_of("server-b", secret, seeded.randbytes(16)),
            hello_of("server-c", secret, nonce),
            hello_of("server-b", "", nonce),
            session.of("client"),
            session.of("server"),
            challenge,
            (1 << 31).to_bytes(4, "big") + seeded.randbytes(100),
            framed(seeded.randbytes(seeded.choice([1, 30, 3000]))),
            seeded.randbytes(1 << 16),
        ]
        heard = b""
        with suppress(OSError):
            one.sendall(kinds[number % len(kinds)])
            one.shutdown(socket.SHUT_WR)
            while piece := one.recv(1 << 16):
                heard += piece
        return heard


def test_strangers_at_a_ranks_port_get_nothing_and_the_server_gets_its_weights(tmp_path: Path) -> None:
    update = update_for("server-a", "server-b")
    rank = Member(tmp_path, "rank-0", Task(send=update, sizes=SIZES))
    silent, members = list[socket.socket](), [rank]
    try:
        location = rank.until("location")
        host, _, port = location.rpartition(":")
        assert listening([rank.process.pid]) == {(host, int(port)): {rank.process.pid}}

        def receiver(name: str, at: str) -> Member:
            offer = msgspec.structs.replace(offer_of("rank-0", SIZES), location=at)
            members.append(
                Member(tmp_path, name, Task(prepare=PrepareUpdate(update, "point_to_point", (offer,), name)))
            )
            return members[-1]

        with recorded((host, int(port))) as (before_it, session):
            first = receiver("server-a", f"{before_it[0]}:{before_it[1]}")
            wait_for(lambda: len(session.pieces) >= 3, "both sides have proven themselves")
            known = inodes_of(rank.process.pid)
            silent += [socket.create_connection((host, int(port)), PATIENCE_S) for _ in range(2 * MAX_UNPROVEN)]
            for number in range(NUM_ATTEMPTS):
                assert knock((host, int(port)), number, update.secret, session) == b"", number
            wait_for(lambda: len(inodes_of(rank.process.pid) - known) <= MAX_UNPROVEN, "silent ones make room")
            second = receiver("server-b", location)
            expected = fingerprint(
                {("rank-0", index): content("rank-0", index, size) for index, size in enumerate(SIZES)}
            )
            assert [each.until("staged") for each in (first, second)] == [expected, expected]
            assert update.secret.encode() not in session.of("client") + session.of("server")
        assert msgspec.json.decode(rank.until("report"))["failed"] == {}
        assert rank.process.wait(PATIENCE_S) == 0
    finally:
        for one in silent:
            one.close()
        for member in members:
            member.end()
