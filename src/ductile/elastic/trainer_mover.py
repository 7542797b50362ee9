"""Empties slots of a run that has nothing but a trainer: `ductile sft`, `ductile trainer`."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager

from ductile.core.layout.choice.layout_rules import NoLayout, dims_allowed, layout_for
from ductile.core.scheduling.drains import CannotDrain
from ductile.elastic.trainer_resizer import CannotResize, ResizeNotDone, TrainerResizer
from ductile.fleet.trainer.remote_trainer import RemoteTrainer

RETRY_S = 0.1
"""Seconds until a resize is tried again that was not done, as another one was under way."""


class TrainerMover:
    """Follows `ductile.elastic.drains.Mover`: the trainer is resized onto the slots that are left, and back."""

    def __init__(self, trainer: RemoteTrainer, resizer: TrainerResizer) -> None:
        self._trainer, self._resizer = trainer, resizer
        self._leaving: set[int] = set()
        self._trained: set[int] = set()
        """Slots that trained when they were emptied, and have not come back."""

    @asynccontextmanager
    async def emptied(self, slots: Collection[int]) -> AsyncGenerator[set[int]]:
        self._leaving.update(slots)
        try:
            trained = {*slots}.intersection(self._trainer.layout.slots)
            while not {*slots}.isdisjoint(self._trainer.layout.slots):
                others = self._leaving.difference(slots)
                await self._train_on(left_of(self._trainer.layout.slots, slots, others, self._resizer))
            gone = {*slots}
            yield gone
            self._trained |= trained & gone
        finally:
            self._leaving.difference_update(slots)

    async def restore(self, slots: Collection[int]) -> None:
        back = self._trained.intersection(slots)
        self._trained -= back
        while missing := sorted(back.difference(self._trainer.layout.slots)):
            await self._train_on((*self._trainer.layout.slots, *missing))

    async def _train_on(self, slots: Sequence[int]) -> None:
        """Resize the trainer, or wait a little where that was not done. Raises CannotDrain."""
        try:
            resized = await self._resizer.resize_to(layout_for(slots, self._resizer.rules))
        except (NoLayout, CannotResize) as error:
            raise CannotDrain(str(error)) from error
        except ResizeNotDone:
            self._trainer.check()
        else:
            if resized.outcome != "rolled_back":
                return
        await asyncio.sleep(RETRY_S)


def left_of(
    slots: Sequence[int], leaving: Collection[int], others: Collection[int], resizer: TrainerResizer
) -> Sequence[int]:
    """Return as many of the slots that stay as are a layout. others: slots that are to be gone as well, by other
    notices: they stay where it does not go without them. Raises CannotDrain."""
    allowed = dims_allowed(len(slots), resizer.rules)
    for going in ({*leaving, *others}, leaving):
        staying = sorted((slot for slot in slots if slot not in going), key=lambda slot: slot in others)
        if number := max((each for each in allowed if each <= len(staying)), default=0):
            return staying[:number]
    raise CannotDrain("no other slot can take the trainer's state over")
