"""Ctrl-C, in two steps: the first one asks for an orderly end, the second one takes it. A lost terminal asks,
too, and so does a batch system that gives notice.

Presses are counted in real signal handlers, which Python runs between two bytecodes of the main thread; the event loop
acts on them when it has its turn. When something keeps it busy, it never has: then the second press ends the process.
"""

import asyncio
import signal
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ONE_PRESS_S = 0.3
"""Signals that come so close are one press: the whole group gets it, and a wrapper passes it on once more."""
REACTS_S = 10.0
"""Seconds that the event loop has to hear of the second press before the run is given up."""
PRESSES = (signal.SIGINT, signal.SIGTERM)
HINTS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that do not insist: the terminal is gone, or a batch system says that time is running out, as in
`sbatch --signal=USR1@60`. Kernel and shell may both say it, and SIGTERM may follow."""


class Interrupt:
    """Set by signals, read by the run."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.graceful = asyncio.Event()
        """Set by the first signal: finish the step, save, leave."""
        self.forced = asyncio.Event()
        """Set by the second press: stop at once."""
        self._now_s = now_s
        self._pressed_s: float | None = None
        self._insists = False

    def press(self) -> bool:
        """Ctrl-C, or SIGTERM: a batch system's is a polite Ctrl-C. Returns whether it insists. May be called at any
        moment, in a signal handler: the events are set by `tell`."""
        now_s = self._now_s()
        if self._pressed_s is None:
            self._pressed_s = now_s
        self._insists = self._insists or now_s - self._pressed_s > ONE_PRESS_S
        return self._insists

    def tell(self) -> None:
        """Set the events after a signal. In the event loop."""
        self.graceful.set()
        if self._insists:
            self.forced.set()


@contextmanager
def interrupts(
    interrupt: Interrupt, on_asked: Callable[[], None] = lambda: None, abandon: Callable[[float], None] = lambda s: None
) -> Iterator[None]:
    """Have signals press `interrupt` while the block runs. In the main thread, inside the event loop.

    on_asked: called in the event loop at the first signal. abandon(seconds): called in another thread when the event
    loop has not heard of a press that insists for so long; it ends the process.
    """
    loop, at_work = asyncio.get_running_loop(), True

    def tell() -> None:
        is_first = not interrupt.graceful.is_set()
        interrupt.tell()
        if is_first:
            on_asked()

    def press(signum: int, frame: FrameType | None) -> None:
        if interrupt.press():
            start_new_thread(watch, ())  # threading.Thread takes locks that the main thread may hold at this moment

    def watch() -> None:
        heard = threading.Event()
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(heard.set)
        if not heard.wait(REACTS_S) and at_work:
            abandon(REACTS_S)

    # Under nohup a lost terminal is ignored, and the run goes on.
    hints = [signum for signum in HINTS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]
    for signum in (*PRESSES, *hints):
        loop.add_signal_handler(signum, tell)
    for signum in PRESSES:
        signal.signal(signum, press)  # in place of asyncio's, which does nothing: the loop hears of signals without it
        signal.siginterrupt(signum, False)
    try:
        yield
    finally:
        at_work = False
        for signum in (*PRESSES, *hints):
            loop.remove_signal_handler(signum)
