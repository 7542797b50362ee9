"""What strangers can cause does not fill the log."""

import logging

from ductile.transport.http_server.log_limit import LOG_WINDOW_S, MOST_LOG_LINES, LogLimit


def test_a_flood_of_lines_is_a_few_lines_and_a_number() -> None:
    now = 0.0
    limit = LogLimit(lambda: now)
    shown: list[str] = []
    for count in range(1000):
        now = LOG_WINDOW_S * count / 500
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "no more %s", ("files",), None)
        if limit.filter(record):
            shown.append(record.getMessage())
    assert shown[:MOST_LOG_LINES] == ["no more files"] * MOST_LOG_LINES
    assert shown[MOST_LOG_LINES] == f"no more files ({500 - MOST_LOG_LINES} more lines were left out before this one)"
    assert len(shown) == 2 * MOST_LOG_LINES
