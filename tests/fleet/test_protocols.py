"""The loop's Protocols over the memory transport: who is asked what, and what comes of faults."""

import asyncio
import math

import pytest

from ductile.columns import Floats
from ductile.core.instances.instances import Instance, instance_on
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fleet.requests.instance_port import RoleSlots
from ductile.fleet.requests.scorer import RemoteScorer
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.workers import (
    Command,
    Done,
    OptimStep,
    Publish,
    Published,
    Receive,
    Reply,
    Score,
    Scores,
    Stepped,
)
from ductile.records import Manifest, Sample, StepReport
from ductile.roles import Late, Refused, SlotLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Mailbox
from tests.transport.memory_transport import MemoryTransport


def scorers_on(carrier: MemoryTransport) -> RemoteScorer:
    return RemoteScorer(RoleSlots(Mailbox(carrier), "score", 1), (scorer(2), scorer(7)), Deadlines.same(1))


def scorer(slot: int) -> Instance:
    return instance_on("score", (slot,))


MANIFEST = Manifest(3, "shared_memory", "/proc/1/fd/3", 0, 0, ())
REPORT = StepReport(1, 0.5, 1.0, 1e-3, 4)


def sample(num_tokens: int) -> Sample:
    return Sample(tuple(range(num_tokens)), (False,) + (True,) * (num_tokens - 1))


def respond(slot: int, command: Command) -> Reply:
    match command:
        case OptimStep():
            return Stepped(REPORT)
        case Publish():
            return Published(MANIFEST if slot == 4 else None)
        case Score(samples):
            return Scores(tuple(Floats(slot + token / 128 for token in sample.token_ids) for sample in samples))
        case _:
            return Done()


@pytest.fixture
def carrier():
    return MemoryTransport({slot: respond for slot in (2, 4, 7)})


def test_only_the_first_rank_has_a_manifest(carrier: MemoryTransport):
    async def story():
        with pytest.raises(Refused, match="slot 2 published version 3 without a manifest"):
            await RemoteTrainer(Mailbox(carrier), ParallelLayout.of((2, 4)), Deadlines.same(1)).publish(3)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("faults", "error", "note"),
    [
        ({2: "error", 4: "death"}, SlotLost, "OptimStep failed, as asked"),
        ({2: "drop", 4: "error"}, Refused, "slot 2 had not replied to OptimStep when another slot failed"),
        ({2: "drop", 4: "drop"}, Late, "did not reply to OptimStep within 0.05 s"),
    ],
)
def test_the_cause_is_raised_and_what_followed_is_noted(
    carrier: MemoryTransport, faults: dict, error: type, note: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ductile.transport.fanout.AFTER_FAILURE_S", 0.02)

    async def story():
        mailbox = Mailbox(carrier)
        carrier.on_death.add(mailbox.lose)
        for slot, kind in faults.items():
            carrier.fail(slot, kind, on=OptimStep)
        with pytest.raises(error) as raised:
            await RemoteTrainer(mailbox, ParallelLayout.of((2, 4, 7)), Deadlines.same(0.05)).optim_step(1.0)
        assert any(note in text for text in [*raised.value.__notes__, str(raised.value)])

    asyncio.run(story())


def test_a_reply_of_the_wrong_class_is_refused():
    async def story():
        carrier = MemoryTransport({0: lambda slot, command: Done()})
        with pytest.raises(Refused, match="slot 0 replied to OptimStep with Done"):
            await RemoteTrainer(Mailbox(carrier), ParallelLayout.of((0,)), Deadlines.same(1)).optim_step(1.0)

    asyncio.run(story())


def test_samples_are_scored_by_tokens_and_come_back_in_order(carrier: MemoryTransport):
    async def story():
        lengths = [5, 100, 7, 90, 8, 1, 10, 3]
        samples = [sample(n) for n in lengths]
        scores = await RemoteScorer(
            RoleSlots(Mailbox(carrier), "score", 1), (scorer(2), scorer(7)), Deadlines.same(1)
        ).score(samples, "reference")
        assert [len(score) for score in scores] == lengths
        assert all(
            math.isclose(score[-1] % 1, (n - 1) / 128, abs_tol=1e-9) for score, n in zip(scores, lengths, strict=True)
        )
        asked = [command for _, command in carrier.sent]
        assert all(isinstance(command, Score) and command.model == "reference" for command in asked)
        assert sorted(sum(len(s) for s in command.samples) for command in asked) == [112, 112]

    asyncio.run(story())


@pytest.mark.parametrize("num_samples", [0, 1])
def test_slots_without_samples_are_not_asked(carrier: MemoryTransport, num_samples: int):
    async def story():
        samples = [sample(4)] * num_samples
        assert len(await scorers_on(carrier).score(samples, "policy")) == num_samples
        assert len(carrier.sent) == num_samples

    asyncio.run(story())


def test_every_scorer_receives_a_version(carrier: MemoryTransport):
    async def story():
        await scorers_on(carrier).receive(MANIFEST)
        assert carrier.sent == [(2, Receive("score", MANIFEST)), (7, Receive("score", MANIFEST))]

    asyncio.run(story())
