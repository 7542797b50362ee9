"""Slots that join and leave the generators and scorers: whose weights they get, and what holds while they come."""

import asyncio
from contextlib import suppress

import pytest

from ductile.columns import Floats
from ductile.core.instances.instances import Instance, instance_on, slot_groups
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fleet.requests.instance_port import RoleSlots
from ductile.fleet.requests.scorer import RemoteScorer
from ductile.fleet.requests.worker_pool import MOST_LOST
from ductile.messages.workers import (
    AssignRole,
    EndOffer,
    Generate,
    OfferWeights,
    Ping,
    Publish,
    Receive,
    ReleaseRole,
    Score,
    Scores,
    Withdraw,
)
from ductile.records import Manifest, Sample
from ductile.roles import Failure, Late, Refused, SlotLost
from tests.core.scheduling.scenes import id_on
from tests.fleet.generate_slots import generator
from tests.fleet.test_migration import DEADLINES, TIMEOUT_S, TRAINER, Cluster, is_whole, steps, with_cluster
from tests.orchestrator.doubles import clock


def versions(cluster: Cluster) -> dict[int, int | None]:
    return {number: slot.version for number, slot in cluster.slots.slots.items() if slot.holds}


def test_a_joiner_gets_the_live_version_from_a_generator():
    async def story(cluster: Cluster):
        await cluster.publish(1)
        await cluster.trainer.optim_step(1.0)
        told: list[tuple[int, ...]] = []
        cluster.generators.on_change.add(lambda: told.append(cluster.generators.slots))
        cluster.carrier.sent.clear()
        assert await cluster.generators.admit(generator(3), {"max_num_seqs": 8})
        await asyncio.sleep(0.01)
        assert [(slot, type(command)) for slot, command in cluster.carrier.sent] == [
            (3, AssignRole),
            (0, OfferWeights),
            (3, Receive),
            (0, EndOffer),
        ]
        assert versions(cluster) == {0: 1, 1: 1, 2: 1, 3: 1}
        assert cluster.generators.capacity == 32
        assert told == [(0, 1, 2, 3)]

    with_cluster(story)


def test_joiners_of_the_same_moment_share_an_offer():
    async def story(cluster: Cluster):
        cluster.slots.reply_s = lambda slot, command: 0.1
        await asyncio.gather(*(cluster.generators.admit(generator(slot), {}) for slot in (3, 4, 5)))
        assert cluster.generators.slots == (0, 1, 3, 4, 5)
        await asyncio.sleep(1)
        assert (len(cluster.sent(OfferWeights)), len(cluster.sent(EndOffer))) == (1, 1)
        cluster.slots.reply_s = lambda slot, command: 0.0

    with_cluster(story, generating=(0, 1))


def test_with_no_generator_the_trainer_offers_what_its_weights_still_are():
    async def story(cluster: Cluster):
        await cluster.generators.dismiss(generator(0))
        assert cluster.generators.slots == ()
        cluster.carrier.sent.clear()
        assert await cluster.generators.admit(generator(3), {})
        await asyncio.sleep(0.01)
        assert [(slot, type(command)) for slot, command in cluster.carrier.sent] == [
            (3, AssignRole),
            (TRAINER, Publish),
            (3, Receive),
            (TRAINER, Withdraw),
        ]

    with_cluster(story, generating=(0,))


def test_with_nobody_who_has_the_version_the_next_one_is_the_joiners_first():
    async def story(cluster: Cluster):
        await cluster.generators.dismiss(generator(0))
        await cluster.trainer.optim_step(1.0)
        assert not await cluster.generators.admit(generator(3), {})
        assert cluster.generators.slots == ()
        asked = cluster.ask("a")
        await steps(5)
        assert cluster.generators.num_waiting == 1
        await cluster.publish(1)
        assert cluster.generators.slots == (3,)
        generation = await asked
        assert is_whole(generation, "a")
        assert set(generation.versions) == {1}

    with_cluster(story, generating=(0,))


def test_a_trainer_that_has_gone_on_before_it_could_offer_its_weights_offers_nothing():
    """After a step that learned nothing its weights are the live version still, until it publishes them as the next."""

    async def story(cluster: Cluster):
        await cluster.generators.dismiss(generator(0))
        await cluster.trainer.optim_step(1.0)
        async with cluster.trainer.boundary():
            publishing = asyncio.create_task(cluster.trainer.publish(1))
            joining = asyncio.create_task(cluster.generators.admit(generator(3), {}))
            await steps(1)
        assert not await joining, "it waits for version 1"
        await cluster.generators.receive(await publishing)
        assert cluster.generators.slots == (3,)
        assert versions(cluster)[3] == 1
        await cluster.trainer.withdraw(1)

    with_cluster(story, generating=(0,))


