"""A slot's socket: the other end of `ductile.transport.router`. One thread makes it, uses it and closes it."""

import hmac
import secrets

import zmq

from ductile.messages.workers import Envelope
from ductile.transport.codec import BadFrame, decode
from ductile.transport.curve import RunKey
from ductile.transport.frames import connect


class Dealer:
    def __init__(self, address: str, token: bytes, slot: int, key: RunKey | None = None) -> None:
        self._token = token
        self._name = str(slot).encode()
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        """The DEALER socket, for a `zmq.Poller`."""
        self.socket.setsockopt(zmq.IDENTITY, b"s" + secrets.token_bytes(16))  # it stays when the connection breaks
        connect(self.socket, address, key)

    def send(self, frame: bytes) -> None:
        """Send an encoded envelope. Does not wait: ZeroMQ's own thread carries it."""
        self.socket.send_multipart([self._token, self._name, frame])

    def receive(self) -> Envelope | None:
        """The next envelope, or None when nothing is there. Raises `BadFrame`."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) != 2 or not hmac.compare_digest(frames[0], self._token):
            raise BadFrame("a message came without the run's token")
        return decode(frames[1])

    def close(self, linger_s: float = 1.0) -> None:
        """Close the socket; messages that were sent have `linger_s` seconds to leave."""
        self._context.destroy(linger=int(linger_s * 1000))
