"""The place of the trainer's state: its slots' devices, or host memory, while these are lent."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ductile.concurrency.background import finish
from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.concurrency.listeners import Listeners
from ductile.messages.workers import Park, StateMoved, Unpark
from ductile.roles import Failure, Late, Refused


@dataclass(frozen=True, slots=True)
class StateTravel:
    """The state was moved between devices and host memory, on all slots at once."""

    what: Literal["park", "unpark"]
    slots: tuple[int, ...]
    num_bytes: int
    """Bytes that were moved, all slots together."""
    device_bytes: int
    """Bytes of the trainer on the devices while it was parked, at that end of the time; all slots together."""
    seconds: float
    """Seconds that it took the slowest slot."""


class StateParking:
    """The books of it, and the commands. The caller sees to it that the trainer is asked for nothing else meanwhile."""

    def __init__(self, ask: Callable[[Park | Unpark], Awaitable[Mapping[int, StateMoved]]], patience_s: float) -> None:
        """ask: asks all slots of the trainer, and raises a Failure. patience_s: longest time that a command waits for
        the state."""
        self.is_parked = False
        self.on_wanted = Listeners[[]]()
        """Told when a command begins to wait for the state, which is parked."""
        self.on_moved = Listeners[[StateTravel]]()
        self._ask, self._patience_s = ask, patience_s
        self._num_wanting = 0
        self._failure: Failure | None = None
        """Reason for which it did not come back."""
        self._changed = ChangeSignal()

    @property
    def is_wanted(self) -> bool:
        """True while a command waits for the state, which is parked."""
        return self._num_wanting > 0

    async def park(self) -> None:
        """Have it moved to host memory. Raises the Failure of a slot that cannot; then all have it as before."""
        try:
            moved = await self._ask(Park())
        except Failure:
            with suppress(Failure):
                await finish(self._unpark())
            raise
        self.is_parked = True
        self._tell("park", moved)

    async def unpark(self) -> None:
        """Have it taken back to the devices, which nobody else uses any more. Raises a Failure, and so do all that wait
        for it then."""
        try:
            moved = await self._ask(Unpark())
        except Failure as error:
            self._failure = error
            self.look_again()
            raise
        self.is_parked, self._failure = False, None
        self._tell("unpark", moved)
        self.look_again()

    async def until_back(self, check: Callable[[], None]) -> None:
        """Return once it is on the devices. Raises Late, what has kept it from coming back, or what `check` raises of a
        trainer that there is not any more."""
        if not self.is_parked:
            return
        self._num_wanting += 1
        self.on_wanted()
        try:
            async with asyncio.timeout(self._patience_s):
                while self.is_parked:
                    check()
                    if self._failure is not None:
                        raise self._failure
                    await self._changed.wait()
        except TimeoutError:
            raise Late(f"for {said(self._patience_s)} the trainer's slots did not get their devices back") from None
        finally:
            self._num_wanting -= 1

    def look_again(self) -> None:
        """Have those that wait for the state check the trainer again."""
        self._changed.notify_all()

    def refuse(self) -> None:
        """Raise Refused while it is parked: whoever asks cannot wait until it is back."""
        if self.is_parked:
            raise Refused("the trainer's weights are parked, as its slots lend their devices")

    async def _unpark(self) -> None:
        await self._ask(Unpark())

    def _tell(self, what: Literal["park", "unpark"], moved: Mapping[int, StateMoved]) -> None:
        self.on_moved(
            StateTravel(
                what,
                tuple(sorted(moved)),
                sum(each.num_bytes for each in moved.values()),
                sum(each.device_bytes for each in moved.values()),
                max(each.seconds for each in moved.values()),
            )
        )
