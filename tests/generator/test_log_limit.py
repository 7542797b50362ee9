"""What strangers can cause does not fill the log."""

import logging

from ductile.generator.server.log_limit import MOST_LINES, WINDOW_S, LogLimit


def test_a_flood_of_lines_is_a_few_lines_and_a_number() -> None:
    now = 0.0
    limit = LogLimit(lambda: now)
    shown: list[str] = []
    for count in range(1000):
        now = WINDOW_S * count / 500
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "no more %s", ("files",), None)
        if limit.filter(record):
            shown.append(record.getMessage())
    assert shown[:MOST_LINES] == ["no more files"] * MOST_LINES
    assert shown[MOST_LINES] == f"no more files ({500 - MOST_LINES} more lines were left out before this one)"
    assert len(shown) == 2 * MOST_LINES
