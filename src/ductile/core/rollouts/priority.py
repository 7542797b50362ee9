"""Which request goes first when there is not room for all: several turns, one number.

A rollout of several turns comes back with every turn, and waits again. The one that has more finished turns goes first:
it is nearer to its end, its group waits for it, and its context is the likeliest to be cached still. Among equals the
one with more siblings already finished goes first: the group is nearer to being whole. Among those the generator takes
the one that came first.
"""


def priority(num_turns: int, siblings_finished: int, group_size: int) -> int:
    """The `priority` of a rollout's next `GenerateRequest`: higher runs first.

    num_turns: finished turns of the rollout.
    siblings_finished: members of its group that have ended, at most `group_size`.
    """
    return num_turns * (group_size + 1) + min(siblings_finished, group_size)
