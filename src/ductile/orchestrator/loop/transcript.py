"""A rollout as a person reads it."""

from itertools import groupby

from ductile.records import Rollout
from ductile.tasks.conversation import ChatTokenizer


def transcript(tokenizer: ChatTokenizer, rollout: Rollout) -> str:
    """What was said in turn by the policy and its environment, each from a line of its own."""
    turns = groupby(zip(rollout.token_ids, rollout.mask, strict=True), key=lambda token: token[1])
    said = [tokenizer.decode([token_id for token_id, _ in turn]) for _, turn in turns]
    return "\n".join([*(words.strip("\n") for words in said[:-1]), *said[-1:]])
