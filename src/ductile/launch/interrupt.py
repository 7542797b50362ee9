"""Ctrl-C, in two steps: the first one asks for an orderly end, the second one takes it. A lost terminal asks,
too, and so does a batch system that gives notice."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ONE_PRESS_S = 0.3
"""Signals that come so close are one press: the whole group gets it, and a wrapper passes it on once more."""


class Interrupt:
    """Set by signals, read by the run."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.graceful = asyncio.Event()
        """Set by the first signal: finish the step, save, leave."""
        self.forced = asyncio.Event()
        """Set by the second press: stop at once."""
        self._now_s = now_s
        self._pressed_s: float | None = None

    def press(self) -> None:
        """Ctrl-C, or SIGTERM: a batch system's is a polite Ctrl-C."""
        if self._pressed_s is None:
            self._pressed_s = self._now_s()
            self.graceful.set()
        elif self._now_s() - self._pressed_s > ONE_PRESS_S:
            self.forced.set()

    def hint(self) -> None:
        """The terminal is gone, or a batch system says that time is running out. That forces nothing: kernel and
        shell may both say it, and SIGTERM may follow."""
        self.graceful.set()


@contextmanager
def interrupts(interrupt: Interrupt) -> Iterator[None]:
    """Have signals press `interrupt` while the block runs. In the main thread, inside the event loop."""
    loop = asyncio.get_running_loop()
    handlers = {
        signal.SIGINT: interrupt.press,
        signal.SIGTERM: interrupt.press,
        signal.SIGHUP: interrupt.hint,
        signal.SIGUSR1: interrupt.hint,  # as in `sbatch --signal=USR1@60`
        signal.SIGUSR2: interrupt.hint,
    }
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup, which wants the run to go on
        del handlers[signal.SIGHUP]
    for signum, handler in handlers.items():
        loop.add_signal_handler(signum, handler)
    try:
        yield
    finally:
        for signum in handlers:
            loop.remove_signal_handler(signum)
