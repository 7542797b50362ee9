"""The layout that somebody asks a live trainer for, and on which slots.

    LayoutRequest("pp=2,dp_shard=2,tp=2")             a whole layout, on 8 slots: those that train, and free ones
    LayoutRequest("tp=2")                             as many slots as train now, less what tp 2 leaves over
    LayoutRequest("tp=2", train=range(6))             the same on these slots: dp_shard is 3
    LayoutRequest(train=range(6))                     what the rules have for 6 slots, if anything
    LayoutRequest(train=range(6), sizes={"tp": 3})    the layout as it is now, with another tp
    LayoutRequest(sizes={"tp": 3})                    the same on the slots that train, none of which it drops

What cannot be is refused before anything is tried, with all that is wrong.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules, NoLayout, layout_for, nearest_allowed
from ductile.core.layout.choice.layout_text import LayoutTextError, parse_sizes
from ductile.core.layout.choice.planner import plan_layout
from ductile.core.layout.geometry.node_order import arranged
from ductile.core.layout.geometry.parallel_layout import AXES, ParallelLayout


class RequestError(ValueError):
    """What is asked for cannot be. The text has all that is wrong, and what to write instead."""


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    text: str = ""
    """Sizes of all axes as text (`ductile.core.layout.choice.layout_text`); "": nothing is said of them."""
    train: Sequence[int] | None = None
    """Slots; None: as many as the layout has, of those that train and those that have nothing to do."""
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sizes of some axes; the others stay as they are, and `dp_shard` is what the slots leave."""

    def asked(self, now: ParallelLayout, rules: LayoutRules) -> AskedLayout | None:
        """The sizes that are asked for, where the trainer has the layout `now`; None where nothing is said of them.
        Raises RequestError."""
        if self.text and self.sizes:
            axis, size = min(self.sizes.items())
            raise RequestError(f"a whole layout and {axis} are asked for: write {axis}={size} in the layout")
        if self.text:
            try:
                return rules.asked.sized(parse_sizes(self.text))
            except LayoutTextError as error:
                raise RequestError(f"the layout {self.text!r}: {error}") from error
        if strange := sorted(set(self.sizes).difference(AXES)):
            raise RequestError(f"{strange[0]} is no axis: write sizes of {', '.join(AXES)}")
        if none := [axis for axis, size in self.sizes.items() if size < 1]:
            raise RequestError(f"{none[0]} = {self.sizes[none[0]]} is no size: write 1 or more")
        return replace(rules.asked.like(now.dims), **self.sizes) if self.sizes else None


def requested_layout(
    request: LayoutRequest, now: ParallelLayout, rules: LayoutRules, machine: Sequence[int], busy: Collection[int]
) -> ParallelLayout:
    """The layout that is asked for. Raises RequestError.

    Args:
        now: the layout that the trainer has.
        machine: all slots.
        busy: slots that have something to do, or are lost. Those that do not train are taken by name only.
    """
    asked, slots = request.asked(now, rules), request.train
    try:
        if asked is None:
            if slots is None:
                raise RequestError("neither slots nor a layout are asked for: write one of them, or both")
            return _layout_of_the_rules(slots, rules, len(machine))
        if slots is None:
            slots = _chosen(asked, request.sizes, now, machine, busy)
        per_node = rules.topology.slots_per_node
        planned = plan_layout(slots, asked, rules.spec, rules.num_samples, slots_per_node=per_node)
    except ValueError as error:  # of a slot that is named twice
        raise RequestError(str(error)) from error
    if planned.layout is None:
        raise RequestError("; ".join(error.sentence for error in planned.errors))
    order = arranged(planned.layout.slots, planned.layout.dims, rules.topology)
    return replace(planned.layout, slots=order)


def _layout_of_the_rules(slots: Sequence[int], rules: LayoutRules, most: int) -> ParallelLayout:
    try:
        return layout_for(slots, rules)
    except NoLayout as error:
        nearest = " or ".join(map(str, nearest_allowed(len(slots), most, rules)))
        train = f"train on {nearest}, or " if nearest else ""
        raise RequestError(f"{error}: {train}write the layout itself, such as dp_shard={len(slots)}") from error


def _chosen(
    asked: AskedLayout, sizes: Mapping[str, int], now: ParallelLayout, machine: Sequence[int], busy: Collection[int]
) -> Sequence[int]:
    """Choose as many slots as the layout names, or without `dp_shard` about as many as train now: first those that do.
    Raises RequestError."""
    needed = prod(1 if size == "auto" else size for size in (asked.pp, asked.dp_replicate, asked.cp, asked.tp))
    number = needed * (asked.dp_shard or max(1, len(now.slots) // needed))
    if number > len(machine):
        raise RequestError(f"the layout needs {number} slots, and there are {len(machine)}: write smaller sizes")
    if sizes and number < len(now.slots):
        changed = " and ".join(f"{axis} = {size}" for axis, size in sizes.items())
        raise RequestError(
            f"{changed} would leave {len(now.slots) - number} of the {len(now.slots)} slots that train without a part: "
            f"write another size, or name the slots to train on"
        )
    train, free = set(now.slots), set(machine).difference(busy, now.slots)
    if number > len(train) + len(free):
        raise RequestError(
            f"the layout needs {number} slots, and {len(train)} train and {len(free)} have nothing to do: write "
            f"smaller sizes, or name the slots to train on, which may have other roles"
        )
    return [*sorted(train), *sorted(free)][:number]
