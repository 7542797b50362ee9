"""Encryption of a run's own sockets between machines: CURVE of ZeroMQ, with one key pair a run.

Who has the secret key belongs to the run. A server proves it to those that connect; those that connect prove it to the
server, which lets nobody else in (`Doorkeeper`) and reads nothing that they send. Each connection has keys of its own,
so what was recorded cannot be replayed.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

KEY_CHARACTERS = 40
"""Length of a key in ZeroMQ's text form (Z85)."""
DOOR = "inproc://zeromq.zap.01"
"""Address at which ZeroMQ asks whether a connection is let in (RFC 27)."""


class NoKey(ValueError):
    """A text that is no key. It is not repeated: it may be a slip in a real one."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """The key pair of one run."""

    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> "RunKey":
        return cls(zmq.curve_keypair()[1].decode())

    @classmethod
    def of(cls, text: str) -> "RunKey":
        """Return the key that a text is. Raises NoKey."""
        text = text.strip()
        try:
            zmq.curve_public(text.encode("ascii"))
        except (ValueError, UnicodeEncodeError, zmq.ZMQError):
            raise NoKey(f"a key has {KEY_CHARACTERS} characters of Z85, and this text is none") from None
        return cls(text)

    @property
    def public(self) -> str:
        """The public key, by which a run is known."""
        return zmq.curve_public(self.secret.encode()).decode()

    @property
    def token(self) -> bytes:
        """The run's token, which follows from the key."""
        return hashlib.sha256(b"the token of a run of ductile " + self.secret.encode()).digest()

    def guard(self, server: "zmq.Socket[Any]") -> None:
        """Have a socket that is about to bind let in those that have the key. Its context needs a `Doorkeeper`."""
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())
        server.setsockopt_string(zmq.ZAP_DOMAIN, "ductile")

    def enter(self, client: "zmq.Socket[Any]") -> None:
        """Have a socket that is about to connect prove that it has the key, and take only a server that has it."""
        client.setsockopt(zmq.CURVE_SERVERKEY, self.public.encode())
        client.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode())
        client.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())


class Doorkeeper:
    """Says who is let in to the guarded sockets of a context: who has proven the run's key.

    There is one a context. Its owner makes a REP socket at `DOOR` before the guarded sockets bind, and has each message
    there replied to.
    """

    def __init__(self, key: RunKey) -> None:
        self._public = key.public.encode()
        self.num_refused = 0

    def reply(self, frames: Sequence[bytes]) -> list[bytes]:
        """Return the reply to a message at the door."""
        version, request, *_ = frames
        admitted = len(frames) == 7 and frames[5] == b"CURVE" and z85.encode(frames[6]) == self._public
        self.num_refused += not admitted
        code, text = (b"200", b"OK") if admitted else (b"400", b"not the run's key")
        return [version, request, code, text, b"", b""]
