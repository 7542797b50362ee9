"""Which layout does the trainer have on so many slots, if any? One rule for all who ask.

1. What somebody has asked for by hand since the run began (`ductile resize --layout`), if that fits the number.
2. The first of the listed layouts (`trainer.resize.layouts`) that fits.
3. What the config asks for (`trainer.model.pp`, `tp`, ...), if that fits; with as many copies (`dp_replicate`) as the
   slots allow. A pp, cp or tp that is a number is kept: a slot of a tp-2 run may have no room for a whole layer.
   "auto" is chosen for each number of slots.

With `nodes_per_fsdp_group` the third has as many copies as there are groups of so many nodes. Slots of several nodes
are put in the order in which tp is inside nodes and copies are across them (`geometry.node_order`).

Other numbers of slots are no layout: no policy is offered them, and `ductile resize --train` refuses them. So is a
number for which a slot would have too little memory, as far as its memory is known (`LayoutRules.memory`).

    rules = LayoutRules(spec, AskedLayout(tp=2), listed=("pp=2,tp=2,dp_shard=2", "dp_shard=3"))
    layout_for(range(8), rules).dims     pp 2, tp 2, dp_shard 2    (listed)
    layout_for(range(6), rules).dims     tp 2, dp_shard 3          (asked for)
    layout_for(range(3), rules).dims     dp_shard 3                (listed)
    layout_for(range(5), rules)          NoLayout: 5 slots are no multiple of tp 2

The elastic controller, `ductile resize --train`, the start of a run and the simulator all ask here, so a policy knows
beforehand what it gets for a number of slots.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod
from types import MappingProxyType
from typing import Any

from ductile.core.layout.choice.asked_layout import DATA_PARALLELISM, AskedLayout
from ductile.core.layout.choice.layout_text import in_words, parse_sizes
from ductile.core.layout.choice.planner import PlannedLayout, plan_layout
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.geometry.node_order import arranged
from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout
from ductile.core.layout.geometry.topology import ONE_NODE, Topology
from ductile.core.layout.model.lora import LoraSpec
from ductile.core.layout.model.spec import ModelSpec, RopeScaling

REMEMBERED = 4096
"""Numbers of slots whose layouts are remembered, over all rules."""


class NoLayout(ValueError):
    """So many slots are no layout. The text says why."""


@dataclass(frozen=True, slots=True)
class LayoutRules:
    """All that the choice of a layout depends on, besides the number of slots."""

    spec: ModelSpec | None = None
    """The model; None where it is not known: sizes are then held against the number of slots alone."""
    asked: AskedLayout = DATA_PARALLELISM
    listed: tuple[str, ...] = ()
    """Layouts as text (`ductile.core.layout.choice.layout_text`); the first that fits a number of slots is taken."""
    num_samples: int | None = None
    """Fewest samples of an optimizer step; None: not known."""
    memory: SlotMemory | None = None
    """What training keeps on a slot, and the room for it; None: not known, and not looked at."""
    by_hand: AskedLayout | None = None
    """Sizes that were asked for by hand; they come before all others where they fit."""
    topology: Topology = ONE_NODE
    """The nodes that the run's slots are on."""
    nodes_per_fsdp_group: int | None = None
    """Nodes over which one copy is sharded, where the config says it (`deployment.nodes_per_fsdp_group`); None: there
    are as many copies as are asked for."""

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "LayoutRules":
        """The inverse of `dataclasses.asdict`."""
        own: dict[str, Any] = dict(fields)
        if own.get("spec") is not None:
            spec = dict(own["spec"])
            spec["rope_scaling"] = RopeScaling(**spec["rope_scaling"]) if spec["rope_scaling"] else None
            if spec.get("lora"):
                spec["lora"] = LoraSpec(**spec["lora"] | {"targets": tuple(spec["lora"]["targets"])})
            own["spec"] = ModelSpec(**spec)
        own["asked"], own["listed"] = AskedLayout(**own["asked"]), tuple(own["listed"])
        if own.get("memory") is not None:
            own["memory"] = SlotMemory.from_fields(own["memory"])
        if own.get("by_hand") is not None:
            own["by_hand"] = AskedLayout(**own["by_hand"])
        if "topology" in own:
            own["topology"] = Topology.from_fields(own["topology"])
        return LayoutRules(**own)

    def beginning_on(self, num_slots: int) -> "LayoutRules":
        """The rules of a run that begins on so many slots: a slot is taken to have what it needs there, whatever is
        estimated."""
        first = next((each.planned for each in _candidates(num_slots, self) if not each.planned.errors), None)
        if self.memory is None or first is None:
            return self
        return replace(self, memory=replace(self.memory, least_bytes=first.needed_bytes))

    def asked_by_hand(self, asked: AskedLayout, num_slots: int) -> "LayoutRules":
        """The rules of a trainer that somebody has given a layout on so many slots. A slot is taken to have what it
        needs there, too."""
        rules = replace(self, by_hand=asked)
        if self.memory is None:
            return rules
        needed = max(self.memory.least_bytes, _plan(num_slots, rules, asked).needed_bytes)
        return replace(rules, memory=replace(self.memory, least_bytes=needed))


