"""One prompt, one completion: turn by turn with the task's environment, to a scored Rollout."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from ductile.columns import Floats, Mask, TokenIds, Versions
from ductile.core.rollouts.priority import priority as priority_of_turn
from ductile.records import (
    NO_FLOATS,
    NO_MASK,
    NO_TOKENS,
    NO_VERSIONS,
    Completion,
    GenerateRequest,
    Generation,
    Prompt,
    Rollout,
    Sampling,
    both_digests,
)
from ductile.roles import Generators, Task
from ductile.tasks.conversation import ChatTokenizer, next_turn
from ductile.tasks.grader import Graded, Graders
from ductile.tasks.left_out import LeftOut
from ductile.tasks.task import TaskError, messages_of, source_of, takes_turns, variables_of
from ductile.tasks.tokenizer import TokenizerError
from ductile.tasks.turn_text import TurnText

ABOVE_TURNS = 1_000_000
"""One step of a rollout's own priority outweighs any number of turns and siblings."""


@dataclass(slots=True)
class _Siblings:
    """Rollouts of one prompt that are played at the same time."""

    num_playing: int = 0
    num_finished: int = 0
    num_grading: int = 0
    """Rollouts that `num_playing` counts, and that are generated and wait for their reward."""
    opened: str | None = None
    """Text with which the prompt has begun the policy's turn; None as long as nobody asked."""

    def priority(self, num_turns: int) -> int:
        return priority_of_turn(num_turns, self.num_finished, self.num_playing + self.num_finished)


@dataclass(slots=True)
class Tokens:
    """Everything after the prompt, in the making. The columns stay equally long."""

    ids: TokenIds = NO_TOKENS
    mask: Mask = NO_MASK
    logprobs: Floats = NO_FLOATS
    versions: Versions = NO_VERSIONS
    digests: dict[int, str] = field(default_factory=dict[int, str])

    def sampled(self, generation: Generation) -> None:
        self._add(generation.token_ids, True, generation.logprobs, generation.versions)
        self.digests = both_digests(self.digests, generation.digests)

    def given(self, token_ids: TokenIds) -> None:
        """Add tokens of the environment: not sampled by the policy, so not trained on."""
        num = len(token_ids)
        self._add(token_ids, False, Floats.full(num, 0.0), Versions.full(num, -1))

    def _add(self, token_ids: TokenIds, sampled: bool, logprobs: Floats, versions: Versions) -> None:
        self.ids += token_ids
        self.mask += Mask.full(len(token_ids), sampled)
        self.logprobs += logprobs
        self.versions += versions


class Episodes:
    """Plays prompts. Task rewards and replies run in the graders; the tasks here only give the first prompt."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        tokenizer: ChatTokenizer,
        generators: Generators,
        graders: Graders,
        max_len_tokens: int,
    ) -> None:
        """tasks: by `Prompt.task`. max_len_tokens: of a prompt and everything after it."""
        self.tasks, self.tokenizer, self._generators, self._graders = tasks, tokenizer, generators, graders
        self._turn_text, self._max_len_tokens = TurnText(tokenizer), max_len_tokens
        self._groups: dict[str, _Siblings] = {}
        """Siblings by prompt id."""

    async def play(self, prompt: Prompt, sampling: Sampling, member: int = 0, priority: int = 0) -> Rollout:
        """Play one rollout. Each turn has at most `sampling.max_tokens` tokens; the whole at most `max_len_tokens`.

        Of two rollouts of the same `priority`, the one with more finished turns goes first, then the one with more
        finished siblings.

        Requests are named by prompt, member and turn, so that a generator which draws by name repeats itself when the
        run is repeated. Where a reward or a reply fails, the rollout has no reward, and an `error` that says why.
        """
        with self._among_siblings(prompt) as siblings:
            return await self._play(prompt, sampling, member, priority, siblings)

    def num_grading(self, prompt: str) -> int:
        """Rollouts of the prompt with this id that are generated and wait for their reward."""
        siblings = self._groups.get(prompt)
        return siblings.num_grading if siblings else 0

    async def _play(
        self, prompt: Prompt, sampling: Sampling, member: int, priority: int, siblings: _Siblings
    ) -> Rollout:
        task, tokens = self.tasks[prompt.task], Tokens()
        first = messages_of(task, prompt.example)
        messages, variables = list(first), variables_of(task, prompt.example)
        num_turns, verdict = 0, None
        while True:
            opened = siblings.opened
            if num_turns or opened is None:
                opened = self._turn_text.opened(messages, **variables)
            if not num_turns:
                siblings.opened = opened
            room = self._max_len_tokens - len(prompt.token_ids) - len(tokens.ids)
            generation = await self._generators.generate(
                GenerateRequest(
                    id=f"{prompt.id}/{member}/{num_turns}",
                    prompt=(before := prompt.token_ids + tokens.ids),
                    sampling=_of_turn(sampling, prompt, member, num_turns, room),
                    group=prompt.id,
                    priority=priority * ABOVE_TURNS + siblings.priority(num_turns),
                    num_turns=num_turns,
                )
            )
            tokens.sampled(generation)
            num_turns += 1
            finish = generation.finish_reason
            text = opened + self._turn_text.said(before, generation, sampling)
            if finish != "stop" or not takes_turns(task):
                break
            messages.append({"role": "assistant", "content": text})
            reply = await self._graders.reply(prompt.task, prompt.example, messages)
            if reply.error:
                verdict = Graded(error=reply.error, failure=reply.failure)
            if not reply.messages:
                break
            try:
                between = next_turn(self.tokenizer, first, generation.token_ids, reply.messages, **variables)
            except (LeftOut, TokenizerError) as error:
                raise TaskError(f"the reply to {source_of(task, prompt.example)} is lost: {error}") from None
            if len(between) >= room - len(generation.token_ids):
                finish = "length"  # no room for another word of the policy's
                break
            tokens.given(TokenIds(between))
            messages += reply.messages
        if verdict is None:
            num_tokens = tokens.mask.count(True)
            completion = Completion(text, num_tokens, finish, num_turns, generation.token_ids, opened)
            siblings.num_grading += 1
            try:
                verdict = await self._graders.reward(prompt.task, prompt.example, completion)
            finally:
                siblings.num_grading -= 1
        return Rollout(
            token_ids=tokens.ids,
            mask=tokens.mask,
            logprobs=tokens.logprobs,
            versions=tokens.versions,
            finish_reason=finish,
            reward=verdict.reward,
            metrics=verdict.metrics,
            num_turns=num_turns,
            error=verdict.error or "",
            failure=verdict.failure,
            digests=tokens.digests,
        )

    @contextmanager
    def _among_siblings(self, prompt: Prompt) -> Iterator[_Siblings]:
        siblings = self._groups.setdefault(prompt.id, _Siblings())
        siblings.num_playing += 1
        try:
            yield siblings
            siblings.num_finished += 1
        finally:
            siblings.num_playing -= 1
            if not siblings.num_playing:
                self._groups.pop(prompt.id)


def _of_turn(sampling: Sampling, prompt: Prompt, member: int, turn: int, room: int) -> Sampling:
    """The sampling of one turn. With a seed, every member and every turn draws its own numbers, and a resumed run the
    same ones again."""
    seed = sampling.seed
    if seed is not None:
        digest = blake2b(f"{seed}/{prompt.id}/{member}/{turn}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest) >> 1
    return replace(sampling, seed=seed, max_tokens=min(sampling.max_tokens, room))
