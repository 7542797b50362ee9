"""What the orchestrator and a grader process say to each other: one JSON object a line, numbered on both sides.

A worker serves one request at a time, and its reply has the request's number. Whatever else comes through the pipe
(a line that user code wrote there, a reply to no request) is no message, and its writer is not trusted any more.
"""

from typing import Any

import msgspec

from ductile.records import Completion, RewardFailure
from ductile.surrogates import mended

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_ERROR_CHARS = 2000
"""Characters that are kept of what a reward's exception says: it may quote the whole completion."""


class MakeTasks(msgspec.Struct, tag=True, frozen=True):
    """The first request."""

    number: int
    tasks: dict[str, Any]
    """Dumped task configs (`ductile.config.schema.orchestrator.TaskConfig`), by the name that calls use."""
    timeout_s: float
    """Deadline of each later call, in seconds; it also bounds the CPU time that the call may use."""


class AskReward(msgspec.Struct, tag=True, frozen=True):
    number: int
    task: str
    example: int
    completion: Completion


class AskReply(msgspec.Struct, tag=True, frozen=True):
    number: int
    task: str
    example: int
    messages: list[dict[str, str]]


GraderRequest = MakeTasks | AskReward | AskReply


class TasksMade(msgspec.Struct, tag=True, frozen=True):
    """The tasks are made."""

    number: int
    notes: list[str]
    """Sentences about what rewards are not kept from, for want of permission."""
    want_token_ids: list[str]
    """Names of the tasks whose rewards ask for the completion's token ids."""


class Scored(msgspec.Struct, tag=True, frozen=True):
    number: int
    reward: float
    metrics: dict[str, float | None]
    """What the reward reports besides, by name. None: it was no finite number, which JSON has no word for."""


class Replied(msgspec.Struct, tag=True, frozen=True):
    number: int
    messages: list[dict[str, str]] | None


class GradingFailed(msgspec.Struct, tag=True, frozen=True):
    number: int
    error: str
    """Rest of a sentence that begins with "the reward of ..."."""
    failure: RewardFailure
    traceback: str = ""


GraderReply = TasksMade | Scored | Replied | GradingFailed

encode = msgspec.json.Encoder().encode
decode_request = msgspec.json.Decoder(GraderRequest).decode
decode_reply = msgspec.json.Decoder(GraderReply).decode


def sayable(text: str, max_chars: int = MAX_ERROR_CHARS) -> str:
    """The text as it can travel, with a long middle left out."""
    if len(text) > max_chars:
        text = f"{text[: max_chars - 300]} [...] {text[-290:]}"
    return mended(text)
