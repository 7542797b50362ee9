"""Prompt groups between the generators and the trainer.

It keeps the books and has no hands: which prompts are under way, which groups are finished, how many more may be
started, which are too old. `Rollouts` puts groups in, `Loop` takes them out; the rules are `core.rollouts.staleness`
and `core.batch.chunking`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.concurrency.listeners import Listeners
from ductile.core.batch.chunking import ReadyGroup, chunk
from ductile.core.rollouts.provenance import never_published
from ductile.core.rollouts.staleness import Freshness, StalenessBound, admission, freshness, take_order
from ductile.events.rollouts import GroupDropped, GroupRefused, PromptDroppedTwice
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


@dataclass(slots=True)
class _Lengths:
    """Sampled tokens of completions."""

    num_completions: int = 0
    num_tokens: int = 0

    def add(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            self.num_completions += 1
            self.num_tokens += rollout.num_sampled

    @property
    def mean(self) -> float:
        return self.num_tokens / max(1, self.num_completions)


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
        self.num_stopped_completions = 0
        """Rollouts of the dropped groups that were stopped before they were finished."""
        self._sampled, self._trained = _Lengths(), _Lengths()
        self.num_refused = 0
        """Groups with tokens of weights that were never published; their prompts are asked again."""
        self._published: dict[int, str] = {}  # digest of each version
        self._drops: Counter[str] = Counter()
        self._prompts, self._bound, self._record = prompts, bound, record
        self._max_steps, self._timeout_s, self._stop = max_steps, timeout_s, stop
        self._running: dict[str, int] = {}  # prompt id -> version when it was started
        self._waiting: dict[str, _Finished] = {}  # by prompt id, in the order in which they finished
        self._error: BaseException | None = None
        self._changed = ChangeSignal()

    def counts(self) -> dict[str, float]:
        """Metrics of the run so far."""
        return {
            "groups_dropped": float(self.num_dropped),
            "dropped_tokens": float(self.num_dropped_tokens),
            "dropped_length_mean": self.num_dropped_tokens / max(1, self.num_dropped_completions),
            "groups_refused": float(self.num_refused),
            "stopped_completions": float(self.num_stopped_completions),
            "sampled_length_mean": self._sampled.mean,
            "trained_length_mean": self._trained.mean,
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

    def note_sampled(self, rollout: Rollout) -> None:
        """A completion is finished; `put` gets it when its siblings are."""
        self._sampled.add([rollout])

    def note_published(self, version: int, digest: str) -> None:
        """Tokens may be of this version from now on. digest: "" where nobody knows it."""
        self._published[version] = digest

    def put(self, group: RolloutGroup) -> None:
        """Take a finished group. One with tokens that no published weights have sampled is refused: the others of a
        server that lies, or was not given what it says, are not worth more, and it must not end the run."""
        del self._running[group.prompt.id]
        for rollout in group.rollouts:
            if strange := never_published(self._published, rollout.digests):
                self.num_refused += 1
                sentence = f"Refused {group.prompt.id} and ask it again: {strange}."
                self._record.event(GroupRefused(group.prompt.id, sentence=sentence))
                self._prompts.requeue(group.prompt)
                self.wake()
                return
        self._waiting[group.prompt.id] = _Finished(group, group.num_tokens, group.oldest_version)
        self.wake()

    def stale_in_flight(self) -> list[str]:
        """Ids of prompts whose groups are in generation and would be too old even if they finished now."""
        return [prompt for prompt, version in self._running.items() if not self._freshness(version).fresh]

    def drop(self, prompt: Prompt, num_unfinished: int) -> None:
        """Stop waiting for the prompt's rollouts, of which so many were not finished, and ask the prompt again."""
        self.num_stopped_completions += num_unfinished
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
        """Between 1 and `wanted` groups, fresh enough to train on, in the order of `take_order`.

        Waits for `put` or `fail`, and then for at most `MOMENT_S` for groups that come `soon()`. Raises Late when
        nothing is enough for `timeout_s`.
        """

        def count(num_soon: int = 0) -> int:
            return chunk(
                [ReadyGroup(len(each.group.rollouts), each.num_tokens) for each in self._takeable()],
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
        taken = [finished.group for finished in self._takeable()[:num_groups]]
        for group in taken:
            del self._waiting[group.prompt.id]
        self.num_taken += num_groups
        self.wake()
        return taken

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
            self._trained.add(group.rollouts)

    def next_version(self, version: int) -> None:
        """The step is trained; the next one, of this version, begins."""
        self.version, self.num_taken, self.num_updates = version, 0, 0
        self.wake()

    def position(self) -> PromptPosition:
        return self._prompts.position()

    @property
    def takeable(self) -> tuple[int, int]:
        """Groups that the trainer may take: how many, and their tokens of prompts and completions."""
        takeable = self._takeable()
        return len(takeable), sum(finished.num_tokens for finished in takeable)

    @property
    def held_back(self) -> tuple[int, int]:
        """Finished groups that wait until older ones are: how many, and their tokens of prompts and completions."""
        num_groups, num_tokens = self.takeable
        waiting = self._waiting.values()
        return len(waiting) - num_groups, sum(finished.num_tokens for finished in waiting) - num_tokens

    def _takeable(self) -> list[_Finished]:
        waiting = list(self._waiting.values())
        order = take_order(
            self._bound,
            version=self.version,
            taken=self.num_taken,
            finished=[finished.oldest_version for finished in waiting],
            running=list(self._running.values()),
        )
        return [waiting[place] for place in order]

    def _freshness(self, version: int) -> Freshness:
        return freshness(self._bound, version=self.version, oldest_version=version)

    def _drop_stale(self) -> None:
        versions = {finished.oldest_version for finished in self._waiting.values()}
        stale = {version: verdict for version in versions if not (verdict := self._freshness(version)).fresh}
        for prompt, finished in list(self._waiting.items()) if stale else ():
            if verdict := stale.get(finished.oldest_version):
                del self._waiting[prompt]
                self._drop_rollouts(finished.group.prompt, finished.group.rollouts, verdict)

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
                'it, set orchestrator.on_stale = "wait", or lower orchestrator.sampling.max_tokens.'
            )
            self._record.event(PromptDroppedTwice(prompt.id, sentence=sentence))
        self.wake()

    def wake(self) -> None:
        """Have every waiting `take` and `changed` look again."""
        self._changed.notify_all()
        self.on_change()
