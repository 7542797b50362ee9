"""A config before it is judged: plain values, and for each of them the file and line it came from."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

Path = tuple[str | int, ...]
"""Path of a value: `("trainer", "optim", "lr")`; a number is an index into a list."""


@dataclass(frozen=True, slots=True)
class Origin:
    source: str
    """A file as the user named it, or "command line"."""
    line: int | None = None
    layer: int = 0
    """Place of the source in the order of merging; a source of a higher layer wins."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


COMMAND_LINE = Origin("command line", layer=1_000_000)
DEFAULT = Origin("default", layer=-1)
NOWHERE = Origin("", layer=-2)


def as_table(value: object) -> dict[str, Any] | None:
    """The value as a table, or None when it is something else."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def as_list(value: object) -> list[Any] | None:
    return cast(list[Any], value) if isinstance(value, list) else None


@dataclass(slots=True)
class Draft:
    """Values and origins. An origin speaks for everything below its path that has none of its own."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[Path, Origin] = field(default_factory=dict[Path, Origin])

    def origin(self, path: Path) -> Origin:
        """Origin of the value at `path`: the nearest one on the way up, else the first one below it."""
        below = [known for known in self.origins if known[: len(path)] == path]
        if below and path not in self.origins:
            return self.origins[
                min(below, key=lambda known: (self.origins[known].layer, self.origins[known].line or 0))
            ]
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return DEFAULT

    def latest(self, path: Path) -> Origin:
        """Origin of what came last into the value at `path`, which may be a table of several sources."""
        below = [origin for known, origin in self.origins.items() if known[: len(path)] == path]
        return max(below, key=lambda origin: origin.layer, default=self.origin(path))

    def has(self, path: Path) -> bool:
        node: object = self.values
        for part in path:
            table = as_table(node)
            if table is None or part not in table:
                return False
            node = table[part]
        return True

    def get(self, path: Path) -> Any:
        """The value at `path`, or None."""
        node: Any = self.values
        for part in path:
            if (table := as_table(node)) is not None:
                node = table.get(cast(str, part))
            elif (items := as_list(node)) is not None and isinstance(part, int) and part < len(items):
                node = items[part]
            else:
                return None
        return node

    def put(self, path: Path, value: Any, origin: Origin) -> None:
        """Set `path` (not a list index) to `value`: a table merges into a table, everything else replaces."""
        node = self.values
        *above, last = cast(tuple[str, ...], path)
        for part in above:
            below = as_table(node.get(part))
            if below is None:
                below = {}
                node[part] = below
            node = below
        new, old = as_table(value), as_table(node.get(last))
        if new is not None and old is not None:
            for key, item in new.items():
                self.put((*path, key), item, origin)
            return
        self._forget(path)
        node[last] = deepcopy(value)
        self.origins[path] = origin

    def drop(self, path: Path) -> None:
        """Take the value at `path` out, if there is one."""
        *above, last = path
        parent = as_table(self.get(tuple(above)))
        if parent is not None:
            parent.pop(cast(str, last), None)
        self._forget(path)

    def lay_over(self, other: "Draft") -> None:
        """Merge `other` over this: tables merge, lists and scalars are replaced."""
        for path, value in leaves(other.values):
            self.put(path, value, other.origin(path))
            for below, origin in other.origins.items():
                if len(below) > len(path) and below[: len(path)] == path:
                    self.origins[below] = origin
        for path, origin in other.origins.items():
            if as_table(self.get(path)) is not None and path not in self.origins:
                self.origins[path] = origin

    def copy(self) -> "Draft":
        return Draft(deepcopy(self.values), dict(self.origins))

    def _forget(self, path: Path) -> None:
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]


def leaves(values: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not a table with something in it."""
    for key, value in values.items():
        table = as_table(value)
        if table:
            yield from leaves(table, (*path, key))
        else:
            yield (*path, key), value
