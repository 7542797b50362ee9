"""What strangers can cause must not fill a disk."""

import logging
import time
from collections.abc import Callable, Iterable

LOG_WINDOW_S = 10.0
MOST_LOG_LINES = 5
"""Most lines that a logger writes in a window."""


class LogLimit(logging.Filter):
    """Filter of a logger. The first line after a time of too many says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._window_began_s = -LOG_WINDOW_S
        self._num_lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if now - self._window_began_s >= LOG_WINDOW_S:
            left_out = self._num_lines - MOST_LOG_LINES
            if left_out > 0:
                record.msg = f"{record.getMessage()} ({left_out} more lines were left out before this one)"
                record.args = ()
            self._window_began_s, self._num_lines = now, 0
        self._num_lines += 1
        return self._num_lines <= MOST_LOG_LINES


def limit_logs(names: Iterable[str]) -> None:
    """Limit what loggers of these names write."""
    for name in names:
        logging.getLogger(name).addFilter(LogLimit())


def log_to_stderr() -> None:
    """Have what the server does told at level info, a line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("ductile")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
