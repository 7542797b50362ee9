"""The Protocols of `ductile.roles` over a mailbox: what the loop calls here happens in the slots.

The trainer is in `ductile.wire.trainer`, the generators are in `ductile.wire.fleet`.

A fan-out asks every slot of the role and waits for one outcome each. If any is bad the call raises the worst of them:
a lost slot before a refusal before lateness, as the later ones usually follow from it; they are in its notes.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from ductile.records import Manifest, Sample
from ductile.roles import Late, Refused, SlotLost
from ductile.wire.mailbox import Mailbox, Outcome
from ductile.wire.messages import (
    Command,
    Done,
    Hold,
    Receive,
    Reply,
    RoleName,
    Score,
    Scores,
)

AFTER_FAILURE_S = 2.0
"""Once one slot failed, the others of a collective cannot succeed; they get this long to say why."""

R = TypeVar("R", bound=Reply)


class RemoteScorer:
    """Follows `ductile.roles.Scorer`. Each score slot holds a whole model; samples are split by their tokens."""

    def __init__(self, mailbox: Mailbox, slots: Sequence[int], timeout_s: float) -> None:
        self._mailbox, self._slots, self._timeout_s = mailbox, tuple(slots), timeout_s

    async def score(self, samples: Sequence[Sample], model: Literal["policy", "reference"]) -> list[tuple[float, ...]]:
        shares = _split(samples, len(self._slots))
        commands = {
            slot: Score(tuple(samples[index] for index in share), model)
            for slot, share in zip(self._slots, shares, strict=True)
            if share
        }
        replies = await ask_each(self._mailbox, commands, self._timeout_s, Scores)
        scores: dict[int, tuple[float, ...]] = {}
        for slot, share in zip(self._slots, shares, strict=True):
            if share:
                scores.update(zip(share, replies[slot].logprobs, strict=True))
        return [scores[index] for index in range(len(samples))]

    async def receive(self, manifest: Manifest) -> None:
        await receive(self._mailbox, self._slots, "score", manifest, self._timeout_s)


async def hold(
    mailbox: Mailbox,
    role: RoleName,
    settings: Mapping[str, object],
    slots: Sequence[int],
    timeout_s: float,
    rendezvous: str = "",
) -> None:
    """Give the slots their role. With `rendezvous` they hold it together, in this order; else each by itself."""
    commands = {slot: Hold(role, dict(settings), tuple(slots) if rendezvous else (slot,), rendezvous) for slot in slots}
    await ask_each(mailbox, commands, timeout_s, Done)


async def receive(
    mailbox: Mailbox, slots: Sequence[int], role: Literal["generate", "score"], manifest: Manifest, timeout_s: float
) -> None:
    """Have every slot of the role make the version live."""
    await ask_each(mailbox, dict.fromkeys(slots, Receive(role, manifest)), timeout_s, Done)


async def ask_each(
    mailbox: Mailbox, commands: Mapping[int, Command], timeout_s: float, expected: type[R]
) -> dict[int, R]:
    """All slots' answers, which are of the class `expected`. Raises SlotLost, Refused or Late: the worst outcome."""
    outcomes = await mailbox.ask_all(commands, timeout_s, AFTER_FAILURE_S)
    _raise_worst(outcomes)
    replies: dict[int, R] = {}
    for slot, outcome in outcomes.items():
        if not isinstance(outcome, expected):
            command = type(commands[slot]).__name__
            raise Refused(f"{mailbox.describe(slot)} answered {command} with {type(outcome).__name__}")
        replies[slot] = outcome
    return replies


def _raise_worst(outcomes: Mapping[int, Outcome]) -> None:
    for kind in (SlotLost, Refused, Late):
        for worst in outcomes.values():
            if isinstance(worst, kind):
                for other in outcomes.values():
                    if isinstance(other, Exception) and other is not worst:
                        worst.add_note(str(other))
                raise worst


def _split(samples: Sequence[Sample], num_parts: int) -> list[list[int]]:
    """Indices of `samples` in parts of about equally many tokens: the longest first, each to the shortest part."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    num_tokens = [0] * num_parts
    for index in sorted(range(len(samples)), key=lambda index: -len(samples[index])):
        part = num_tokens.index(min(num_tokens))
        parts[part].append(index)
        num_tokens[part] += len(samples[index])
    return parts
