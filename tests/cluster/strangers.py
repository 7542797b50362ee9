"""What strangers try at a port: as many attempts as `NUM_ATTEMPTS`, by a seed.

    with Strangers(seed) as strangers:
        strangers.try_curve(address, public_key, recorded)       a ZeroMQ socket with CURVE
        strangers.try_http(address, requests)                    requests without the right key, and what is no request
        strangers.try_lines(address, lines)                      a line each way
        strangers.assert_hung_up(within_s)

Each attempt is over, or held open in silence, when its turn ends. None may be let in: `AssertionError` says which was.
"""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.cluster.listening import Address

NUM_ATTEMPTS = 50
PATIENCE_S = 120.0
"""Time that a port has to reply or to hang up, on a busy machine: TLS has a minute for its handshake."""
LOCKSTEP_S = 5.0
"""Time to wait for the reply to a recorded frame: one that is refused may have none."""
MIB = 1 << 20
OVER = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | OVER
)
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
"""The first bytes of ZMTP."""


def greeting(mechanism: bytes, version: bytes = b"\x03\x01") -> bytes:
    return SIGNATURE + version + mechanism.ljust(20, b"\0") + bytes(32)


@dataclass
class Recording:
    """A session between two that have the key, as one sees it who sits between them."""

    pieces: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    """What came, in order: ("client", bytes) or ("server", bytes)."""

    def of(self, side: str) -> bytes:
        return b"".join(piece for who, piece in self.pieces if who == side)


@contextmanager
def recorded(address: Address) -> Iterator[tuple[Address, Recording]]:
    """A port before another one, which writes down the first connection that goes through it, and passes all on."""
    listener, recording = socket.create_server(("127.0.0.1", 0)), Recording()
    listener.settimeout(0.2)
    ended, threads = threading.Event(), list[threading.Thread]()

    def copy(who: str, source: socket.socket, target: socket.socket, pieces: list[tuple[str, bytes]]) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                pieces.append((who, piece))
                target.sendall(piece)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        pieces = recording.pieces
        while not ended.is_set():
            with suppress(TimeoutError):
                client, server = listener.accept()[0], socket.create_connection(address, PATIENCE_S)
                server.settimeout(None)
                for words in (("client", client, server, pieces), ("server", server, client, pieces)):
                    threads.append(threading.Thread(target=copy, args=words, daemon=True))
                    threads[-1].start()
                opened.extend((client, server))
                pieces = []

    opened = list[socket.socket]()
    threads.append(threading.Thread(target=accept, daemon=True))
    threads[0].start()
    try:
        yield listener.getsockname(), recording
    finally:
        ended.set()
        for each in opened:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(PATIENCE_S)
        for each in (listener, *opened):
            each.close()


