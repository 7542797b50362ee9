"""How many finished groups the trainer takes at once.

It need not wait for a whole batch: gradients accumulate. But a chunk costs a round of messages and lets ranks wait for
each other, so it should be worth it. The trainer takes what is there, up to `MOST` full micro-batches a rank, as soon
as there is one full micro-batch for every rank, or a quarter of the optimizer step's groups, or all that the step still
wants. A quarter waits for groups that come in a moment: completions that were generated together are scored one after
the other, and would make a chunk each.
"""

from collections.abc import Sequence

MOST = 4
"""Most full micro-batches a rank in one chunk: enough to balance them well, few enough to overlap scoring with
training."""


def chunk(
    ready_tokens: Sequence[int], *, wanted: int, groups_per_update: int, num_ranks: int, seq_len: int, soon: int = 0
) -> int:
    """How many of the waiting groups to take now; 0 means wait for more.

    ready_tokens: tokens of each group that waits, in the order in which they would be taken.
    wanted: groups that the current optimizer step still lacks, at least 1.
    soon: further groups that will be there in a moment.
    """
    ready_tokens = ready_tokens[:wanted]
    full = num_ranks * seq_len
    worth_it = sum(ready_tokens) >= full or (not soon and 4 * len(ready_tokens) >= groups_per_update)
    if not ready_tokens or not (worth_it or len(ready_tokens) == wanted):
        return 0
    total = 0
    for count, tokens in enumerate(ready_tokens):
        if count and total + tokens > MOST * full:
            return count
        total += tokens
    return len(ready_tokens)


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
