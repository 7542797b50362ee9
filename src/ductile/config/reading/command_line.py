"""Command lines: a folder as those read it that ask about a run (`ductile status runs/x`, or `--run runs/x`), a command
as it is printed for a person to paste, and how commands say no."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ductile.surrogates import ESCAPED
from ductile.user_files import BadPath, expanded

_ENDS_WITH_COMMAND = re.compile(r": ductile [a-z]+ [^\n]*\Z")


def parse_with_folder(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The arguments, with the folder as `run`, whichever way it was written."""
    parser.add_argument("run", nargs="?", type=path_argument, metavar="FOLDER", help="the run's output_dir")
    parser.add_argument(
        "--run", dest="named", type=path_argument, metavar="FOLDER", help="the folder, written as a flag"
    )
    asked = parser.parse_args(list(words))
    if (asked.run is None) == (asked.named is None):
        parser.error(f"write the run's folder, once: {parser.prog} runs/x")
    asked.run = asked.run or asked.named
    return asked


def path_argument(text: str) -> Path:
    """The path that a word on the command line means, as argparse's `type=`."""
    try:
        return Path(expanded(text))
    except BadPath as error:
        raise argparse.ArgumentTypeError(f"{text} {error}") from None


def pasteable(*words: object) -> str:
    """A `ductile` command that a person may paste into a shell: each word is quoted where it must be.

    Example: `pasteable("status", "my runs/x")` is `ductile status 'my runs/x'`.
    """
    return " ".join(["ductile", *(_quoted(str(word)) for word in words)])


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    try:
        spelled = word.encode("utf-8", "surrogateescape")  # a line end, say, or a name that is no text
    except UnicodeEncodeError:
        spelled = word.encode("utf-8", ESCAPED)
    return (
        "$'"
        + "".join(chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in spelled)
        + "'"
    )


def require_folder(name: str, file: Path) -> None:
    """Raises FileNotFoundError where a file that is to be written has no folder: a slip makes none."""
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{name} {file}: there is no folder {file.parent}; make it, or write another")


def print_error(command: str, error: Exception) -> None:
    """The error on stderr, as it is written: it may begin with a path."""
    print(f"ductile {command}: {as_sentence(str(error))}", file=sys.stderr)


def as_sentence(text: str) -> str:
    """Closed by a full stop, unless it is closed already, or ends with a command, which would be pasted with it."""
    return text if text.endswith((".", "?", "!")) or _ENDS_WITH_COMMAND.search(text) else f"{text}."
