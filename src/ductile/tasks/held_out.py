"""Held-out rows of a file that are trained on, too: a policy may know their solutions by heart."""

import unicodedata
from collections.abc import Iterable

from ductile.core.instances.placement import many
from ductile.tasks.jsonl import JsonlDataset
from ductile.tasks.task import messages_of

MOST_NAMED = 3


def repeated(train: JsonlDataset, examples: Iterable[int], task: JsonlDataset, held_out: Iterable[int]) -> str:
    """A sentence for the held-out rows whose prompt is also one of the rows that are trained on; "" without any.

    Prompts are the same where their messages are, but for spaces and for how Unicode spells a character.

    examples: those of `train` that are trained on. task: the one of the held-out rows.
    """
    trained = {_key(train, example): example for example in reversed(list(examples))}
    asked = list(held_out)
    twins = [(example, trained[key]) for example in asked if (key := _key(task, example)) in trained]
    if not twins:
        return ""
    places = [f"{task.source(one)} is {train.source(other)}" for one, other in twins[:MOST_NAMED]]
    more = f", and {len(twins) - MOST_NAMED} more" if len(twins) > MOST_NAMED else ""
    verb = "is" if len(twins) == 1 else "are"
    count = f"{len(twins)} of the {many(len(asked), 'held-out prompt')} {verb} trained on, too"
    return f"{count}: {', '.join(places)}{more}. What they measure is also what was learned by heart"


def _key(task: JsonlDataset, example: int) -> str:
    return repr([{name: _plain(value) for name, value in message.items()} for message in messages_of(task, example)])


def _plain(value: object) -> object:
    return " ".join(unicodedata.normalize("NFKC", value).split()) if isinstance(value, str) else value
