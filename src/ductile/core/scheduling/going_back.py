"""Decides about a run whose trainer has lost slots: it goes back to its last checkpoint, on the slots that are left,
or it ends, and why.

1. Slots that trained and are lost get no role any more. All others begin anew, each with the roles that it had, if
   their nodes are there.
2. The trainer has the largest number of the slots that are left on which the run's rules have a layout: of model,
   memory and batch, the sizes that are asked for, and what was asked for by hand (`core.layout.choice.layout_rules`).
3. The run ends where that is none, where no slot is left that generates or scores, and when it has gone back
   `cluster.max_restarts` times without a new checkpoint.

It knows no files: which checkpoint is the last one is for `ductile.orchestrator.commands.going_back`.
"""

from collections.abc import Collection
from dataclasses import dataclass

from ductile.core.instances.placement import Placement, many, slots_of
from ductile.core.layout.choice.layout_rules import LayoutRules, choose_layout, dims_allowed, layout_for
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.resize_rulings import describe


@dataclass(frozen=True, slots=True)
class TrainerLoss:
    """A trainer that has lost slots, and the slots around it."""

    home: Placement
    """Roles with which the slots began."""
    trained: tuple[int, ...]
    """Slots that may train: those that did when it was lost, or of a policy's run those that did at its beginning."""
    lost: frozenset[int]
    """Slots of the trainer that are lost."""
    startable: frozenset[int]
    """Slots of the run whose processes can be started anew."""
    num_in_row: int = 0
    """How often it has gone back to the same checkpoint before."""
    max_restarts: int = 5
    servers_generate: bool = False
    """True where the run can do without slots that generate."""
    slots_per_scorer: int = 1


@dataclass(frozen=True, slots=True)
class WayBack:
    """Roles and layout with which a run goes on, or the reason for which it ends."""

    reason: str
    """Reason for which slots are left out, or for which the run ends, as a clause; "" where there is nothing to say."""
    placement: Placement | None = None
    """Roles of the slots that are left; None where the run ends."""
    layout: ParallelLayout | None = None
    """Layout of the trainer; None where the run ends."""

    @property
    def goes_on(self) -> bool:
        return self.placement is not None


def way_back(loss: TrainerLoss, rules: LayoutRules) -> WayBack:
    """Return where a run goes on whose trainer has lost slots. It ends where `goes_on` is false."""
    if loss.num_in_row >= loss.max_restarts:
        times = many(loss.num_in_row, "time")
        return WayBack(f"it has gone back {times} in a row without a new checkpoint (cluster.max_restarts)")
    home, stays = loss.home, loss.startable - loss.lost
    train = tuple(sorted(stays.intersection(loss.trained)))
    if not train:
        return WayBack("no slot that trained is left")
    sizes = [size for size in dims_allowed(len(train), rules) if size <= len(train)]
    if not sizes:
        return WayBack(choose_layout(len(train), rules).reason)
    layout = layout_for(train[: max(sizes)], rules)
    generate = _left(home.generate, stays)
    if home.generate and not generate and not loss.servers_generate:
        return WayBack("no slot that generates is left")
    score = _left(home.score, stays)
    score = score[: len(score) // loss.slots_per_scorer * loss.slots_per_scorer]
    if home.score and not score:
        return WayBack(
            "too few slots that score are left" if loss.slots_per_scorer > 1 else "no slot that scores is left"
        )
    unused = train[max(sizes) :]
    reason = f"{slots_of(unused)} left out, as {choose_layout(len(train), rules).reason}" if unused else ""
    return WayBack(reason, Placement(layout.slots, generate, score, "the slots that are left"), layout)


def sentence_of(step: int, back: WayBack, why: str, num_lost: int) -> str:
    """Tell that the trainer goes back, in one sentence. why: how it was lost. num_lost: steps that are trained anew."""
    assert back.layout is not None, "the run goes on"
    where = f"to the checkpoint of step {step}" if step else "to the beginning, as there is no checkpoint yet,"
    less = f" ({back.reason})" if back.reason else ""
    first, last = step + 1, step + num_lost
    steps = "" if not num_lost else f"step {first}" if num_lost == 1 else f"steps {first}-{last}"
    anew = f"; {steps} {'is' if num_lost == 1 else 'are'} trained anew" if steps else ""
    return f"Trainer goes back {where} on {describe(back.layout)}{less}, since {why}{anew}."


def _left(slots: Collection[int], stays: Collection[int]) -> tuple[int, ...]:
    return tuple(slot for slot in slots if slot in stays)
