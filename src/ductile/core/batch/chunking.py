"""How many finished groups the trainer takes at once.

It need not wait for a whole batch: gradients accumulate. But a chunk costs a round of messages and lets ranks wait for
each other, so it should be worth it. Micro-batches go to the trainer in messages, of one for every rank, or of as many
as fill a pipeline's stages (`ductile.core.layout.geometry.pipeline_schedule`). The trainer takes what is there, up to
`MOST` full micro-batches a rank or two messages, as soon as there is

- one message of full micro-batches,
- or a quarter of the optimizer step's groups, as long as they have a sample for each micro-batch of a message. A
  quarter waits for groups that come in a moment: completions that were generated together are scored one after the
  other, and would make a chunk each,
- or all that the step still wants.
"""

from collections.abc import Sequence
from typing import NamedTuple

MOST = 4
"""Most full micro-batches a rank in one chunk, where a message has one or two: enough to balance them well, few enough
to overlap scoring with training."""


class ReadyGroup(NamedTuple):
    """A finished group."""

    num_samples: int
    num_tokens: int


def chunk(
    ready: Sequence[ReadyGroup],
    *,
    wanted: int,
    groups_per_update: int,
    num_ranks: int,
    per_rank: int,
    seq_len: int,
    soon: int = 0,
) -> int:
    """How many of the waiting groups to take now; 0 means wait for more.

    ready: the groups that wait, in the order in which they would be taken.
    wanted: groups that the current optimizer step still lacks, at least 1.
    per_rank: micro-batches of a rank in one message.
    soon: further groups that will be there in a moment.
    """
    ready = ready[:wanted]
    in_message = num_ranks * per_rank
    num_samples, num_tokens = sum(group.num_samples for group in ready), sum(group.num_tokens for group in ready)
    quarter = 4 * len(ready) >= groups_per_update and num_samples >= in_message
    worth_it = num_tokens >= in_message * seq_len or (quarter and not soon)
    if not ready or not (worth_it or len(ready) == wanted):
        return 0
    most = max(MOST, 2 * per_rank) * num_ranks * seq_len
    total = 0
    for number, group in enumerate(ready):
        if number and total + group.num_tokens > most:
            return number
        total += group.num_tokens
    return len(ready)


def shares(num_groups: int, num_updates: int) -> list[int]:
    """Groups for each optimizer step of a batch; they differ by at most one, and none is empty.

    Raises ValueError when there are more optimizer steps than groups.
    """
    if num_updates > num_groups:
        raise ValueError(
            f"orchestrator.n_minibatches is {num_updates}, but a batch has only {num_groups} groups "
            f"(batch_size / rollouts_per_example)"
        )
    small, larger = divmod(num_groups, num_updates)
    return [small + 1] * larger + [small] * (num_updates - larger)
