"""A layout's sizes as text, as people write them: `pp=2,dp_shard=2,tp=2`; and its slots: `0-2,5`.

One grammar for `ductile resize --layout`, `trainer.resize.layouts` and what is printed. An axis that is not named has
size 1; `dp_shard`, where it is not named, is what the slots leave.
"""

from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from itertools import groupby

from ductile.core.layout.geometry.parallel_layout import AXES, ParallelDims

EXAMPLE = "pp=2,dp_shard=2,tp=2"
OTHER_WORDS = {
    "dp": "dp_shard (shards of a copy) or dp_replicate (copies)",
    "data_parallel_size": "dp_shard (shards of a copy) or dp_replicate (copies)",
    "fsdp": "dp_shard",
    "ddp": "dp_replicate",
    "tensor_model_parallel_size": "tp",
    "tensor_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "ep": "other axes: expert parallelism is not built yet",
}
"""What other systems call an axis, or have besides ours, and our words."""


class LayoutTextError(ValueError):
    """A text that is no layout. The message goes on after the text itself, and says what to write."""


def compact(numbers: Sequence[int]) -> str:
    """Return the numbers, in their order, as ranges: (0, 1, 2, 5) as "0-2,5"."""
    parts: list[str] = []
    for _, run in groupby(enumerate(numbers), key=lambda placed: placed[1] - placed[0]):
        found = [number for _, number in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(parts)


def parse_sizes(text: str) -> dict[str, int]:
    """Sizes by axis, as far as the text names them. Raises LayoutTextError with all that is wrong."""
    sizes: dict[str, int] = {}
    wrong: list[str] = []
    for word in text.split(","):
        axis, equals, size = (part.strip() for part in word.partition("="))
        if not (equals and axis):
            wrong.append(f"{word.strip() or 'nothing'!r} is not axis=size")
        elif axis not in AXES:
            wrong.append(f"{axis!r} is no axis: {_suggestion(axis)}")
        elif axis in sizes:
            wrong.append(f"{axis} is given twice")
        elif not (size.isascii() and size.isdecimal() and 0 < int(size) < 10**6):
            wrong.append(f"{axis} is {size or 'nothing'!r} and must be a whole number of at least 1")
        else:
            sizes[axis] = int(size)
    if wrong:
        raise LayoutTextError(f"{'; '.join(wrong)}. Write {EXAMPLE}, with axes of {', '.join(AXES)}")
    return sizes


def spelled_sizes(dims: ParallelDims) -> str:
    """The text that `parse_sizes` reads: axes above 1, "dp_shard=1" where there is none."""
    return ",".join(f"{axis}={size}" for axis, size in _above_one(dims) if axis in AXES) or "dp_shard=1"


def in_words(dims: ParallelDims) -> str:
    """Sizes of the axes above 1, for people: "pp 2 · dp_shard 2 · tp 2"; "" for a single slot."""
    return " · ".join(f"{axis} {size}" for axis, size in _above_one(dims))


def _above_one(dims: ParallelDims) -> list[tuple[str, int]]:
    return [(axis, size) for axis, size in asdict(dims).items() if size > 1]


def _suggestion(axis: str) -> str:
    if axis in OTHER_WORDS:
        return f"write {OTHER_WORDS[axis]}"
    close = get_close_matches(axis, AXES, n=1)
    return f"did you mean {close[0]}?" if close else "there is none of that name"