def test_with_adapters_the_version_that_a_joiner_waits_for_is_whole():
    """Nobody has the live one any more, and the next one is asked for before the joiner hears that."""

    async def story(cluster: Cluster):
        cluster.slots.adapted = True
        await cluster.publish(1)
        assert not cluster.sent(Publish)[-1][1].with_frozen, "all have the rest"
        await cluster.generators.dismiss(generator(0))
        await cluster.trainer.optim_step(1.0)
        async with cluster.trainer.boundary():
            publishing = asyncio.create_task(cluster.trainer.publish(2))
            joining = asyncio.create_task(cluster.generators.admit(generator(3), {}))
            await steps(1)
        assert not await joining, "it waits for version 2"
        await cluster.generators.receive(await publishing)
        assert cluster.generators.slots == (3,)
        assert cluster.killed == []
        await cluster.trainer.withdraw(2)

    with_cluster(story, generating=(0,))


def test_a_whole_version_that_could_not_be_published_is_whole_when_it_is_published():
    async def story(cluster: Cluster):
        cluster.trainer.want_whole()
        cluster.carrier.fail(TRAINER, "error", on=Publish)
        with pytest.raises(Refused):
            await cluster.trainer.publish(1)
        await cluster.publish(1)
        assert [command.with_frozen for _, command in cluster.sent(Publish)[-2:]] == [True, True]

    with_cluster(story)


def test_while_a_version_is_published_it_is_offered_from_there():
    async def story(cluster: Cluster):
        await cluster.generators.dismiss(generator(0))
        manifest = await cluster.trainer.publish(1)
        await cluster.generators.receive(manifest)
        await cluster.trainer.optim_step(1.0)
        assert await cluster.generators.admit(generator(3), {})
        await cluster.trainer.withdraw(1)
        assert len(cluster.sent(Publish)) == 2, "version 0, version 1"

    with_cluster(story, generating=(0,))


@pytest.mark.parametrize("kind", ["error", "death"])
@pytest.mark.parametrize("on", [OfferWeights, Receive])
def test_when_a_source_fails_the_next_one_offers_its_weights(kind: str, on: type):
    async def story(cluster: Cluster):
        def fail(slot, command):
            if isinstance(command, on) and slot == (0 if on is OfferWeights else 3) and not cluster.slots.dead:
                if kind == "death":
                    cluster.slots.kill(0, cluster.mailbox)
                    return 0.0
                cluster.carrier.fail(slot, "error", on=on)
            return 0.0

        if kind == "error":
            cluster.carrier.fail(0 if on is OfferWeights else 3, "error", on=on)
        else:
            cluster.slots.reply_s = fail
        assert await cluster.generators.admit(generator(3), {})
        assert [slot for slot, _ in cluster.sent(OfferWeights)] == [0, 1]
        assert versions(cluster)[3] == 0

    with_cluster(story)


def test_a_joiner_that_cannot_take_the_weights_is_sent_away():
    async def story(cluster: Cluster):
        cluster.carrier.fail(3, "error", on=Receive, times=9)
        with pytest.raises(Refused, match=r"slot 3 .*: Receive failed, as asked"):
            await cluster.generators.admit(generator(3), {})
        await asyncio.sleep(1)
        assert (3, ReleaseRole("generate")) in cluster.carrier.sent
        assert cluster.generators.slots == (0, 1, 2)
        assert await cluster.generators.admit(generator(4), {})

    with_cluster(story)


def test_a_joiner_that_dies_is_lost_and_nobody_else():
    async def story(cluster: Cluster):
        cluster.carrier.fail(3, "death", on=Receive)
        cluster.slots.dead.add(3)
        with pytest.raises(SlotLost, match="slot 3 died"):
            await cluster.generators.admit(generator(3), {})
        assert cluster.generators.slots == (0, 1, 2)

    with_cluster(story)


