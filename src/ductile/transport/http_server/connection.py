"""Connections of the HTTP server, below HTTP: how many there may be, and how long each may keep it waiting.

uvicorn reads HTTP but has no deadline for a request that comes slowly, none for a response that is taken slowly, and
when there are too many connections it turns away those that have something to say.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ductile.transport.http_server.middleware import MAX_CONTROL_BYTES, WEIGHTS

LINGER_S = 2.0
"""A response that came before the end of the body ("too slow") has this long to be read before the connection ends."""

BYTES_A_PIECE = 256
"""A body must come in pieces of at least this size on average: each costs the parser as much as a small request."""

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    b'{"error": {"message": "the server has as many requests under way as it takes (server.max_connections); try again '
    b'later", "type": "server_error", "param": null, "code": null}}'
)


@dataclass(slots=True)
class Crowd:
    """The connections of one server. Those without a whole request wait; the one that has waited longest goes first."""

    max_connections: int
    timeout_s: float
    max_body_bytes: int
    bucket_bytes: Callable[[], int] = lambda: 0
    """The most bytes of a body that is a bucket of weights, now."""
    connections: set["Connection"] = field(default_factory=set["Connection"])
    waiting: dict["Connection", None] = field(default_factory=dict["Connection", None])

    def admit(self, new: "Connection") -> bool:
        """Make room for one more. False when every connection is being served."""
        if len(self.connections) >= self.max_connections:
            if not self.waiting:
                return False
            longest = next(iter(self.waiting))
            longest.transport.abort()
            self.leave(longest)
        self.connections.add(new)
        self.waiting[new] = None
        return True

    def leave(self, one: "Connection") -> None:
        self.connections.discard(one)
        self.waiting.pop(one, None)


class BoundedHTTP(h11.Connection):
    """Refuses a body in crumbs, and one that goes on long after its response."""

    def __init__(self, max_incomplete_event_size: int, crowd: Crowd) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._crowd, self._most_bytes = crowd, crowd.max_body_bytes
        self._num_bytes = self._num_pieces = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_bytes = self._num_pieces = 0
            self._most_bytes = self._crowd.max_body_bytes
            if event.target.startswith(WEIGHTS.encode()):
                self._most_bytes = max(self._crowd.bucket_bytes(), MAX_CONTROL_BYTES)
        elif isinstance(event, h11.Data):
            self._num_bytes += len(event.data)
            self._num_pieces += 1
            if self._num_pieces > 1024 + self._most_bytes // BYTES_A_PIECE:
                raise h11.RemoteProtocolError("the body comes in too many pieces")
            if self._num_bytes > 4 * self._most_bytes:
                raise h11.RemoteProtocolError("the body does not end")
        return event


class Connection(H11Protocol):
    """uvicorn's connection, with deadlines. Subclassed for each server, as uvicorn makes its instances (`crowded`)."""

    crowd: Crowd

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        most_bytes = self.conn._max_incomplete_event_size  # pyright: ignore[reportPrivateUsage]
        self.conn = BoundedHTTP(most_bytes, self.crowd)
        self._receiving: asyncio.TimerHandle | None = None
        self._receives: Any = None
        """State that the timer is for: headers (`h11.IDLE`), a body (`h11.SEND_BODY`), or nothing."""
        self._sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if self.crowd.admit(self):
            self._look()
        else:
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # a request that went wrong after its response: nothing more can be said
            self.transport.abort()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Reply to what is no request: an app that had a beginning of it has nobody to tell any more."""
        super().send_400_response(msg)
        cycle: Any = self.cycle  # None before the first request, whatever uvicorn's types say
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending = self.loop.call_later(self.crowd.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._sending:
            self._sending.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.leave(self)
        for timer in (self._receiving, self._sending):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """See whose turn it is, the client's or ours; the client's has a deadline."""
        if self not in self.crowd.connections:
            return
        receives = self.conn.their_state if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) else None
        cycle: Any = self.cycle  # None before the first request, whatever uvicorn's types say
        responded = cycle is None or cycle.response_complete
        if receives or responded:
            self.crowd.waiting.setdefault(self)
        else:
            self.crowd.waiting.pop(self, None)
        if receives is not self._receives:
            if self._receiving:
                self._receiving.cancel()
            linger_s = LINGER_S if receives is h11.SEND_BODY else 0.0
            wait_s = self.crowd.timeout_s + linger_s
            self._receiving = self.loop.call_later(wait_s, self.transport.abort) if receives else None
            self._receives = receives


def crowded(crowd: Crowd) -> type[Connection]:
    """Return the class of one server's connections."""
    return type("Connection", (Connection,), {"crowd": crowd})
