"""A policy's decisions as lines of `decisions.jsonl`: all that it was asked with, and what it decided.

    {"version": 2, "policy": {"name": "model", ...}, "number": 1, "state": {"now_s": 0.2, ...}, "decision": {}}
    {"number": 2, "state": {"now_s": 9.5, "batch": {"ready": 8}}, "decision": {"orders": [...], ...}}

1. The first line of each start of a run names the policy and has the whole state; its lines are numbered. Every further
   one has of the state what differs from the line before: of a record its changed fields; of a list of records those
   that changed, by their places; of a list of numbers how many are dropped at its start and which are added at its end.
2. Of unfinished rollouts it has the places of those that are `gone`, each `new` one with its place, and the tokens by
   which the others have `grown`: for each generator [how many rollouts, tokens of each, how many, tokens, ...].
3. Of a decision it has what is not empty; instead of one it has a sentence, `refused` where the policy failed or `late`
   where it did not decide in time.

States come back bit for bit: JSON has the shortest text of a number that is read back as the same one. It has no
infinity, so null stands for it, but for the rules of the trainer's layout, where it is None.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, repeat
from typing import Any, cast

import msgspec

from ductile.core.scheduling.facts.cluster_state import ClusterState, Unfinished
from ductile.core.scheduling.facts.profile import FORMAT
from ductile.core.scheduling.orders import Decision
from ductile.observe import Recorder

Plain = dict[str, Any]
"""A record as JSON has it; its lists are tuples where `StateWriter` has them, and lists where they are read."""
GENERATED = Unfinished._fields.index("generated")
NULLABLE = frozenset({"rules"})
"""Fields in which null stands for None: what is not known of a model, and no number."""
SHORT = 8
"""A list of numbers with fewer is written whole."""


class DecisionJournal:
    """Writes the decisions of one start of a run."""

    def __init__(self, record: Recorder, policy: Mapping[str, Any]) -> None:
        """policy: the arguments of `ductile.config.checks.named_policy.named_policy` that make the policy anew."""
        self._record = record
        self._first: Plain = {"version": FORMAT, "policy": policy}
        self._states = StateWriter()
        self._number = 0

    def decided(self, state: ClusterState, decision: Decision) -> None:
        self._append(state, decision=decision_row(decision))

    def refused(self, state: ClusterState, why: str) -> None:
        """The policy failed, or ordered what cannot be."""
        self._append(state, refused=why)

    def late(self, state: ClusterState, why: str) -> None:
        """The policy did not decide in time."""
        self._append(state, late=why)

    def _append(self, state: ClusterState, **outcome: Any) -> None:
        self._number += 1
        row = {**self._first, "number": self._number, "state": self._states.difference(state), **outcome}
        self._record.decision(row)
        self._first = {}


def decision_row(decision: Decision) -> Plain:
    """The fields that are not empty."""
    return {name: value for name, value in asdict(decision).items() if value}


class StateWriter:
    """Turns states, one after the other, into what differs from the one before."""

    def __init__(self) -> None:
        self._plain: Plain = {}
        self._unfinished: tuple[Unfinished, ...] = ()

    def difference(self, state: ClusterState) -> Plain:
        plain = cast(Plain, msgspec.to_builtins(replace(state, unfinished=()), enc_hook=float))
        del plain["unfinished"]
        found = _difference(self._plain, plain)
        if rollouts := _rollouts_difference(self._unfinished, state.unfinished):
            found["unfinished"] = rollouts
        self._plain, self._unfinished = plain, state.unfinished
        return found


class StateReader:
    """Turns what `StateWriter` made back into the states."""

    def __init__(self) -> None:
        self._plain: Plain = {}
        self._unfinished: list[Unfinished] = []

    def state(self, difference: Mapping[str, Any]) -> ClusterState:
        """Raises KeyError, IndexError, TypeError or ValueError for what no `StateWriter` wrote."""
        own = cast(Plain, _with_infinity(difference))
        self._unfinished = _rollouts_patched(self._unfinished, own.pop("unfinished", {}))
        self._plain = _patched(self._plain, own)
        if "dp_replicate" in (trainer := self._plain["trainer"]):  # format 2, whose trainers were data-parallel
            trainer["rules"] = {"asked": {"dp_replicate": trainer["dp_replicate"]}}
        return replace(msgspec.convert(self._plain, ClusterState), unfinished=tuple(self._unfinished))


def _difference(before: Any, now: Any) -> Any:
    """What makes `now` of `before`, for `_patched`; the two are not equal."""
    if isinstance(before, dict):
        was = cast(Plain, before)
        return {
            name: _difference(was[name], value) if name in was else value
            for name, value in cast(Plain, now).items()
            if name not in was or was[name] != value
        }
    if isinstance(before, tuple):
        return _rows_difference(cast(tuple[Any, ...], before), now)
    return now


def _rows_difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> Any:
    if len(before) == len(now) and isinstance(now[0], dict):
        pairs = enumerate(zip(before, now, strict=True))
        return {str(place): _difference(was, value) for place, (was, value) in pairs if was != value}
    if now and len(before) >= SHORT:
        for dropped, value in enumerate(before):
            kept = len(before) - dropped
            if value == now[0] and before[dropped:] == now[:kept]:
                return {"drop": dropped, "add": now[kept:]}
    return now


def _patched(before: Any, difference: Any) -> Any:
    if isinstance(before, dict):
        was = cast(Plain, before)
        changed = cast(Plain, difference).items()
        return was | {name: _patched(was[name], value) if name in was else value for name, value in changed}
    if isinstance(before, list) and isinstance(difference, dict):
        rows, changes = cast(list[Any], before), cast(Plain, difference)
        if "add" in changes:
            return [*rows[changes["drop"] :], *changes["add"]]
        return [_patched(row, changes.get(str(place), {})) for place, row in enumerate(rows)]
    return difference


def _rollouts_difference(before: Sequence[Unfinished], now: Sequence[Unfinished]) -> Plain:
    known = {rollout.id: place for place, rollout in enumerate(before)}
    kept, new, last = list[int](), list[tuple[int, Unfinished]](), -1
    grown: dict[str, list[int]] = {}
    for place, rollout in enumerate(now):
        at = known.get(rollout.id, -1)
        was = before[at] if at > last else rollout
        # Those that stay are in the order that they had. One that is not, or has changed besides its tokens, is new.
        if at <= last or was[:GENERATED] != rollout[:GENERATED] or was[GENERATED + 1 :] != rollout[GENERATED + 1 :]:
            new.append((place, rollout))
            continue
        last = at
        kept.append(at)
        tokens, runs = rollout.generated - was.generated, grown.setdefault(rollout.instance, [])
        if runs and runs[-1] == tokens:
            runs[-2] += 1
        else:
            runs += [1, tokens]
    grown = {instance: runs for instance, runs in grown.items() if any(runs[1::2])}
    found = {"gone": sorted({*range(len(before))}.difference(kept)), "new": new, "grown": grown}
    return {name: value for name, value in found.items() if value}


def _rollouts_patched(before: Sequence[Unfinished], difference: Mapping[str, Any]) -> list[Unfinished]:
    gone = frozenset[int](difference.get("gone", ()))
    grown = {instance: _each(runs) for instance, runs in difference.get("grown", {}).items()}
    now = [
        rollout._replace(generated=rollout.generated + next(grown[rollout.instance]))
        if rollout.instance in grown
        else rollout
        for place, rollout in enumerate(before)
        if place not in gone
    ]
    for place, fields in difference.get("new", ()):
        now.insert(place, Unfinished(*fields))
    return now


def _each(runs: Sequence[int]) -> Iterator[int]:
    return chain.from_iterable(repeat(tokens, count) for count, tokens in zip(runs[::2], runs[1::2], strict=True))


def _with_infinity(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return {name: item if name in NULLABLE else _with_infinity(item) for name, item in items}
    if isinstance(value, list):
        return [_with_infinity(item) for item in cast(list[Any], value)]
    return float("inf") if value is None else value