def test_a_joiner_that_hangs_at_its_first_weights_is_killed_at_once():
    """It would be as long again in giving the role up, and only then could it come back."""

    async def story(cluster: Cluster):
        cluster.carrier.fail(3, "drop", on=Receive)
        began_s = clock()
        with pytest.raises(Failure, match=r"slot 3 .* did not reply to Receive within 60 s"):
            await cluster.generators.admit(generator(3), {})
        assert clock() - began_s == pytest.approx(TIMEOUT_S, abs=1)
        assert cluster.killed == [3]
        assert cluster.generators.slots == (0, 1, 2)

    with_cluster(story)


def test_a_version_goes_live_after_a_joiner_and_the_source_of_its_weights_that_both_hang():
    async def story(cluster: Cluster):
        cluster.carrier.fail(0, "drop", on=OfferWeights)
        cluster.carrier.fail(3, "drop", on=Receive)
        joining = asyncio.create_task(cluster.generators.admit(generator(3), {}))
        await asyncio.sleep(1)
        await cluster.publish(1)
        assert {slot: versions(cluster)[slot] for slot in cluster.generators.slots} == {0: 1, 1: 1, 2: 1}
        assert cluster.killed == [3]
        with pytest.raises(Failure, match=r"slot 3 .* did not reply to Receive"):
            await joining

    with_cluster(story)


def test_an_admission_that_is_cancelled_leaves_no_role_and_no_loan():
    async def story(cluster: Cluster):
        for on in (AssignRole, OfferWeights, Receive):
            cluster.slots.reply_s = lambda slot, command, on=on: 1.0 if isinstance(command, on) else 0.0
            admitting = asyncio.create_task(cluster.generators.admit(generator(3), {}))
            await asyncio.sleep(0.5)
            admitting.cancel()
            await asyncio.wait([admitting])
            await asyncio.sleep(3)
            assert set(versions(cluster)) == {0, 1, 2}
        assert await cluster.generators.admit(generator(3), {})

    with_cluster(story)


def test_a_slot_cannot_join_twice():
    async def story(cluster: Cluster):
        with pytest.raises(ValueError, match="slot 0 has the role 'generate' already"):
            await cluster.generators.admit(generator(0), {})
        cluster.slots.reply_s = lambda slot, command: 0.1
        first = asyncio.create_task(cluster.generators.admit(generator(3), {}))
        await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="slot 3 has the role 'generate' already"):
            await cluster.generators.admit(generator(3), {})
        await first

    with_cluster(story)


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.25, 0.35, 0.45])
def test_nobody_joins_with_another_version_than_the_one_that_goes_live(delay_s: float):
    async def story(cluster: Cluster):
        cluster.slots.reply_s = lambda slot, command: 0.1
        admitting = asyncio.create_task(cluster.generators.admit(generator(3), {}))
        await asyncio.sleep(delay_s)
        await asyncio.gather(admitting, cluster.publish(1))
        assert versions(cluster) == {0: 1, 1: 1, 3: 1}
        await asyncio.sleep(1)
        cluster.slots.reply_s = lambda slot, command: 0.0

    with_cluster(story, generating=(0, 1))


@pytest.mark.parametrize("comes", [True, False])
def test_who_may_not_take_work_yet_has_the_role_and_gets_the_weights_that_are_live_then(comes: bool):
    async def story(cluster: Cluster):
        may = asyncio.Event()

        async def after() -> None:
            await may.wait()
            if not comes:
                raise Refused("it is not to come after all")

        admitting = asyncio.create_task(cluster.generators.admit(generator(3), {}, after))
        await steps(5)
        assert [type(command) for slot, command in cluster.carrier.sent if slot == 3] == [AssignRole]
        await cluster.publish(1)
        assert versions(cluster)[3] is None, "it holds nobody up, and has nothing to take"
        assert cluster.generators.slots == (0, 1, 2)
        may.set()
        if comes:
            assert await admitting
            assert versions(cluster) == {0: 1, 1: 1, 2: 1, 3: 1}
        else:
            with pytest.raises(Refused, match="not to come"):
                await admitting
            assert cluster.generators.slots == (0, 1, 2)
            assert set(versions(cluster)) == {0, 1, 2}, "it has given the role up"

    with_cluster(story)


