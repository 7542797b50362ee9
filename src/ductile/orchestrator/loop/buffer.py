"""Prompt groups between the generators and the trainer.

It keeps the books and has no hands: which prompts are under way, which groups are finished, how many more may be
started, which are too old. `Rollouts` puts groups in, `Loop` takes them out; the rules are `core.rollouts.staleness`
and `core.batch.chunking`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.concurrency.listeners import Listeners
from ductile.core.batch.chunking import ReadyGroup, chunk
from ductile.core.rollouts.staleness import Freshness, StalenessBound, admission, freshness
from ductile.events.rollouts import GroupDropped, PromptDroppedTwice
from ductile.observe import Recorder
from ductile.records import Prompt, Rollout, RolloutGroup
from ductile.roles import Late
from ductile.tasks.prompts import PromptPosition, Prompts

MOMENT_S = 0.05
"""Seconds that `take` waits for groups that lack only rewards: a few dozen quick rewards take no longer."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished group with its tokens and its oldest version, which are asked for often and computed once."""

    group: RolloutGroup
    num_tokens: int
    oldest_version: int


class Buffer:
    def __init__(
        self,
        prompts: Prompts,
        bound: StalenessBound,
        record: Recorder,
        *,
        version: int,
        max_steps: int,
        timeout_s: float,
        stop: asyncio.Event,
    ) -> None:
        """timeout_s: the longest that `take` waits. stop: once set, nothing is started beyond the current step."""
        self.version = version
        """Version of the weights that the trainer trains; also the step."""
        self.live_version = version
        """Version that every generator samples from; one less than `version` while new weights are on their way."""
        self.num_taken = 0
        """Groups that the trainer has taken in this step."""
        self.num_updates = 0
        """Optimizer steps that are done in this step."""
        self.on_change = Listeners[[]]()
        """Told whenever a waiting call of `changed` returns."""
        self.num_dropped = 0
        """Groups that were too old to train on; their prompts are asked again."""
        self.num_dropped_completions = 0
        """Rollouts of the dropped groups that were finished."""
        self.num_dropped_tokens = 0
        """Sampled tokens of the rollouts that `num_dropped_completions` counts."""
        self._drops: Counter[str] = Counter()
        self._prompts, self._bound, self._record = prompts, bound, record
        self._max_steps, self._timeout_s, self._stop = max_steps, timeout_s, stop
        self._running: dict[str, int] = {}  # prompt id -> version when it was started
        self._waiting: list[_Finished] = []
        self._error: BaseException | None = None
        self._changed = ChangeSignal()

    def counts(self) -> dict[str, float]:
        """Metrics of the run so far."""
        return {
            "groups_dropped": float(self.num_dropped),
            "dropped_tokens": float(self.num_dropped_tokens),
            "dropped_length_mean": self.num_dropped_tokens / max(1, self.num_dropped_completions),
        }

    # -- the generators' side

    def admit(self) -> Prompt | None:
        """The next prompt to work on; None while nothing more may be started."""
        if self.live_version < self.version:
            return None  # its first tokens would be older than they need to be
        if not self.room:
            return None
        prompt = self._prompts.next_prompt()
        self._running[prompt.id] = self.version
        return prompt

    @property
    def room(self) -> int:
        """Groups that may be started, once weights are live."""
        return admission(
            self._bound,
            outstanding=len(self._running) + len(self._waiting),
            taken=self.num_taken,
            steps_left=1 if self._stop.is_set() else self._max_steps - self.version,
        ).num_groups

    def put(self, group: RolloutGroup) -> None:
        del self._running[group.prompt.id]
        self._waiting.append(_Finished(group, group.num_tokens, group.oldest_version))
        self.wake()

    def stale_in_flight(self) -> list[str]:
        """Ids of prompts whose groups are in generation and would be too old even if they finished now."""
        return [prompt for prompt, version in self._running.items() if not self._freshness(version).fresh]

    def drop(self, prompt: Prompt) -> None:
        """Stop waiting for the prompt's rollouts, and ask the prompt again."""
        self._drop_rollouts(prompt, (), self._freshness(self._running.pop(prompt.id)))

    def fail(self, error: BaseException) -> None:
        """Make `take` raise this from now on: the side that should fill the buffer has failed."""
        self._error = self._error or error
        self.wake()

    async def changed(self) -> None:
        """Returns after the next change, or `wake`. A task that waits here is cancelled when the run ends."""
        await self._changed.wait()

    def now_live(self, version: int) -> None:
        """Every generator samples from this version."""
        self.live_version = version
        self.wake()

    # -- the trainer's side

    async def take(
        self,
        wanted: int,
        *,
        groups_per_update: int,
        num_ranks: int,
        per_rank: int,
        seq_len: int,
        soon: Callable[[], int],
    ) -> list[RolloutGroup]:
        """Between 1 and `wanted` groups, fresh enough to train on, in the order in which they were finished.

        Waits for `put` or `fail`, and then for at most `MOMENT_S` for groups that come `soon()`. Raises Late when
        nothing is enough for `timeout_s`.
        """

        def count(num_soon: int = 0) -> int:
            return chunk(
                [ReadyGroup(len(each.group.rollouts), each.num_tokens) for each in self._waiting],
                wanted=wanted,
                groups_per_update=groups_per_update,
                num_ranks=num_ranks,
                per_rank=per_rank,
                seq_len=seq_len,
                soon=num_soon,
            )

        try:
            async with asyncio.timeout(self._timeout_s):
                await self._until(count)
                with suppress(TimeoutError):
                    async with asyncio.timeout(MOMENT_S):
                        await self._until(lambda: count(soon()))
                num_groups = await self._until(count)
        except TimeoutError:
            raise Late(
                f"no prompt group to train on within {said(self._timeout_s)}: "
                f"{len(self._running)} groups are being generated, {len(self._waiting)} are finished and not enough"
            ) from None
        taken, self._waiting = self._waiting[:num_groups], self._waiting[num_groups:]
        self.num_taken += num_groups
        self.wake()
        return [finished.group for finished in taken]

    async def _until(self, count: Callable[[], int]) -> int:
        """The first count of fresh groups that is not 0. Raises what `fail` was told."""
        while True:
            if self._error:
                raise self._error
            self._drop_stale()
            if num_groups := count():
                return num_groups
            await self._changed.wait()

    def mark_trained(self, groups: Sequence[RolloutGroup]) -> None:
        """The optimizer has used them: a resume does not ask these prompts again."""
        self.num_updates += 1
        for group in groups:
            self._drops.pop(group.prompt.id, None)
            self._prompts.mark_trained(group.prompt)

    def next_version(self, version: int) -> None:
        """The step is trained; the next one, of this version, begins."""
        self.version, self.num_taken, self.num_updates = version, 0, 0
        self.wake()

    def position(self) -> PromptPosition:
        return self._prompts.position()

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts and completions in the groups that wait for the trainer."""
        return sum(finished.num_tokens for finished in self._waiting)

    def __len__(self) -> int:
        """Groups that wait for the trainer."""
        return len(self._waiting)

    def _freshness(self, version: int) -> Freshness:
        return freshness(self._bound, version=self.version, oldest_version=version)

    def _drop_stale(self) -> None:
        verdicts = {version: self._freshness(version) for version in {each.oldest_version for each in self._waiting}}
        stale = [each for each in self._waiting if not verdicts[each.oldest_version].fresh]
        if stale:
            self._waiting = [each for each in self._waiting if verdicts[each.oldest_version].fresh]
        for each in stale:
            self._drop_rollouts(each.group.prompt, each.group.rollouts, verdicts[each.oldest_version])

    def _drop_rollouts(self, prompt: Prompt, rollouts: Sequence[Rollout], verdict: Freshness) -> None:
        self.num_dropped += 1
        self.num_dropped_completions += len(rollouts)
        self.num_dropped_tokens += sum(rollout.num_sampled for rollout in rollouts)
        self._drops[prompt.id] += 1
        self._prompts.requeue(prompt)
        sentence = f"Dropped {prompt.id} and ask it again: {verdict.reason}."
        self._record.event(GroupDropped(prompt.id, sentence=sentence))
        if self._drops[prompt.id] == 2:
            sentence = (
                f"{prompt.id} was dropped twice: its completions take longer than orchestrator.max_off_policy_steps "
                f"({self._bound.max_off_policy_steps}) steps. Completions as long as these are not trained on; raise "
                "it, or lower orchestrator.sampling.max_tokens."
            )
            self._record.event(PromptDroppedTwice(prompt.id, sentence=sentence))
        self.wake()

    def wake(self) -> None:
        """Have every waiting `take` and `changed` look again."""
        self._changed.notify_all()
        self.on_change()