class Strangers:
    """Whoever has found a port, and has no key."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._context = zmq.Context()
        self._held: list[tuple[str, socket.socket]] = []
        self.connections: set[tuple[Address, Address]] = set()
        """From where to where they have connected."""

    def __enter__(self) -> "Strangers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, each in self._held:
            each.close()
        self._context.destroy(linger=0)

    def assert_hung_up(self) -> None:
        """See that nobody whose silence was held open still has a connection."""
        for name, each in self._held:
            each.settimeout(2 * PATIENCE_S)
            try:
                while each.recv(1 << 16):
                    pass
            except TimeoutError:
                raise AssertionError(f"{name}: a silent stranger still has its connection") from None
            except OSError:
                pass
            each.close()
        self._held.clear()

    # -- CURVE ------------------------------------------------------------------------------------------------------

    def try_curve(self, address: Address, public_key: str, frames: Sequence[bytes], recording: Recording) -> None:
        """frames: what those who have the key send. recording: a session of theirs with this port, or its like."""
        kinds: list[Callable[[], None]] = [
            lambda: self._hold("half a greeting", address, greeting(b"CURVE")[: self._random.randrange(64)]),
            lambda: self._knock(address, frames, lambda one: _with_curve(one, public_key)),
            lambda: self._knock(address, frames, lambda one: _with_curve(one, zmq.curve_keypair()[0].decode())),
            lambda: self._knock(address, frames, lambda one: None),
            lambda: self._knock(address, frames, _with_password),
            lambda: self._replay(address, recording),
            lambda: self._replay(address, recording, harm=True),
            lambda: self._refused_by_curve(address, recording.of("client")),
            lambda: self._refused_by_curve(address, self._noise()),
            lambda: self._refused_by_curve(address, greeting(b"CURVE") + self._noise()),
            lambda: self._refused_by_curve(
                address, greeting(b"CURVE") + self._huge() + bytes(self._random.randrange(99))
            ),
            lambda: self._refused_by_curve(address, b"\xff" + self._huge()[1:] + b"\x7f" + self._noise()),
            lambda: self._refused_by_curve(address, self._unlocked(b"CURVE", frames)),
            lambda: self._refused_by_curve(address, self._unlocked(b"NULL", frames)),
            lambda: self._refused_by_curve(address, SIGNATURE + b"\x01\x05\x00\x00" + _short(*frames)),  # ZMTP 2.0
            lambda: self._refused_by_curve(address, b"\x01\x00" + _short(*frames)),  # ZMTP 1.0
            lambda: self._cut_off(address, greeting(b"CURVE")),
        ]
        self._each(kinds)

    def _knock(self, address: Address, frames: Sequence[bytes], enter: Callable[["zmq.Socket[Any]"], None]) -> None:
        """Connect by ZeroMQ, with another key or without one."""
        knocking = self._context.socket(zmq.DEALER)
        knocking.setsockopt(zmq.LINGER, 0)
        knocking.setsockopt(zmq.RECONNECT_IVL, -1)
        enter(knocking)
        monitor = knocking.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED)
        try:
            knocking.connect(f"tcp://{address[0]}:{address[1]}")
            with suppress(zmq.Again):
                knocking.send_multipart(frames, zmq.NOBLOCK)
            assert monitor.poll(1000 * PATIENCE_S), f"{address} neither let a stranger in nor sent it away"
            assert recv_monitor_message(monitor)["event"] & FAILED, f"{address} let a stranger in"
        finally:
            knocking.disable_monitor()
            monitor.close()
            knocking.close()

    def _replay(self, address: Address, recording: Recording, harm: bool = False) -> None:
        """Say what was recorded, frame by frame, each after the reply to the one before. harm: with a bit changed."""
        pieces = list(recording.pieces)
        if harm:
            at = self._random.choice([number for number, (who, _) in enumerate(pieces) if who == "client"])
            changed = bytearray(pieces[at][1])
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
            pieces[at] = ("client", bytes(changed))
        with self._connected(address) as one:
            one.settimeout(LOCKSTEP_S)
            heard = b""
            with suppress(OSError):
                for who, piece in pieces:
                    if who == "client":
                        one.sendall(piece)
                    elif not (reply := _received(one)):
                        break
                    else:
                        heard += reply
            self._assert_no_curve_session(address, heard + _rest(one))

    def _refused_by_curve(self, address: Address, content: bytes) -> None:
        self._assert_no_curve_session(address, self._said(address, content))

    def _assert_no_curve_session(self, address: Address, heard: bytes) -> None:
        # A server that lets somebody in says READY, whose name is not encrypted.
        assert b"\x05READY" not in heard, f"{address} let a stranger in: {heard[64:200]!r}"
        assert b"\x07MESSAGE" not in heard, f"{address} told a stranger something: {heard[64:200]!r}"

    def _unlocked(self, mechanism: bytes, frames: Sequence[bytes]) -> bytes:
        """As if the handshake were over, or needed none."""
        ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
        return greeting(mechanism) + b"\x04" + bytes([len(ready)]) + ready + _short(*frames)

    def _huge(self) -> bytes:
        """A frame's head that announces more bytes than there are."""
        size = self._random.choice([1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
        return self._random.choice([b"\x02", b"\x06", b"\x03"]) + size.to_bytes(8, "big")

    # -- HTTP -------------------------------------------------------------------------------------------------------

    def try_http(self, address: Address, requests: Sequence[tuple[str, str, bytes]], keys: Sequence[str]) -> None:
        """requests: method, path and body of what is only for those who have the key. keys: what is none, whatever it
        looks like."""

        def asked(authorization: str = "", host: str = "localhost", **changes: str) -> bytes:
            method, path, body = self._random.choice(requests)
            kind = "application/octet-stream" if "/buckets/" in path else "application/json"
            head = f"{changes.get('method', method)} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\n"
            head += f"Authorization: {authorization}\r\n" if authorization else ""
            head += f"Content-Length: {changes.get('length', len(body))}\r\nConnection: close\r\n\r\n"
            return head.encode() + body

        post = next(f"{method} {path}" for method, path, body in requests if body)
        head = f"{post} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
        long = b"x" * (5 * MIB)
        kinds: list[Callable[[], None]] = [
            lambda: self._hold("half a request", address, asked()[: self._random.randrange(20)]),
            lambda: self._hold("half the headers", address, head + b"X-Slow: "),
            lambda: self._refused_by_http(address, asked()),
            lambda: self._refused_by_http(address, asked()),
            lambda: self._refused_by_http(address, asked(f"Bearer {self._random.choice(keys)}")),
            lambda: self._refused_by_http(address, asked(f"Bearer {self._random.choice(keys)}")),
            lambda: self._refused_by_http(address, asked(f"Basic {self._random.choice(keys)}")),
            lambda: self._refused_by_http(address, asked("Bearer")),
            lambda: self._refused_by_http(address, asked(host="evil.example")),
            lambda: self._refused_by_http(
                address, asked(method=self._random.choice(["PATCH", "TRACE", "BREW", "PUT"]))
            ),
            lambda: self._refused_by_http(address, asked(length="9223372036854775807")),
            lambda: self._refused_by_http(address, asked(length="-1")),
            lambda: self._refused_by_http(address, head + f"Content-Length: {len(long)}\r\n\r\n".encode() + long),
            lambda: self._refused_by_http(address, head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx"),
            lambda: self._refused_by_http(address, head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 9999),
            lambda: self._refused_by_http(address, head + b"X: y\r\n" * 20_000 + b"\r\n"),
            lambda: self._refused_by_http(address, self._noise() + b"\r\n\r\n"),
            lambda: self._refused_by_http(address, TLS_HELLO + self._noise() + b"\r\n\r\n"),
            lambda: self._cut_off(address, head),
        ]
        self._each(kinds)

    def _refused_by_http(self, address: Address, content: bytes) -> None:
        with self._connected(address) as one:
            with suppress(OSError):  # it was hung up on in the middle
                one.sendall(content)
            heard = _head(one)
        if heard:
            status = int(heard.split()[1])
            assert 400 <= status < 500, f"{address} replied to a stranger, {content[:200]!r}: {heard[:400]!r}"

    # -- A line each way --------------------------------------------------------------------------------------------

    def try_lines(self, address: Address, lines: Sequence[bytes]) -> None:
        """lines: what is only for those who have the token, with another one."""
        kinds: list[Callable[[], None]] = [
            lambda: self._hold("half a line", address, self._random.choice(lines)[: self._random.randrange(30)]),
            lambda: self._refused_by_line(address, self._random.choice(lines) + b"\n"),
            lambda: self._refused_by_line(address, self._random.choice(lines) + b"\n" + self._random.choice(lines)),
            lambda: self._refused_by_line(address, self._noise() + b"\n"),
            lambda: self._refused_by_line(address, b"x" * (3 * MIB)),
            lambda: self._refused_by_line(address, b"[" * MIB + b"\n"),
            lambda: self._refused_by_line(address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
            lambda: self._cut_off(address, self._random.choice(lines)),
        ]
        self._each(kinds)

    def _refused_by_line(self, address: Address, content: bytes) -> None:
        heard = self._said(address, content)
        assert b'"result":{' not in heard, f"{address} replied to a stranger, {content[:200]!r}: {heard[:400]!r}"

    # -- Of all ports -----------------------------------------------------------------------------------------------

    def _each(self, kinds: Sequence[Callable[[], None]]) -> None:
        for number in range(NUM_ATTEMPTS):
            kinds[number % len(kinds)]()

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.choice([1, 9, 64, 1000, 1 << 16]))

    def _said(self, address: Address, content: bytes) -> bytes:
        """Send it, and return all that comes until the end."""
        with self._connected(address) as one:
            with suppress(OSError):  # it was hung up on in the middle
                one.sendall(content)
            return _rest(one)

    def _cut_off(self, address: Address, content: bytes) -> None:
        """End the connection in the middle, without a good-bye (RST)."""
        with self._connected(address) as one:
            one.sendall(content)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def _hold(self, name: str, address: Address, content: bytes) -> None:
        """Begin, and go on no more."""
        one = self._connected(address)
        one.sendall(content)
        self._held.append((f"{address}, {name}", one))

    def _connected(self, address: Address) -> socket.socket:
        one = socket.create_connection(address, PATIENCE_S)
        self.connections.add((one.getsockname(), address))
        return one


def _received(one: socket.socket) -> bytes:
    with suppress(TimeoutError):
        return one.recv(1 << 16)
    return b""


def _rest(one: socket.socket) -> bytes:
    """Say that nothing more comes, and return what does until the other side has ended, too."""
    one.settimeout(PATIENCE_S)
    heard = list[bytes]()
    try:
        with suppress(ConnectionError):
            one.shutdown(socket.SHUT_WR)
        while piece := one.recv(1 << 16):
            heard.append(piece)
    except TimeoutError:
        raise AssertionError(f"{one.getpeername()} keeps a connection whose other side has ended") from None
    except OSError:
        pass
    return b"".join(heard)


def _head(one: socket.socket) -> bytes:
    """Return what comes until the head of a response is whole, or the other side ends."""
    one.settimeout(PATIENCE_S)
    heard = b""
    try:
        while b"\r\n\r\n" not in heard and (piece := one.recv(1 << 16)):
            heard += piece
    except TimeoutError:
        raise AssertionError(f"{one.getpeername()} neither replies nor hangs up") from None
    except OSError:
        pass
    return heard


def _short(*frames: bytes) -> bytes:
    """Frames as ZMTP has them, in the clear."""
    flags = [1] * (len(frames) - 1) + [0]
    return b"".join(bytes([flag, len(frame)]) + frame for flag, frame in zip(flags, frames, strict=True))


def _with_curve(one: "zmq.Socket[Any]", server_key: str) -> None:
    public, secret = zmq.curve_keypair()
    one.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    one.setsockopt(zmq.CURVE_PUBLICKEY, public)
    one.setsockopt(zmq.CURVE_SECRETKEY, secret)


def _with_password(one: "zmq.Socket[Any]") -> None:
    one.setsockopt(zmq.PLAIN_USERNAME, b"root")
    one.setsockopt(zmq.PLAIN_PASSWORD, b"root")


def wait_for(happened: Callable[[], object], what: str, within_s: float = 2 * PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen within {within_s:g} s: {what}"
        time.sleep(0.05)
