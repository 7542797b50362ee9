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
def interrupts(interrupt: Interrupt) -> Iterator[None]:
    """Have signals press `interrupt` while the block runs. In the main thread, inside the event loop."""
    loop = asyncio.get_running_loop()
    for signum in SIGNALS:
        loop.add_signal_handler(signum, interrupt.press)
    try:
        yield
    finally:
        for signum in SIGNALS:
            loop.remove_signal_handler(signum)