NO_RULES = LayoutRules()
"""Data parallelism on any number of slots."""


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """The layout for a number of slots, or why there is none."""

    planned: PlannedLayout
    """Plan for the slots 0, 1, ...; what it says of sizes holds for any others."""
    reason: str
    """Says where the layout comes from, or why there is none."""
    listed: str = ""
    """Listed layout that this is; "" where it is none."""

    @property
    def is_allowed(self) -> bool:
        """Return whether the trainer can have it."""
        return not (self.planned.errors or self.planned.short)

    @property
    def layout(self) -> ParallelLayout:
        """Raises NoLayout."""
        if self.planned.layout is None or not self.is_allowed:
            raise NoLayout(self.reason)
        return self.planned.layout


def layout_for(slots: Iterable[int], rules: LayoutRules) -> ParallelLayout:
    """The trainer's layout on these slots. Raises NoLayout where the rules have none for their number, and ValueError
    for no slots, and for one that is named twice."""
    slots = tuple(slots)
    if not slots:
        return ParallelLayout.of(slots)  # which says what is wrong
    layout = choose_layout(len(slots), rules).layout
    return replace(layout, slots=arranged(slots, layout.dims, rules.topology))


@lru_cache(maxsize=REMEMBERED)
def choose_layout(num_slots: int, rules: LayoutRules) -> ChosenLayout:
    """The layout on so many slots, at least one, or why there is none."""
    refused: list[ChosenLayout] = []
    for candidate in _candidates(num_slots, rules):
        if candidate.is_allowed:
            return candidate
        refused.append(candidate)
    short = [each for each in refused if not each.planned.errors]
    asked_for = (short or refused)[-1]
    return replace(asked_for, reason=_why_not(num_slots, rules, asked_for.planned), listed="")


@lru_cache(maxsize=64)
def dims_allowed(most: int, rules: LayoutRules) -> Mapping[int, ParallelDims]:
    """The numbers of slots, up to `most`, on which the trainer has a layout, ascending, and its sizes there."""
    chosen = {number: choose_layout(number, rules) for number in range(1, most + 1)}
    return MappingProxyType({number: each.layout.dims for number, each in chosen.items() if each.is_allowed})


def nearest_allowed(num_slots: int, most: int, rules: LayoutRules) -> list[int]:
    """The nearest numbers of slots below and above on which the trainer has a layout, of `most` at most."""
    allowed = dims_allowed(most, rules)
    below, above = [n for n in allowed if n < num_slots], [n for n in allowed if n > num_slots]
    return [*below[-1:], *above[:1]]


