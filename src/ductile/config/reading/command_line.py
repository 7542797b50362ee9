"""What the commands share that ask about a run's folder: `ductile status runs/x`, or `--run runs/x`; and how they say
no."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def parse_with_folder(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The arguments, with the folder as `run`, whichever way it was written."""
    parser.add_argument("run", nargs="?", metavar="FOLDER", help="the run's output_dir")
    parser.add_argument("--run", dest="named", metavar="FOLDER", help="the folder, written as a flag")
    asked = parser.parse_args(list(words))
    if (asked.run is None) == (asked.named is None):
        parser.error(f"write the run's folder, once: {parser.prog} runs/x")
    asked.run = asked.run or asked.named
    return asked


def require_folder(name: str, file: Path) -> None:
    """Raises FileNotFoundError where a file that is to be written has no folder: a slip makes none."""
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{name} {file}: there is no folder {file.parent}; make it, or write another")


def print_error(command: str, error: Exception) -> None:
    """The error on stderr, as it is written: it may begin with a path."""
    print(f"ductile {command}: {as_sentence(str(error))}", file=sys.stderr)


def as_sentence(text: str) -> str:
    """Closed by a full stop, unless it is closed already."""
    return text if text.endswith((".", "?", "!")) else f"{text}."
