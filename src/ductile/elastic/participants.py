"""The slots that take part in a resize: asking them, and finding out which of those that do not reply are dead."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ductile.messages.workers import Command
from ductile.roles import Late, Refused, SlotLost
from ductile.transport.fanout import AFTER_FAILURE_S
from ductile.transport.mailbox import Mailbox, Outcome

GRACE_S = 1.0
"""Slots know the deadline of a step; this process waits so many seconds longer, to hear which other slot they waited
for in vain."""

LOOK_S, NUM_LOOKS = 0.1, 25
"""Seconds between two looks for a sign of life from slots that are late, and number of looks: 2.5 s in all, while
heartbeats come every second, also from a slot whose main thread is busy or waits for another. Looks are counted, and
not seconds: had this process itself been suspended, the heartbeats of that time would wait unread."""

DEATH_LOOKS = 10
"""Looks for a death that explains another slot's failure: 1 s in all."""


class Participants:
    """The slots of the old and the new layout. `kill_late` and `kill_silent` end those that give no sign of life,
    `ask_until_done` any that is late."""

    def __init__(
        self, mailbox: Mailbox, slots: Sequence[int], kill: Callable[[int, str], None], timeout_s: float
    ) -> None:
        """slots: all that take part. kill(slot, sentence): end a slot that does not reply, and lose it
        in the mailbox. timeout_s: deadline of a step, as the slots know it."""
        self._mailbox, self._slots, self._kill, self._timeout_s = mailbox, slots, kill, timeout_s

    @property
    def step_s(self) -> float:
        """Seconds after which a slot is late at a step."""
        return self._timeout_s + GRACE_S

    async def ask(
        self,
        commands: Mapping[int, Command],
        deadline_s: float | None = None,
        after_failure_s: float | None = AFTER_FAILURE_S,
    ) -> dict[int, Outcome]:
        """One outcome of every slot, within the time of a step unless told otherwise; a lost slot is not asked."""
        dead = self.dead(commands)
        alive = {slot: command for slot, command in commands.items() if slot not in dead}
        deadline_s = self.step_s if deadline_s is None else deadline_s
        return await self._mailbox.ask_all(alive, deadline_s, after_failure_s) | dead

    async def ask_until_done(
        self, commands: Mapping[int, Command], deadline_s: float, holders: Collection[int]
    ) -> None:
        """Have slots do what must be done: one that is late, or that refuses and is among the holders of the role, is
        killed."""
        for slot, outcome in (await self.ask(commands, deadline_s, after_failure_s=None)).items():
            if isinstance(outcome, Late) or (isinstance(outcome, Refused) and slot in holders):
                self._kill(slot, f"{outcome}; it has been killed")

    def dead(self, slots: Iterable[int]) -> dict[int, SlotLost]:
        """Those of the slots that are dead by now."""
        lost = self._mailbox.lost
        return {slot: SlotLost(lost[slot], slot) for slot in slots if slot in lost}

    async def deaths(self) -> dict[int, SlotLost]:
        """Participants that are dead. What a death breaks elsewhere is often heard of before the death is: where
        none is known yet, it is waited for."""
        for _ in range(DEATH_LOOKS):
            if dead := self.dead(self._slots):
                return dead
            await asyncio.sleep(LOOK_S)
        return {}

    async def kill_late(self, outcomes: Mapping[int, Outcome]) -> dict[int, SlotLost]:
        """Kill those that are late, if they are silent."""
        return await self.kill_silent({s: str(outcome) for s, outcome in outcomes.items() if isinstance(outcome, Late)})

    async def kill_silent(self, awaited: Mapping[int, str]) -> dict[int, SlotLost]:
        """Kill those that give no sign of life from now on; the others may wait for these, or be slow.

        awaited: slots, each with the sentence that says what it has not done.
        """
        silent = await self._silent(awaited)
        for slot in silent:
            self._kill(slot, f"{awaited[slot]}, and has been killed")
        return self.dead(silent)

    async def _silent(self, awaited: Collection[int]) -> list[int]:
        heard_at_s = {slot: self._mailbox.heard_at_s.get(slot) for slot in awaited}
        silent = sorted(awaited)
        for _ in range(NUM_LOOKS):
            if not silent:
                break
            await asyncio.sleep(LOOK_S)
            silent = [slot for slot in silent if self._mailbox.heard_at_s.get(slot) == heard_at_s[slot]]
        return silent