def test_who_is_lost_before_it_may_take_work_is_not_waited_for():
    async def story(cluster: Cluster):
        async def never() -> None:
            await asyncio.Event().wait()

        admitting = asyncio.create_task(cluster.generators.admit(generator(3), {}, never))
        await steps(5)
        cluster.carrier.fail(3, "death", on=Ping)
        with suppress(Failure):
            await cluster.mailbox.ask(3, Ping(), 1.0)
        with pytest.raises(SlotLost, match="slot 3"):
            await asyncio.wait_for(admitting, 1.0)
        assert cluster.generators.slots == (0, 1, 2)

    with_cluster(story)


def test_a_slot_that_leaves_gets_nothing_new_and_goes_when_it_is_empty():
    async def story(cluster: Cluster):
        first = cluster.ask("a")
        await steps(2)
        leaving = asyncio.create_task(cluster.generators.dismiss(generator(0)))
        await asyncio.sleep(0)
        assert cluster.generators.slots == (1, 2)
        others = [cluster.ask(name) for name in "bcd"]
        await steps(2)
        assert id_on(0) not in {source for name, source in cluster.where().items() if name != "a"}
        assert not leaving.done()
        assert is_whole(await first, "a")
        await leaving
        assert set(versions(cluster)) == {1, 2}
        await asyncio.gather(*others)
        await cluster.generators.dismiss(generator(0))  # it has left already

    with_cluster(story)


def test_a_slot_that_never_becomes_empty_cannot_leave():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(1)
        with pytest.raises(
            Late, match=r"slot 0 still had 1 requests after 60 s \(cluster.patience_timeout_s\), and cannot leave"
        ):
            await cluster.generators.dismiss(generator(0))
        assert cluster.generators.slots == (1, 2)
        cluster.generators.resume(cluster.generators.on(0))
        assert cluster.generators.slots == (0, 1, 2)
        cluster.slots.length = lambda name: 0
        await asked

    with_cluster(story, length=lambda name: 10_000)


def test_a_held_slot_samples_from_the_live_version_too():
    async def story(cluster: Cluster):
        asked = cluster.ask("a")
        await steps(2)
        cluster.generators.drain(cluster.generators.on(0))
        await cluster.publish(1)
        assert versions(cluster) == {0: 1, 1: 1, 2: 1}
        await asked

    with_cluster(story)


def test_requests_wait_for_a_generator_and_not_for_ever():
    async def story(cluster: Cluster):
        await cluster.generators.dismiss(generator(0))
        assert cluster.generators.capacity == 0
        asked = cluster.ask("a")
        await asyncio.sleep(TIMEOUT_S / 2)
        await cluster.generators.admit(generator(1), {})
        assert is_whole(await asked, "a")
        await cluster.generators.dismiss(generator(1))
        with pytest.raises(Late, match=r"patience_timeout_s\) no slot had the role 'generate', for request b"):
            await cluster.ask("b")
        assert cluster.generators.num_waiting == 0

    with_cluster(story, generating=(0,))


def test_a_slot_that_dies_while_a_version_goes_live():
    async def story(cluster: Cluster):
        def kill(slot, command):
            if slot == 1 and isinstance(command, Receive) and not cluster.slots.dead:
                cluster.slots.kill(1, cluster.mailbox)
            return 0.0

        cluster.slots.reply_s = kill
        await cluster.publish(1)
        assert cluster.generators.slots == (0, 2)
        assert versions(cluster)[0] == versions(cluster)[2] == 1
        assert is_whole(await cluster.ask("a"), "a")

    with_cluster(story)


