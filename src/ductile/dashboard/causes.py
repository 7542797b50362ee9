"""Why a slot was idle, in words for a reader who has not seen the code."""

from ductile.core.scheduling.facts.ledger import Activity, IdleCause

CAUSES: dict[IdleCause, str] = {
    "start_up": "it had not begun yet",
    "tail": "a generator without completions to write, while others wrote the last ones of the step",
    "queue_full": "a generator without completions to write: the trainer had to catch up first",
    "queue_empty": "a generator or scorer that was sent nothing",
    "waiting_for_batch": "a trainer without finished completions",
    "held": "a trainer with finished completions that the policy made wait",
    "no_role": "it had no role",
    "lost": "its process was gone",
    "other": "not said",
}


def said(activity: Activity, cause: IdleCause | None) -> str:
    """ "train", "idle (queue full)"."""
    return f"{activity} ({named(cause)})" if cause else activity


def named(cause: str) -> str:
    """The name of a cause as people read it: "queue full"."""
    return cause.replace("_", " ")
