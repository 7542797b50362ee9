"""Where in somebody's own code an exception comes from."""

import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).resolve().parents[1])


def blamed(error: BaseException) -> str:
    """ " (myreward.py:3)": the innermost line that is neither ductile's nor a library's; "" where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename[:1] == "/" and not _is_library(frame.filename)]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def raised(error: BaseException) -> str:
    """ "KeyError: 'solution' (myreward.py:3)"."""
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}{f': {what}' if what else ''}{blamed(error)}"


def _is_library(file: str) -> bool:
    path = str(Path(file).resolve())
    return path.startswith((_OURS, *_LIBRARIES))