def plan_listed(text: str, num_slots: int, rules: LayoutRules) -> PlannedLayout | None:
    """The plan for a listed layout on so many slots; None where it is for other numbers of slots. Raises
    LayoutTextError."""
    sizes = parse_sizes(text)
    asked = rules.asked.sized(sizes)
    needed = prod(sizes.values())
    fits = num_slots == needed if "dp_shard" in sizes else num_slots % needed == 0
    return _plan(num_slots, rules, asked) if fits else None


def _candidates(num_slots: int, rules: LayoutRules) -> Iterator[ChosenLayout]:
    """What the trainer might have on so many slots, the best first; some of it cannot be."""
    if rules.by_hand is not None:
        yield _asked_for(num_slots, rules, rules.by_hand, "as asked for by hand")
    for text in rules.listed:
        planned = plan_listed(text, num_slots, rules)
        if planned is not None:
            yield ChosenLayout(planned, f"{text} is listed for {num_slots} slots", text)
    copies = _copies_by_nodes(num_slots, rules)
    if copies is None:
        yield _asked_for(num_slots, rules, rules.asked, "as asked")
    else:
        reason = f"as asked, with nodes_per_fsdp_group = {rules.nodes_per_fsdp_group}"
        yield _asked_for(num_slots, rules, replace(rules.asked, dp_replicate=copies), reason)


def _copies_by_nodes(num_slots: int, rules: LayoutRules) -> int | None:
    """Return how many copies so many slots have where each is sharded over so many nodes: never more than there are
    groups of nodes, so that no slot gets a larger part than was asked for. None where nothing is said of nodes."""
    per_node = rules.topology.slots_per_node
    if rules.nodes_per_fsdp_group is None or per_node is None:
        return None
    most = max(1, num_slots // (rules.nodes_per_fsdp_group * per_node))
    of_a_copy = prod(1 if size == "auto" else size for size in (rules.asked.pp, rules.asked.cp, rules.asked.tp))
    return next(copies for copies in range(most, 0, -1) if copies == 1 or num_slots % (copies * of_a_copy) == 0)


def _asked_for(num_slots: int, rules: LayoutRules, asked: AskedLayout, reason: str) -> ChosenLayout:
    """What is asked for, with fewer copies where the slots do not allow as many."""
    planned = _plan(num_slots, rules, asked)
    if planned.errors and asked.dp_replicate > 1:
        of_a_copy = prod(1 if size == "auto" else size for size in (asked.pp, asked.cp, asked.tp))
        copies = gcd(asked.dp_replicate, max(1, num_slots // of_a_copy))
        fewer = _plan(num_slots, rules, replace(asked, dp_replicate=copies))
        if not fewer.errors:
            return ChosenLayout(fewer, f"{reason}, but dp_replicate {copies}, which is what {num_slots} slots allow")
    return ChosenLayout(planned, reason)


def _plan(num_slots: int, rules: LayoutRules, asked: AskedLayout) -> PlannedLayout:
    per_node = rules.topology.slots_per_node
    return plan_layout(num_slots, asked, rules.spec, rules.num_samples, rules.memory, per_node)


def _why_not(num_slots: int, rules: LayoutRules, planned: PlannedLayout) -> str:
    """Why so many slots are no layout: "3 slots are no multiple of tp 2, which is asked for"."""
    slots = "1 slot is" if num_slots == 1 else f"{num_slots} slots are"
    if planned.short:
        words = (planned.layout and in_words(planned.layout.dims)) or "one slot"
        return f"{slots} too few, as it seems: as {words} {planned.short}"
    sizes = {axis: getattr(rules.asked, axis) for axis in ("pp", "cp", "tp")}
    kept = {axis: size for axis, size in sizes.items() if size not in (1, "auto")}
    if num_slots % prod(kept.values()):
        product = " · ".join(f"{axis} {size}" for axis, size in kept.items())
        return f"{slots} no multiple of {product}, which is asked for"
    return f"{slots} no layout: {'; '.join(error.sentence for error in planned.errors)}"