FAULTS = {"hangs": "drop", "refuses": "error"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_generator_that_does_not_take_a_version_is_left_behind(fault: str):
    async def story(cluster: Cluster):
        cluster.carrier.fail(1, FAULTS[fault], on=Receive)
        asked = {name: cluster.ask(name) for name in "abc"}
        await steps(2)
        await cluster.publish(1)
        assert cluster.generators.version == 1
        assert {number: versions(cluster)[number] for number in (0, 2)} == {0: 1, 2: 1}
        said = "did not reply to Receive within 60 s" if fault == "hangs" else "Receive failed, as asked"
        assert said in cluster.mailbox.lost[1]
        assert "it has been killed" in cluster.mailbox.lost[1]
        for name, task in asked.items():
            assert is_whole(await task, name)
        assert cluster.generators.slots == (0, 2)
        assert cluster.killed == [1]

    with_cluster(story)


def test_a_generator_that_hangs_before_it_has_taken_a_request_is_left_behind():
    """Also where it may take longer without a new token than a command may take."""

    async def story(cluster: Cluster):
        cluster.generators._slots.command_s = 5
        cluster.carrier.fail(0, "drop", on=Generate)
        assert is_whole(await cluster.ask("a"), "a")
        assert "did not reply to Generate within 5 s" in cluster.mailbox.lost[0]
        assert cluster.killed == [0]

    with_cluster(story)


def test_a_version_that_all_refuse_is_at_fault_itself():
    async def story(cluster: Cluster):
        for slot in (0, 1, 2):
            cluster.carrier.fail(slot, "error", on=Receive)
        with pytest.raises(Refused, match="slot 0: Receive failed, as asked"):
            await cluster.publish(1)
        assert cluster.killed == []
        assert cluster.generators.version == 0
        await cluster.publish(1)

    with_cluster(story)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_generator_is_not_killed_where_the_run_would_end_with_it(fault: str):
    async def story(cluster: Cluster):
        cluster.needed.add(1)
        cluster.carrier.fail(1, FAULTS[fault], on=Receive)
        with pytest.raises(Refused if fault == "refuses" else Late, match=r"slot 1.* Receive"):
            await cluster.publish(1)
        assert cluster.killed == []
        cluster.carrier.fail(1, "error", on=Receive)
        with pytest.raises(Refused, match="Receive failed, as asked"):
            await cluster.publish(1)
        assert cluster.killed == []

    with_cluster(story)


def test_a_generator_that_is_joining_the_trainer_is_killed_as_any_other_is():
    """It was told to take the role, and the run does not depend on it yet."""

    async def story(cluster: Cluster):
        cluster.mailbox._roles[1] = ("generate", "train")
        cluster.carrier.fail(1, "error", on=Receive)
        await cluster.publish(1)
        assert cluster.killed == [1]

    with_cluster(story)


def test_what_is_told_of_unfinished_and_finished_completions():
    async def story(cluster: Cluster):
        finished: list[str] = []
        cluster.generators.on_finished.add(lambda generation: finished.append(generation.id))
        first, second = cluster.ask("a", max_tokens=50), cluster.ask("b")
        await steps(3)
        (about_a, _) = cluster.generators.unfinished()
        told = (about_a.id, about_a.instance, about_a.prompt_tokens, about_a.generated, about_a.limit, about_a.group)
        assert told == ("a", id_on(0), 3, 3, 50, "a")
        await asyncio.gather(first, second)
        assert finished == ["a", "b"]
        lengths = cluster.generators.lengths()
        assert (lengths.ended, lengths.cut, lengths.prompt_mean) == ((20, 20), (), 3.0)

    with_cluster(story)


def scorer(slot: int) -> Instance:
    return instance_on("score", (slot,))


class Scoring:
    """Scorers beside the generators of a `Cluster`: slots that reply to `Score` with their number."""

    def __init__(self, cluster: Cluster, slots: tuple[int, ...], size: int = 1) -> None:
        """size: slots of each scorer."""
        self.cluster = cluster
        self.score_s = 0.0
        scorers = [instance_on("score", group) for group in slot_groups(slots, (), size)]
        self.scorer = RemoteScorer(
            RoleSlots(cluster.mailbox, "score", TIMEOUT_S, cluster.condemn, rendezvous="here:1"),
            scorers,
            DEADLINES,
            cluster.offers,
        )
        for slot in range(4, 8):
            cluster.slots.slots[slot].holds = slot in slots
            cluster.slots.slots[slot].version = 0 if slot in slots else None
            cluster.carrier._slots[slot] = self.respond

    async def respond(self, number, command):
        if isinstance(command, Score):
            await asyncio.sleep(self.score_s)
            return Scores(tuple(Floats.full(len(sample), number) for sample in command.samples))
        return await self.cluster.slots.respond(number, command)

    async def score(self, num_samples: int = 4) -> set[int]:
        """The slots that scored."""
        samples = [Sample((1, 2), (False, True))] * num_samples
        return {int(row[0]) for row in await self.scorer.score(samples, "policy")}


def test_scorers_join_and_leave():
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4,))
        assert await scoring.score() == {4}
        await scoring.scorer.receive(Manifest(0, "shared_memory", offer(cluster, 0), 0, 0, ()))
        assert await scoring.scorer.admit(scorer(5), {})
        assert [(slot, command.role) for slot, command in cluster.sent(OfferWeights)] == [(4, "score")]
        assert await scoring.score() == {4, 5}
        await scoring.scorer.dismiss(scorer(4))
        assert await scoring.score() == {5}
        assert (4, ReleaseRole("score")) in cluster.carrier.sent

    with_cluster(story)


