"""Places where a test makes a server do what a broken one does. Off, unless DUCTILE_FAULTS names a folder.

A file `<folder>/<point>` with one word in it is a fault, for as long as it is there:

    hold            go no further while the file says so
    exit            end the process at once
    drop            no reply comes
    late 3.5        go on so many seconds later
"""

import os
import time
from pathlib import Path
from typing import Literal

Point = Literal[
    "prepare", "bucket-first", "bucket-mid", "bucket-last", "verify", "commit", "commit-reply", "resume", "generate",
    "state",
]  # fmt: skip

EXIT_CODE = 86
_LOOK_S = 0.01


class Dropped(Exception):
    """No reply may come."""


class Faults:
    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def of_environment(cls) -> "Faults":
        folder = os.environ.get("DUCTILE_FAULTS")
        return cls(Path(folder) if folder else None)

    def meet(self, point: Point | None) -> None:
        """Do what the point's file says, in a thread that may wait. Raises `Dropped`."""
        if self.folder is None or point is None:
            return
        match self._said(point):
            case ["exit", *_]:
                os._exit(EXIT_CODE)
            case ["drop", *_]:
                raise Dropped(point)
            case ["late", seconds]:
                time.sleep(float(seconds))
            case _:
                while self._said(point) == ["hold"]:
                    time.sleep(_LOOK_S)

    def _said(self, point: Point) -> list[str]:
        assert self.folder is not None
        try:
            return (self.folder / point).read_text("utf-8").split()
        except FileNotFoundError:
            return []


def bucket_point(num_loaded: int, num_expected: int) -> Point | None:
    """The point at which a bucket is that comes after `num_loaded` others."""
    places: dict[int, Point] = {num_expected // 2: "bucket-mid", num_expected - 1: "bucket-last", 0: "bucket-first"}
    return places.get(num_loaded)
