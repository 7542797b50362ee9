"""A slot's side thread: its socket, its heartbeats, and its eye on its owner. It never does work of its own."""

import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from ductile.messages.workers import Envelope, Event, Heartbeat, Hello, Reply
from ductile.transport.codec import BadFrame, encode
from ductile.transport.dealer import Dealer

HEARTBEAT_INTERVAL_S = 1.0


class Link:
    """Connects the slot with the orchestrator, once it is started. The main thread calls the methods; any thread may
    call `send`.

    When the slot's owner on this host ends, the orchestrator or its agent, so does this process, at once, whatever the
    main thread does.
    """

    def __init__(self, make_dealer: Callable[[], Dealer], device: str, owner: int) -> None:
        """make_dealer: called by the side thread, which alone uses the socket."""
        self._make_dealer = make_dealer
        self.inbox: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
        """Commands for the main thread, in the order in which they were sent, without those that begin beside it."""
        self.epoch = 0
        """Membership epoch that every message sent carries: that of the latest command."""
        self._outbox: deque[bytes] = deque()
        self._owner_fd = os.pidfd_open(owner)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._busy: tuple[str, float] = ("", 0.0)
        self._leaving = False
        self.send(0, Hello(os.getpid(), device))
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self, begin_beside: Callable[[Envelope], bool]) -> None:
        """begin_beside: called in the side thread with each command, in their order. True: it is executed beside the
        main thread's work. False: the main thread is to execute it. It must not take long."""
        self._begin_beside = begin_beside
        self._thread.start()

    def enter(self, epoch: int) -> None:
        """The latest command is of this epoch."""
        self.epoch = epoch

    def send(self, sequence: int, body: Reply | Event) -> None:
        """Send a reply (its command's number) or an event (0). Raises `BadFrame` when it is too large."""
        self._outbox.append(encode(Envelope(self.epoch, sequence, body)))
        os.eventfd_write(self._wake_fd, 1)

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Heartbeats say `what` meanwhile."""
        self._busy = (what, time.monotonic())
        try:
            yield
        finally:
            self._busy = ("", 0.0)

    def close(self, deadline_s: float = 2.0) -> None:
        """Send what waits, then end the thread."""
        self._leaving = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            dealer = self._make_dealer()
            self._serve(dealer)
            dealer.close()
        except BaseException:
            # Without this thread the slot is deaf and mute: better gone, which the orchestrator notices at once.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _serve(self, dealer: Dealer) -> None:
        poller = zmq.Poller()
        poller.register(dealer.socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(self._owner_fd, zmq.POLLIN)
        beat_at_s = time.monotonic()
        while True:
            leaving = self._leaving
            while self._outbox:
                dealer.send(self._outbox.popleft())
            if leaving:
                return
            now_s = time.monotonic()
            if now_s >= beat_at_s:
                dealer.send(encode(Envelope(self.epoch, 0, self._heartbeat(now_s))))
                beat_at_s = now_s + HEARTBEAT_INTERVAL_S
            ready = dict(poller.poll(max(0, int((beat_at_s - now_s) * 1000))))
            if self._owner_fd in ready:
                os._exit(0)
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if dealer.socket in ready:
                self._receive(dealer)

    def _receive(self, dealer: Dealer) -> None:
        while True:
            try:
                envelope = dealer.receive()
            except BadFrame as error:
                print(f"dropped a message: {error}", file=sys.stderr)
                continue
            if envelope is None:
                return
            if not self._begin_beside(envelope):
                self.inbox.put(envelope)

    def _heartbeat(self, now_s: float) -> Heartbeat:
        what, since_s = self._busy
        return Heartbeat(what, now_s - since_s if what else 0.0)
