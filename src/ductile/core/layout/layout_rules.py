"""Which layout does the trainer have on so many slots? One rule for all who ask.

1. The first of the listed layouts (`trainer.resize.layouts`) that fits the number of slots.
2. What is asked for (`trainer.model.pp`, `tp`, ...), if that fits.
3. As much of it as fits: each size is as asked or a divisor of that, and as many slots as possible work on one sample
   as would in the layout asked for; of equally many tp is kept first, then cp, then pp. At the worst this is data
   parallelism, which fits any number of slots.

    rules = LayoutRules(spec, AskedLayout(tp=2), listed=("pp=2,tp=2,dp_shard=2",))
    layout_for(range(8), rules).dims     pp 2, tp 2, dp_shard 2    (listed)
    layout_for(range(6), rules).dims     tp 2, dp_shard 3          (asked for)
    layout_for(range(5), rules).dims     dp_shard 5                (5 slots are no multiple of tp 2)

The elastic controller, `ductile resize --train`, the start of a run and the simulator all ask here, so a policy knows
beforehand what it gets for a number of slots.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import Any

from ductile.core.layout.asked_layout import DATA_PARALLELISM, AskedLayout
from ductile.core.layout.layout_text import in_words, parse_sizes
from ductile.core.layout.parallel_layout import ParallelDims, ParallelLayout
from ductile.core.layout.planner import PlannedLayout, plan_layout
from ductile.core.layout.spec import ModelSpec, RopeScaling

REMEMBERED = 4096
"""Numbers of slots whose layouts are remembered, over all rules."""


@dataclass(frozen=True, slots=True)
class LayoutRules:
    """All that the choice of a layout depends on, besides the number of slots."""

    spec: ModelSpec | None = None
    """The model; None where it is not known: sizes are then held against the number of slots alone."""
    asked: AskedLayout = DATA_PARALLELISM
    listed: tuple[str, ...] = ()
    """Layouts as text (`ductile.core.layout.layout_text`); the first that fits a number of slots is taken."""
    num_samples: int | None = None
    """Fewest samples of an optimizer step; None: not known."""

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "LayoutRules":
        """The inverse of `dataclasses.asdict`."""
        own: dict[str, Any] = dict(fields)
        if own.get("spec") is not None:
            spec = dict(own["spec"])
            spec["rope_scaling"] = RopeScaling(**spec["rope_scaling"]) if spec["rope_scaling"] else None
            own["spec"] = ModelSpec(**spec)
        own["asked"], own["listed"] = AskedLayout(**own["asked"]), tuple(own["listed"])
        return LayoutRules(**own)


NO_RULES = LayoutRules()
"""Data parallelism on any number of slots."""


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """The layout for a number of slots, and where it comes from."""

    planned: PlannedLayout
    """Plan without errors, for the slots 0, 1, ...; what it says of sizes holds for any others."""
    reason: str
    listed: str = ""
    """Listed layout that this is; "" where it is none."""

    @property
    def layout(self) -> ParallelLayout:
        assert self.planned.layout is not None
        return self.planned.layout


def layout_for(slots: Iterable[int], rules: LayoutRules) -> ParallelLayout:
    """The trainer's layout on these slots. Raises ValueError for no slots, and for one that is named twice."""
    slots = tuple(slots)
    if not slots:
        return ParallelLayout.of(slots)  # which says what is wrong
    return replace(choose_layout(len(slots), rules).layout, slots=slots)


@lru_cache(maxsize=REMEMBERED)
def choose_layout(num_slots: int, rules: LayoutRules) -> ChosenLayout:
    """The layout on so many slots, at least one."""
    for text in rules.listed:
        planned = plan_listed(text, num_slots, rules)
        if planned is not None and not planned.errors:
            return ChosenLayout(planned, f"{text} is listed for {num_slots} slots", text)
    planned = _plan(num_slots, rules, rules.asked)
    if not planned.errors:
        return ChosenLayout(planned, "as asked")
    return _adapted(num_slots, rules, planned)


def choose_dims(num_slots: int, rules: LayoutRules) -> tuple[ParallelDims, ...]:
    """The sizes on 1, 2, ... `num_slots` slots."""
    return tuple(choose_layout(number, rules).layout.dims for number in range(1, num_slots + 1))


def plan_listed(text: str, num_slots: int, rules: LayoutRules) -> PlannedLayout | None:
    """The plan for a listed layout on so many slots; None where it is for other numbers of slots. Raises
    LayoutTextError."""
    sizes = parse_sizes(text)
    asked = rules.asked.sized(sizes)
    needed = prod(sizes.values())
    fits = num_slots == needed if "dp_shard" in sizes else num_slots % needed == 0
    return _plan(num_slots, rules, asked) if fits else None


def _plan(num_slots: int, rules: LayoutRules, asked: AskedLayout) -> PlannedLayout:
    return plan_layout(num_slots, asked, rules.spec, rules.num_samples)


def _adapted(num_slots: int, rules: LayoutRules, asked_for: PlannedLayout) -> ChosenLayout:
    why = "; ".join(error.sentence for error in asked_for.errors)
    plans = (_plan(num_slots, rules, asked) for asked in _smaller(num_slots, rules.asked))
    best = next((plan for plan in plans if not plan.errors), None)  # at the latest that of data parallelism alone
    if best is None:
        raise ValueError(why)
    got = (best.layout and in_words(best.layout.dims)) or "one slot"
    return ChosenLayout(best, f"{got}, the nearest that fits {num_slots} slots: {why}")


def _smaller(num_slots: int, asked: AskedLayout) -> list[AskedLayout]:
    """Requests that fit the number of slots and whose sizes divide those asked for; first the one that keeps most.
    What the planner chooses stays its choice."""
    pp, tp = (1 if size == "auto" else size for size in (asked.pp, asked.tp))
    found: list[tuple[tuple[int, ...], AskedLayout]] = []
    for sizes in product(*(_factors(size) for size in (tp, asked.cp, pp))):
        of_a_rank = prod(sizes)
        if num_slots % of_a_rank == 0:
            smaller = {"tp": sizes[0], "cp": sizes[1], "pp": sizes[2]}
            own = {axis: size for axis, size in smaller.items() if getattr(asked, axis) != "auto"}
            copies = gcd(asked.dp_replicate, num_slots // of_a_rank)
            found.append(((of_a_rank, *sizes), replace(asked, **own, dp_replicate=copies, dp_shard=None)))
    return [smaller for _, smaller in sorted(found, key=lambda each: each[0], reverse=True)]


def _factors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)
