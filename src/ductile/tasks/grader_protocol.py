"""What the orchestrator and a grader process say to each other: one JSON object a line, numbered on both sides.

A worker answers one request at a time, with the request's number. Whatever else comes through the pipe (a line that
user code wrote there, an answer that nobody waits for) is no message, and its writer is not trusted any more.
"""

from typing import Any

import msgspec

from ductile.half_characters import mended
from ductile.records import Completion, RewardFailure

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_ERROR_CHARS = 2000
"""Of what a reward's exception says: it may quote the whole answer."""


class MakeTasks(msgspec.Struct, tag=True, frozen=True):
    """The first request."""

    number: int
    tasks: dict[str, Any]
    """By the name that calls use, each a dumped task config (`ductile.config.orchestrator.TaskConfig`)."""
    timeout_s: float
    """Of each later call; no process may compute for longer than that allows."""


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


Request = MakeTasks | AskReward | AskReply


class TasksMade(msgspec.Struct, tag=True, frozen=True):
    """The tasks are made."""

    number: int
    notes: list[str]
    """What a reward is not kept from, for want of permission; each a sentence."""
    want_token_ids: list[str]
    """Tasks whose rewards ask for the tokens."""


class Scored(msgspec.Struct, tag=True, frozen=True):
    number: int
    reward: float
    metrics: dict[str, float | None]
    """None: it was no finite number, which JSON has no word for."""


class Replied(msgspec.Struct, tag=True, frozen=True):
    number: int
    messages: list[dict[str, str]] | None


class GradingFailed(msgspec.Struct, tag=True, frozen=True):
    number: int
    error: str
    """Goes on after "the reward of ..."."""
    failure: RewardFailure
    traceback: str = ""


Answer = TasksMade | Scored | Replied | GradingFailed

encode = msgspec.json.Encoder().encode
decode_request = msgspec.json.Decoder(Request).decode
decode_answer = msgspec.json.Decoder(Answer).decode


def sayable(text: str, max_chars: int = MAX_ERROR_CHARS) -> str:
    """The text as it can travel, with a long middle left out."""
    if len(text) > max_chars:
        text = f"{text[: max_chars - 300]} [...] {text[-290:]}"
    return mended(text)
