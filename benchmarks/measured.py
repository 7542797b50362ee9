"""The files in `results/`, and tables of them in which a cell has the figures of all machines."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import provenance

Numbers = float | Sequence[float]
Cell = str | Numbers | None
Row = tuple[str, *tuple[Cell, ...]]
"""What it is about, then its cells."""
NOTHING_YET = "Not measured yet: `make figures`."


def results(benchmark: str) -> list[Any]:
    """What each machine has measured."""
    files = sorted((provenance.RESULTS / benchmark).glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def machines(found: Iterable[Any]) -> str:
    """ "On 1 machine: AMD EPYC 7B13 (2 cores)."."""
    named = [f"{each['machine']['cpu']} ({each['machine']['cores']} cores)" for each in found]
    return f"On {num_machines(len(named))}: {'; '.join(named)}."


def num_machines(count: int) -> str:
    return f"{count} machine{'' if count == 1 else 's'}"


def table(benchmark: str, head: Sequence[str], rows_of: Callable[[Any], Iterable[Row]]) -> str:
    """The rows of all machines, laid over each other. Who ran out of time lacks rows, from the first one that needs a
    figure which is not in the file."""
    cells: dict[str, list[list[Cell]]] = {}
    found = results(benchmark)
    for of_machine in found:
        with suppress(KeyError):
            for what, *row in rows_of(of_machine):
                columns = cells.setdefault(what, [[] for _ in row])
                for column, cell in zip(columns, row, strict=True):
                    column.append(cell)
    if not cells:
        return NOTHING_YET
    rows = ([what, *map(together, columns)] for what, columns in cells.items())
    return f"{markdown(head, rows)}\n\n{machines(found)}"


def together(cells: Iterable[Cell]) -> str:
    """ "0.3 to 1.1", from the least to the most of all numbers; the words of those that are words."""
    words: dict[str, None] = {}
    numbers: list[float] = []
    for cell in cells:
        if isinstance(cell, str):
            words |= {cell: None} if cell else {}
        elif cell is not None:
            numbers += [cell] if isinstance(cell, int | float) else cell
    if numbers:
        words |= dict.fromkeys([" to ".join(dict.fromkeys(map(written, (min(numbers), max(numbers)))))])
    return "; ".join(words)


def written(number: float) -> str:
    """Three digits, or all before the point: "0.041", "3.16", "126", "2,941"."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
