"""Columns: what records keep of each token, one column a quantity, as arrays and not as objects.

    TokenIds    int32     what the model reads and writes
    Versions    int32     weight versions; -1 where the policy did not sample
    Floats      float32   log-probs, advantages, loss weights
    Mask        bool      sampled or given, trained on or not

int32 holds any vocabulary and any run; float32 is what engines compute log-probs in and what losses compute with, so
that a log-prob is never rounded on its way, and an advantage once, as the trainer would. A column behaves like the
tuple of its values, which are Python's own: `len`, indices, slices, `+`, equality and hash are the tuple's. Code that
handles whole columns takes `array`.

On the wire a column is bytes: the values, and a last byte that says how they are written

    1 to 4   each in so many bytes, little-endian: token ids in as few as the largest one needs
    0        as runs: the value of each, then the length of each as uint32. Chosen where that takes fewer bytes, as it
             does for versions, masks and advantages, which change a few times in a completion. Token ids are never runs

Nothing that a column says of its own length makes memory: runs are only laid out when their values are asked for, and
records compare all lengths with that of their token ids before. A million tokens cannot come out of ten bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast, overload

import numpy as np

T = TypeVar("T", int, float, bool)
Array = np.ndarray[Any, Any]
RUNS = b"\0"
COUNT = np.dtype("<u4")
SHOWN = 8
"""Values of a long column that its `repr` shows."""


class Column(Sequence[T]):
    """Immutable values of one kind, one a token."""

    __slots__ = ("_array", "_length", "_runs")
    dtype: ClassVar[np.dtype[Any]]
    least: ClassVar[int | None] = None
    """Smallest value that may come over the wire; None where any may."""
    forms: ClassVar[tuple[int, ...]] = (0, 4)
    """Forms in which the column may travel."""
    _array: "Array | None"
    """The values; None for runs whose values have not been asked for."""
    _runs: "tuple[Array, Array] | None"
    """Values and lengths of the runs that came over the wire."""

    def __init__(self, values: Iterable[T] | Array = ()) -> None:
        """Copies the values. Raises ValueError for what the column's kind cannot hold."""
        given: Any = values.array if isinstance(values, Column) else values
        try:
            with np.errstate(over="ignore"):  # too large for float32 is infinite, as it is in the trainer
                array = np.array(given if hasattr(given, "__len__") else list(cast("Iterable[Any]", given)), self.dtype)
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"not {type(self).__name__}: {error}") from error
        if array.ndim != 1:
            raise ValueError(f"not {type(self).__name__}: {array.ndim} dimensions")
        self._array, self._length, self._runs = _frozen(array), len(array), None

    @classmethod
    def of(cls, array: Array) -> Self:
        """The column of an array of the right dtype, which is not changed any more."""
        column = cls.__new__(cls)
        column._array, column._length, column._runs = _frozen(array), len(array), None
        return column

    @classmethod
    def full(cls, length: int, value: T) -> Self:
        """The column that has the value `length` times."""
        return cls.of(np.full(length, value, cls.dtype))

    @classmethod
    def concatenated(cls, parts: "Iterable[Column[T]]") -> Self:
        """The values of all parts, one after the other."""
        return cls.of(np.concatenate([np.empty(0, cls.dtype), *(part.array for part in parts)]))

    @property
    def array(self) -> Array:
        """The values, read-only."""
        if self._array is None:
            assert self._runs is not None
            self._array = _frozen(np.repeat(*self._runs))
        return self._array

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> "T | Self":
        if isinstance(index, slice):
            return self.of(self.array[index])
        return self.array[index].item()

    def __iter__(self) -> Iterator[T]:
        return iter(self.array.tolist())

    def __add__(self, other: Sequence[T]) -> Self:
        return self.concatenated((self, other if isinstance(other, type(self)) else type(self)(other)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Column):
            return np.array_equal(self.array, other.array)
        if not isinstance(other, tuple | list):
            return NotImplemented
        return tuple(self) == tuple(cast("Sequence[Any]", other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        some = ", ".join(map(repr, self[:SHOWN])) if len(self) > 2 * SHOWN else ", ".join(map(repr, self))
        return f"{type(self).__name__}({some}{f', … {len(self)} in all' if len(self) > 2 * SHOWN else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.array,)

    def count(self, value: Any) -> int:
        return int(np.count_nonzero(self.array == value))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        found = np.flatnonzero(self.array[start:stop] == value)
        if not len(found):
            raise ValueError(f"{value!r} is not in the column")
        return start + int(found[0])

    def to_bytes(self) -> bytes:
        """The column as it travels."""
        runs = self._as_runs() if 0 in self.forms else None
        if runs is not None:
            return runs
        array, form = self.array, self._form()
        if form == 3:
            array = np.ascontiguousarray(array).view(np.uint8).reshape(-1, 4)[:, :3]
        elif form != self.dtype.itemsize:
            array = array.astype(f"<u{form}")
        return array.tobytes() + bytes((form,))

    @classmethod
    def from_bytes(cls, data: object) -> Self:
        """The column that came over the wire. Raises ValueError for whatever is none."""
        name, size = cls.__name__, cls.dtype.itemsize
        if not isinstance(data, bytes) or not data:
            raise ValueError(f"{name} must be the bytes of a column, not {str(data)[:40]!r}")
        form = data[-1]
        if form not in cls.forms:
            raise ValueError(f"{name} cannot be written in form {form}")
        length, rest = divmod(len(data) - 1, form or size + COUNT.itemsize)
        if rest:
            raise ValueError(f"{name} in form {form} cannot have {len(data) - 1} bytes")
        if form == 3:
            wide = np.zeros((length, 4), np.uint8)
            wide[:, :3] = np.frombuffer(data, np.uint8, 3 * length).reshape(-1, 3)
            array = wide.view(cls.dtype)[:, 0]
        elif 0 < form < size:
            array = np.frombuffer(data, f"<u{form}", length).astype(cls.dtype)
        else:
            array = np.frombuffer(data, np.uint8 if cls.dtype == bool else cls.dtype, length)
        if cls.least is not None and array.min(initial=cls.least) < cls.least:
            raise ValueError(f"{name} has the value {array.min()}; the smallest is {cls.least}")
        if cls.dtype == bool:
            if array.max(initial=0) > 1:
                raise ValueError(f"{name} has the byte {array.max()}; it must be 0 or 1")
            array = array.view(np.bool_)
        column = cls.of(array)
        if form == 0:
            counts = np.frombuffer(data, COUNT, length, length * size)
            if not counts.all():
                raise ValueError(f"{name} has a run of no values")
            column._array, column._length, column._runs = None, int(counts.sum(dtype=np.int64)), (array, counts)
        return column

    def _form(self) -> int:
        """The form in which each value is written by itself: token ids take as many bytes as the largest one needs."""
        array = self.array
        if self.dtype.kind != "i" or array.min(initial=0) < 0:
            return self.forms[-1]
        needed = -(-int(array.max(initial=1)).bit_length() // 8)
        return next(form for form in self.forms if form >= needed)

    def _as_runs(self) -> bytes | None:
        """The column as runs; None where each value by itself takes no more bytes."""
        array, size = self.array, self.dtype.itemsize
        if not self._length:
            return None
        # Bits are compared, not values: -0.0 is not 0.0, and what is no number equals itself.
        bits = array.view(f"u{size}")
        ends = np.flatnonzero(bits[1:] != bits[:-1]) + 1
        if (len(ends) + 1) * (size + COUNT.itemsize) >= self._length * size:
            return None
        starts = np.concatenate([[0], ends])
        counts = np.diff(starts, append=self._length)
        return array[starts].tobytes() + counts.astype(COUNT).tobytes() + RUNS


def _frozen(array: Array) -> Array:
    """The same values, which cannot be changed through this view."""
    view = array.view()
    view.flags.writeable = False
    return view


class TokenIds(Column[int]):
    """Ids of tokens. They are never written as runs, so that a record's lengths are those of bytes that came."""

    __slots__ = ()
    dtype = np.dtype("<i4")
    least = 0
    forms = (1, 2, 3, 4)


class Versions(Column[int]):
    """The weight version that each token was sampled from; -1 where the policy did not sample it."""

    __slots__ = ()
    dtype = np.dtype("<i4")
    least = -1


class Floats(Column[float]):
    """A number a token: log-probs, advantages or loss weights."""

    __slots__ = ()
    dtype = np.dtype("<f4")


class Mask(Column[bool]):
    """Whether something is so, token by token."""

    __slots__ = ()
    dtype = np.dtype(np.bool_)
    forms = (0, 1)