def test_a_scorer_on_two_slots_is_asked_on_both_and_its_first_slot_replies():
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4, 5), size=2)
        await scoring.scorer.receive(Manifest(0, "shared_memory", offer(cluster, 0), 0, 0, ()))
        cluster.carrier.sent.clear()
        assert await scoring.score() == {4}
        joiner = instance_on("score", (6, 7), birth=1)
        assert await scoring.scorer.admit(joiner, {})
        await asyncio.sleep(1)
        told = [(slot, type(command)) for slot, command in cluster.carrier.sent]
        assert told == [
            (slot, kind)
            for kind, slots in [
                (Score, (4, 5)),
                (AssignRole, (6, 7)),
                (OfferWeights, (4, 5)),
                (Receive, (6, 7)),
                (EndOffer, (4, 5)),
            ]
            for slot in slots
        ]
        assign = {slot: command for slot, command in cluster.sent(AssignRole)}
        assert assign[6] == assign[7]
        assert (assign[6].layout, assign[6].rendezvous) == (ParallelLayout.of((6, 7), tp=2), "here:1")
        assert assign[6].instance == joiner.id
        assert await scoring.score() == {4, 6}
        await scoring.scorer.dismiss(joiner)
        assert [slot for slot, _ in cluster.sent(ReleaseRole)] == [6, 7]

    with_cluster(story)


@pytest.mark.parametrize("fault", ["death", *FAULTS])
@pytest.mark.parametrize("slot", [4, 5])
def test_with_one_of_its_slots_a_scorer_is_lost_and_others_score_what_it_had(slot: int, fault: str):
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4, 5, 6, 7), size=2)
        scoring.score_s = 10.0
        if fault != "death":
            cluster.carrier.fail(slot, FAULTS[fault], on=Score)
        under_way = asyncio.create_task(scoring.score())
        await asyncio.sleep(1)
        if fault == "death":
            cluster.slots.kill(slot, cluster.mailbox)
        assert await under_way == {6}
        assert sorted(len(command.samples) for _, command in cluster.sent(Score)) == [2] * 6
        assert scoring.scorer.slots == (6, 7)
        if fault == "death":
            other = 9 - slot
            assert (other, ReleaseRole("score")) in cluster.carrier.sent, "it may do something else"
        else:
            assert sorted(cluster.killed) == [4, 5], "both: the other one may wait for it"

    with_cluster(story)


def test_a_scorer_whose_dismissal_is_given_up_scores_on():
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4, 5))
        scoring.score_s = 10.0
        under_way = asyncio.create_task(scoring.score())
        await asyncio.sleep(1)
        dismissing = asyncio.create_task(scoring.scorer.dismiss(scorer(5)))
        await asyncio.sleep(1)
        dismissing.cancel()
        assert scoring.scorer.slots == (4,)
        scoring.scorer.resume(scorer(5))
        assert await under_way == {4, 5}
        assert await scoring.score() == {4, 5}

    with_cluster(story)


def test_a_scorer_gets_the_trainers_weights_before_a_generators():
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4,))
        await scoring.scorer.receive(Manifest(0, "shared_memory", offer(cluster, 0), 0, 0, ()))
        await scoring.scorer.dismiss(scorer(4))
        cluster.carrier.sent.clear()
        assert await scoring.scorer.admit(scorer(5), {})
        assert cluster.sent(Publish)
        assert not cluster.sent(OfferWeights)
        await scoring.scorer.dismiss(scorer(5))
        await cluster.trainer.optim_step(1.0)
        assert await scoring.scorer.admit(scorer(6), {})
        assert [(slot, command.role) for slot, command in cluster.sent(OfferWeights)] == [(0, "generate")]

    with_cluster(story)


def test_a_score_under_way_keeps_its_slots():
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4, 5))
        scoring.score_s = 10.0
        under_way = asyncio.create_task(scoring.score())
        await asyncio.sleep(1)
        began_s = clock()
        dismissing = asyncio.create_task(scoring.scorer.dismiss(scorer(5)))
        await asyncio.sleep(0)
        assert scoring.scorer.slots == (4,)
        await dismissing
        assert clock() - began_s == pytest.approx(9.0)
        assert await under_way == {4, 5}

    with_cluster(story)


