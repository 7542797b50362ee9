"""Rows of `samples.jsonl`: some rollouts of each step with their rewards, for people to read."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ductile.records import Prompt, Rollout, RolloutGroup
from ductile.tasks.conversation import ChatTokenizer
from ductile.tasks.turn_text import sampled_text


def sample_rows(groups: Sequence[RolloutGroup], tokenizer: ChatTokenizer, num: int) -> Iterator[dict[str, object]]:
    """Rows of at most `num` rollouts. `prompt` is the prompt as the policy has read it, and `completion` all that
    follows it, the environment's words too; both with their special tokens."""
    for prompt, rollout in choose(groups, num):
        yield {
            "prompt_id": prompt.id,
            "prompt": tokenizer.decode(prompt.token_ids, skip_special_tokens=False),
            "completion": sampled_text(tokenizer, prompt.token_ids, rollout.token_ids),
            "reward": rollout.reward,
            "metrics": rollout.metrics,
            "error": rollout.error,
            "finish_reason": rollout.finish_reason,
            "num_tokens": rollout.num_sampled,
            "num_turns": rollout.num_turns,
        }


def choose(groups: Sequence[RolloutGroup], num: int) -> list[tuple[Prompt, Rollout]]:
    """The first member of each group, then the second of each, and so on: as many prompts as can be, good or bad."""
    by_member = zip_longest(*([(group.prompt, rollout) for rollout in group.rollouts] for group in groups))
    return [each for members in by_member for each in members if each is not None][:num]
