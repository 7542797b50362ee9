"""Ctrl-C, in two steps: the first one asks for an orderly end, the second one takes it. A lost terminal asks, too."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupt:
    """Set by signals, read by the run."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Set by the first signal: finish the step, save, leave."""
        self.insisted = asyncio.Event()
        """Set by the second press: stop at once."""
        self._pressed = False

    def press(self) -> None:
        """Ctrl-C, or SIGTERM: a batch system's is a polite Ctrl-C."""
        (self.insisted if self._pressed else self.asked).set()
        self._pressed = True

    def hang_up(self) -> None:
        """The terminal is gone. Nobody insists by that: kernel and shell may both say it, and SIGTERM may follow."""
        self.asked.set()


@contextmanager
def interrupts(interrupt: Interrupt) -> Iterator[None]:
    """Have signals press `interrupt` while the block runs. In the main thread, inside the event loop."""
    loop = asyncio.get_running_loop()
    handlers = {signal.SIGINT: interrupt.press, signal.SIGTERM: interrupt.press, signal.SIGHUP: interrupt.hang_up}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup, which wants the run to go on
        del handlers[signal.SIGHUP]
    for signum, handler in handlers.items():
        loop.add_signal_handler(signum, handler)
    try:
        yield
    finally:
        for signum in handlers:
            loop.remove_signal_handler(signum)
