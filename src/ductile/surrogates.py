"""Half characters: lone surrogates, such as half an emoji. A policy may sample them, JSON may spell them, and UTF-8 has
no place for them.

Where text leaves this process, something stands for them, and for characters that a terminal's encoding lacks:

    a file, a log, a terminal      the escape, `\\ud83d`: people see what it was, and JSON reads it back as it was
    a tokenizer, a reward          U+FFFD, as tokenizers themselves write what is no character
"""

import io
import os
import sys

ESCAPED = "backslashreplace"
"""Value of `errors=` for streams to files, logs and terminals: a half character is written as its escape."""


def accept_any_text() -> None:
    """Make stdout and stderr, of this process and of all that it starts, write what their encoding has no place for as
    its escape: `\\u2192` where a terminal is not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)
    encoding, _, _ = os.environ.get("PYTHONIOENCODING", "").partition(":")
    os.environ["PYTHONIOENCODING"] = f"{encoding}:{ESCAPED}"


def escaped(text: str) -> str:
    """The text as any file and terminal can take it."""
    return text.encode(errors=ESCAPED).decode()


def mended(text: str) -> str:
    """The text as tokenizers and rewards can take it. Two halves that belong together become one character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
