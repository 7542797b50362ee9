"""Ctrl-C, in two steps: the first one asks for an orderly end, the second one takes it."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""A batch system's SIGTERM is a polite Ctrl-C."""


class Interrupt:
    """Set by signals, read by the run."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """After the first signal: finish the step, save, leave."""
        self.insisted = asyncio.Event()
        """After the second: stop at once."""

    def press(self) -> None:
        (self.insisted if self.asked.is_set() else self.asked).set()


@contextmanager
def interrupts() -> Iterator[Interrupt]:
    """Catch the signals while the block runs. In the main thread, inside the event loop."""
    loop = asyncio.get_running_loop()
    interrupt = Interrupt()
    for signum in SIGNALS:
        loop.add_signal_handler(signum, interrupt.press)
    try:
        yield interrupt
    finally:
        for signum in SIGNALS:
            loop.remove_signal_handler(signum)
