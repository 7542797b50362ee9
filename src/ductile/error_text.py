"""An exception in a line: what it is, what it says, and where in the user's code it comes from."""

import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

from ductile.host import shortage
from ductile.surrogates import escaped

_LIBRARIES = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")})
_OURS = Path(__file__).resolve().parent


def error_text(error: BaseException) -> str:
    """ "KeyError: 'solution'"; only its name where it says nothing; with limit and use of what was too little. Half
    characters, as a path may have them, are escaped."""
    return escaped(f"{type(error).__name__}{f': {error}' if str(error) else ''}{shortage(error)}")


def error_with_place(error: BaseException, ours: bool = False) -> str:
    """ "KeyError: 'solution' (myreward.py:3)". ours: the mistake may be ductile's own, and then the line is, too."""
    if isinstance(error, SyntaxError):  # its text has the place, spelled otherwise
        return f"{type(error).__name__}: {error.msg}{place_of(error)}"
    return f"{error_text(error)}{place_of(error, ours)}"


def place_of(error: BaseException, ours: bool = False) -> str:
    """ " (myreward.py:3)": the innermost line that is neither ductile's nor a library's.

    "" where there is none, as when a user's function does not take the arguments; with `ours`, the innermost of all.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}:{error.lineno})"
    return place_in(traceback.extract_tb(error.__traceback__), ours)


def place_in(stack: Iterable[traceback.FrameSummary], ours: bool = False) -> str:
    """Place of a stack, as `place_of` says it of an exception. The innermost frame comes last."""
    frames = [frame for frame in stack if frame.filename[:1] == "/"]
    theirs = [frame for frame in frames if not _is_library(frame.filename)]
    found = theirs or (frames if ours else [])
    return f" ({Path(found[-1].filename).name}:{found[-1].lineno})" if found else ""


def capitalised(sentence: str) -> str:
    """The sentence with a capital, unless it begins with a path, an address or a number."""
    word = sentence.partition(" ")[0]
    return sentence if any(mark in word for mark in "/._:") else sentence[:1].upper() + sentence[1:]


def _is_library(file: str) -> bool:
    path = Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in (_OURS, *_LIBRARIES))
