"""Which slot takes which place of a target mesh? Places are free: choose the slots so that most bytes stay put.

Growing flat state from two ranges to three, the newcomer in the middle moves a third of the bytes; at the end it would
move half of them.
"""

from collections.abc import Sequence

import numpy as np

from ductile.core.layout.geometry.holdings import Ints
from ductile.core.layout.geometry.layout import Layout
from ductile.core.transfer.cells import Refiner


def arrange(source: Layout, target: Layout, slots: Sequence[int] | None = None) -> dict[int, int]:
    """The slot for each place of `target`, so that the same mesh with these slots has most bytes where they are.

    Places are named by the slots that `target` has now. The best ones are taken from `slots`, by default from the same;
    among equally good choices a slot keeps the place that has its name. Raises `ValueError` with too few slots.
    """
    candidates = tuple(sorted(target.slots if slots is None else slots))
    if len(candidates) < len(target.slots):
        raise ValueError(f"{len(target.slots)} places need as many slots; {len(candidates)} were given")
    kept = kept_bytes(source, target, candidates)
    stays = np.equal.outer(np.array(target.slots), np.array(candidates))
    chosen = best_assignment(kept * (len(target.slots) + 1) + stays)
    return {place: candidates[index] for place, index in zip(target.slots, chosen.tolist(), strict=True)}


def kept_bytes(source: Layout, target: Layout, slots: Sequence[int]) -> Ints:
    """[places of the target, slots]: what each slot would already have in each place."""
    places = {slot: index for index, slot in enumerate(target.slots)}
    columns = {slot: index for index, slot in enumerate(slots)}
    kept = np.zeros((len(places), len(columns)), dtype=np.int64)
    for holders, needers, num_bytes in Refiner().common(source, target):
        having = [columns[slot] for slot in holders if slot in columns]
        kept[np.ix_([places[slot] for slot in needers], having)] += num_bytes
    return kept


def best_assignment(value: Ints) -> Ints:
    """A different column for every row, chosen for the highest sum of values; exact, by shortest augmenting paths.

    `value` is [rows, columns] with no more rows than columns. `scipy.optimize.linear_sum_assignment` does it in
    floating point; byte counts stay integers here, and scipy would be needed for nothing else.
    """
    num_rows, num_columns = value.shape
    cost = value.max(initial=0) - value
    row_price, column_price = np.zeros(num_rows, dtype=np.int64), np.zeros(num_columns, dtype=np.int64)
    row_of = np.full(num_columns, -1, dtype=np.int64)
    column_of = np.full(num_rows, -1, dtype=np.int64)
    far = np.iinfo(np.int64).max
    for start in range(num_rows):
        distance = np.full(num_columns, far)
        came_from = np.full(num_columns, -1, dtype=np.int64)
        done = np.zeros(num_columns, dtype=bool)
        row, travelled = start, 0
        while True:
            reach = travelled + cost[row] - row_price[row] - column_price
            nearer = ~done & (reach < distance)
            distance[nearer] = reach[nearer]
            came_from[nearer] = row
            open_distance = np.where(done, far, distance)
            travelled = int(open_distance.min())
            nearest = np.flatnonzero(open_distance == travelled)
            free = nearest[row_of[nearest] < 0]
            column = int(free[0]) if len(free) else int(nearest[0])
            done[column] = True
            if row_of[column] < 0:
                break
            row = int(row_of[column])
        passed = done.copy()
        passed[column] = False
        row_price[start] += travelled
        row_price[row_of[passed]] += travelled - distance[passed]
        column_price[passed] -= travelled - distance[passed]
        while True:
            row = int(came_from[column])
            row_of[column] = row
            column_of[row], column = column, int(column_of[row])
            if row == start:
                break
    return column_of