def test_what_a_lost_scorer_leaves_behind_is_scored_by_others():
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4, 5))
        scoring.score_s = 10.0
        under_way = asyncio.create_task(scoring.score())
        await asyncio.sleep(1)
        dismissing = asyncio.create_task(scoring.scorer.dismiss(scorer(5)))
        await asyncio.sleep(1)
        cluster.mailbox.lose(5, "slot 5 was killed")
        await dismissing
        assert await under_way == {4}
        shares = sorted(len(command.samples) for _, command in cluster.sent(Score))
        assert shares == [2, 2, 2], "the other one's share is not scored twice"

    with_cluster(story)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_scorer_does_not_score_is_scored_by_others(fault: str):
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4, 5))
        cluster.carrier.fail(5, FAULTS[fault], on=Score)
        assert await scoring.score() == {4}
        assert cluster.killed == [5]
        assert scoring.scorer.slots == (4,)

    with_cluster(story)


def test_samples_that_scorer_after_scorer_dies_of_are_at_fault_themselves():
    """The slot comes back each time, and lives on until it gets them again."""

    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4,))
        num_lives = 0

        async def die(number, command):
            nonlocal num_lives
            if not isinstance(command, Score):
                return await cluster.slots.respond(number, command)
            num_lives += 1
            cluster.mailbox.lose(number, f"slot {number} was killed by SIGKILL")
            asyncio.get_running_loop().call_later(1.0, come_back, number)
            return None

        def come_back(number: int) -> None:
            cluster.mailbox.welcome(number)
            instance = instance_on("score", (number,), restart=num_lives)
            scoring.scorer._add(scoring.scorer._open(scoring.scorer._slots, instance))

        cluster.carrier._slots[4] = die
        with pytest.raises(SlotLost, match="slot 4 was killed by SIGKILL; 5 scorers were lost while they had the same"):
            await scoring.score()
        assert num_lives == MOST_LOST

    with_cluster(story)


def test_samples_that_scorer_after_scorer_refuses_are_at_fault_themselves():
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4, 5, 6))
        for slot in (4, 5, 6):
            cluster.carrier.fail(slot, "error", on=Score)
        with pytest.raises(Refused, match="slot 4: Score failed, as asked"):
            await scoring.score()
        assert cluster.killed == []
        assert await scoring.score() == {4, 5, 6}

    with_cluster(story)


def test_samples_of_a_lone_scorer_wait_for_its_successor():
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, (4,))
        await scoring.scorer.receive(Manifest(0, "shared_memory", offer(cluster, 0), 0, 0, ()))
        scoring.score_s = 10.0
        under_way = asyncio.create_task(scoring.score())
        await asyncio.sleep(1)
        cluster.mailbox.lose(4, "slot 4 was killed")
        await asyncio.sleep(1)
        assert scoring.scorer.num_waiting == 1
        assert await scoring.scorer.admit(scorer(5), {})
        assert await under_way == {5}

    with_cluster(story)


def test_samples_wait_for_a_scorer_and_not_for_ever():
    async def story(cluster: Cluster):
        scoring = Scoring(cluster, ())
        await scoring.scorer.receive(Manifest(0, "shared_memory", offer(cluster, 0), 0, 0, ()))
        waiting = asyncio.create_task(scoring.score())
        await asyncio.sleep(1)
        assert scoring.scorer.num_waiting == 1
        assert await scoring.scorer.admit(scorer(4), {})
        assert await waiting == {4}
        await scoring.scorer.dismiss(scorer(4))
        with pytest.raises(Late, match=r"patience_timeout_s\) no slot had the role 'score', for 4 samples"):
            await scoring.score()

    with_cluster(story)


def offer(cluster: Cluster, version: int) -> str:
    return cluster.slots._offer(version)


def test_generate_is_never_sent_to_a_slot_without_weights():
    async def story(cluster: Cluster):
        await cluster.generators.dismiss(generator(0))
        await cluster.trainer.optim_step(1.0)
        waiting = [cluster.ask(name) for name in "abc"]
        await cluster.generators.admit(generator(1), {})
        await asyncio.sleep(1)
        assert not cluster.sent(Generate)
        await cluster.publish(1)
        await asyncio.gather(*waiting)

    with_cluster(story, generating=(0,))
