"""Keeps the buffer full: as many prompt groups under way as it admits and as the generators have room for."""

import asyncio

from ductile.concurrency.structured import gather_all
from ductile.orchestrator.loop.buffer import Buffer
from ductile.orchestrator.loop.episode import Episodes
from ductile.records import Prompt, Rollout, RolloutGroup, Sampling
from ductile.roles import Generators


class Rollouts:
    """`async with rollouts:` generates until the block is left; then what is under way is aborted.

    Waits for the buffer to admit a group (the trainer took one, or a version went live) and for completions to end (the
    generators). An error in any group goes to `buffer.fail`, and so to the trainer's side of the loop.
    """

    def __init__(
        self, buffer: Buffer, episodes: Episodes, generators: Generators, sampling: Sampling, group_size: int
    ) -> None:
        self.buffer, self.generators, self._episodes = buffer, generators, episodes
        self._sampling, self._group_size = sampling, group_size
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._num_playing = 0  # completions that are being generated or scored
        self._finished: dict[str, tuple[int, int]] = {}  # by prompt with unfinished siblings: (completions, tokens)
        self._filling: asyncio.Task[None] | None = None
        self._leaving = False

    async def __aenter__(self) -> "Rollouts":
        self._filling = asyncio.create_task(self._fill())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leaving = True
        tasks = [task for task in (self._filling, *self._groups.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def now_live(self, version: int) -> None:
        """The generators sample from `version` now. What can only become too old is stopped and asked again."""
        self.buffer.now_live(version)
        for prompt in self.buffer.stale_in_flight():
            if group := self._groups.get(prompt):  # none when it has failed, or when the run is about to end
                group.cancel()

    @property
    def partial(self) -> tuple[int, int]:
        """Finished completions of prompts that have unfinished ones: how many, and their tokens with the prompts."""
        finished = self._finished.values()
        return sum(completions for completions, _ in finished), sum(tokens for _, tokens in finished)

    def num_soon(self) -> int:
        """Groups whose completions are all generated, and of which the buffer will hear when they are graded."""
        return sum(
            self._finished.get(prompt, (0, 0))[0] + self._episodes.num_grading(prompt) == self._group_size
            for prompt in self._groups
        )

    async def _fill(self) -> None:
        try:
            while True:
                # Started only when there is room, so that tokens are as fresh as can be. The last group may not fit
                # entirely: its members take the places of those that end first.
                while self._num_playing < self.generators.capacity and (prompt := self.buffer.admit()):
                    self._num_playing += self._group_size
                    self._groups[prompt.id] = asyncio.create_task(self._run(prompt))
                await self.buffer.changed()
        except Exception as error:
            self.buffer.fail(error)

    async def _run(self, prompt: Prompt) -> None:
        members = range(self._group_size)
        try:
            rollouts = await gather_all(*(self._play(prompt, member) for member in members))
            self.buffer.put(RolloutGroup(prompt, tuple(rollouts)))
        except asyncio.CancelledError:
            if not self._leaving:
                num_finished, _ = self._finished.get(prompt.id, (0, 0))
                self.buffer.drop(prompt, self._group_size - num_finished)
        except Exception as error:
            self.buffer.fail(error)
        finally:
            self._finished.pop(prompt.id, None)
            del self._groups[prompt.id]

    async def _play(self, prompt: Prompt, member: int) -> Rollout:
        try:
            rollout = await self._episodes.play(prompt, self._sampling, member)
            self.buffer.note_sampled(rollout)
            completions, tokens = self._finished.get(prompt.id, (0, 0))
            self._finished[prompt.id] = completions + 1, tokens + len(prompt.token_ids) + len(rollout.token_ids)
            return rollout
        finally:
            self._num_playing -= 1
            self.buffer.wake()
