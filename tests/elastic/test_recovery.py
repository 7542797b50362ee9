"""Generators that are lost come back, above slots in memory and in virtual time: when, with which weights, and how
often it is tried."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ductile.elastic.recovery import GIVE_UP_S, LASTS_S, LONGEST_PAUSE_S, Recovery, pause_s
from ductile.fleet.run_roles import RunRoles
from ductile.messages.workers import AssignRole, OfferWeights, Publish, Receive, ReleaseRole
from ductile.observe import Recorder, read_jsonl
from ductile.records import Manifest
from tests.cluster.memory_cluster import FIRST_PID, MemoryCluster
from tests.fleet.generate_slots import Slot
from tests.fleet.test_migration import TRAINER, Cluster, is_whole, steps, with_cluster
from tests.fleet.test_worker_pool import Scoring, offer
from tests.orchestrator.doubles import clock
from tests.transport.transports import eventually

START_S = 0.5


@asynccontextmanager
async def recovering(cluster: Cluster, folder: Path, max_restarts: int = 5, is_scheduled: bool = False, **how: Any):
    async def change_over(slot: int) -> None:
        if wait := how.get("change_over"):
            await wait.wait()

    scorer = how.get("scorer")
    for role, pool in {"generate": cluster.generators, "score": scorer}.items():
        for slot in pool.slots if pool else ():  # those that are there from the start, as if they had been told
            cluster.mailbox._roles[slot] = (role,)

    def begin(slot: int) -> None:
        cluster.slots.dead.discard(slot)
        cluster.slots.slots[slot] = Slot(slot)

    record, slots = Recorder(folder), MemoryCluster(cluster.mailbox, list(cluster.slots.slots), begin, START_S)
    slots.ends_without(lambda slot: slot == TRAINER)
    fleet = RunRoles(cluster.trainer, cluster.generators, scorer, {"generate": {}, "score": {}})
    replaced, groups = how.get("replaced", ()), how.get("groups", {})
    recovery = Recovery(
        slots,
        fleet,
        record,
        max_restarts,
        change_over,
        is_scheduled,
        replaced,
        clock,
        lambda role: groups.get(role, ()),
    )
    async with recovery:
        yield slots, recovery
    record.close()
    assert not slots.errors


def events(folder: Path) -> list[tuple[str, str]]:
    """Those with a sentence."""
    return [(row["kind"], row["sentence"]) for row in read_jsonl(folder / "events.jsonl") if row["sentence"]]


def restarting(folder: Path) -> list[int]:
    """Slots of which it was said that they are to come back."""
    return [row["slot"] for row in read_jsonl(folder / "events.jsonl") if row["kind"] == "slot_restarting"]


def test_one_of_two_generators_comes_back_with_the_live_weights(tmp_path):
    async def story(cluster: Cluster):
        async with recovering(cluster, tmp_path) as (_, recovery):
            await cluster.publish(1)
            asked = [cluster.ask(name) for name in "abcd"]
            await steps(5)
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(0.01)
            assert recovery.under_way == {0}
            assert cluster.generators.slots == (1,)
            await asyncio.sleep(2 * START_S)
            assert recovery.under_way == frozenset()
            assert [each.id for each in cluster.generators.instances] == ["generator-0+1", "generator-1"]
            assert cluster.sent(OfferWeights)[-1][0] == 1
            assert cluster.sent(Receive)[-1][0] == 0
            assert all(is_whole(generation, generation.id) for generation in await asyncio.gather(*asked))
            assert cluster.slots.slots[0].version == 1
        assert events(tmp_path) == [("slot_restarted", "Slot 0 generates again after 0.50 s, on cpu, pid 7.")]

    with_cluster(story, generating=(0, 1))


def test_a_generator_that_was_lost_before_comes_back_too(tmp_path):
    async def story(cluster: Cluster):
        cluster.mailbox._roles[0] = ["generate"]
        cluster.slots.kill(0, cluster.mailbox)
        await asyncio.sleep(1)
        async with recovering(cluster, tmp_path):
            await asyncio.sleep(1)
            assert cluster.generators.slots == (0, 1)

    with_cluster(story, generating=(0, 1))


@pytest.mark.parametrize("fault", ["drop", "error"])
def test_a_lone_generator_that_hangs_at_weights_or_refuses_them_comes_back_with_them(tmp_path, fault):
    async def story(cluster: Cluster):
        async with recovering(cluster, tmp_path):
            asked = cluster.ask("a")
            await steps(2)
            cluster.carrier.fail(0, fault, on=Receive)
            await cluster.publish(1)
            await asyncio.sleep(5)
            assert [each.id for each in cluster.generators.instances] == ["generator-0+1"]
            assert cluster.slots.slots[0].version == 1
            assert is_whole(await asked, "a", 60)

    with_cluster(story, generating=(0,), length=lambda name: 60)


def test_requests_wait_for_a_lone_generator(tmp_path):
    async def story(cluster: Cluster):
        async with recovering(cluster, tmp_path):
            asked = cluster.ask("a")
            for number in (1, 2):
                await steps(5)
                cluster.slots.kill(0, cluster.mailbox)
                await asyncio.sleep(5)
                assert [each.id for each in cluster.generators.instances] == [f"generator-0+{number}"]
            assert is_whole(await asked, "a", 60)

    with_cluster(story, generating=(0,), length=lambda name: 60)


def test_a_lone_generator_that_is_lost_between_two_optimizer_steps_gets_the_weights_of_that_moment(tmp_path):
    async def story(cluster: Cluster):
        async with recovering(cluster, tmp_path):
            await cluster.publish(1)
            asked = cluster.ask("a")
            await steps(5)
            await cluster.trainer.optim_step(1.0)
            cluster.slots.kill(0, cluster.mailbox)
            assert is_whole(await asked, "a")
            assert cluster.slots.slots[0].version == cluster.generators.version == 1
            assert [command.version for _, command in cluster.sent(Publish)] == [0, 1, 1]
            await cluster.publish(2)
            assert cluster.slots.slots[0].version == 2

    with_cluster(story, generating=(0,))


def test_a_slot_that_does_not_start_is_tried_again_ever_later_and_then_given_back(tmp_path):
    async def story(cluster: Cluster):
        async with recovering(cluster, tmp_path, max_restarts=3) as (slots, recovery):
            slots.num_refused = 3
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(3 * START_S + 1 + 2 - 0.1)
            assert recovery.under_way == {0}
            await asyncio.sleep(0.2)
            assert recovery.under_way == frozenset()
            assert slots.sentences == [], "the other generator goes on"
            assert is_whole(await cluster.ask("a"), "a")
        said = "Slot 0 is given back after 3 attempts to start it again (cluster.max_restarts): slot 0 ended with exit"
        assert events(tmp_path) == [("slot_given_back", f"{said} code 1.")]

    with_cluster(story, generating=(0, 1))


def test_a_generator_that_cannot_take_its_role_is_killed_before_the_next_attempt(tmp_path):
    async def story(cluster: Cluster):
        async with recovering(cluster, tmp_path) as (slots, _):
            cluster.carrier.fail(0, "error", on=AssignRole)
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(5)
            assert slots.num_started == 2
            assert cluster.generators.slots == (0, 1)

    with_cluster(story, generating=(0, 1))


@pytest.mark.parametrize("has_another", [False, True])
@pytest.mark.parametrize("replaced", [(), ("score",), ("generate",)])
def test_when_the_last_generator_is_given_back_the_run_ends_unless_a_policy_makes_another(
    tmp_path, replaced, has_another
):
    """It takes no slot from the trainer that is the last one."""

    async def story(cluster: Cluster):
        recovery = recovering(cluster, tmp_path, max_restarts=0, is_scheduled=True, replaced=replaced)
        async with recovery as (slots, _):
            if not has_another:
                slots.slots = (0, TRAINER)
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(1)
            said = (
                "Slot 0 was killed by SIGKILL; slot 0 was given back after 0 attempts to start it again "
                "(cluster.max_restarts), and no slot generates"
            )
            assert slots.sentences == ([] if "generate" in replaced and has_another else [said])

    with_cluster(story, generating=(0,))


def test_attempts_are_counted_anew_once_the_slot_has_worked_for_a_while(tmp_path):
    async def story(cluster: Cluster):
        async with recovering(cluster, tmp_path, max_restarts=1) as (slots, _):
            for _ in range(3):
                cluster.slots.kill(0, cluster.mailbox)
                await asyncio.sleep(LASTS_S + 2)
            assert slots.num_started == 3
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(2)
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(2)
            assert slots.num_started == 4
        assert [kind for kind, _ in events(tmp_path)] == ["slot_restarted"] * 4 + ["slot_given_back"]

    with_cluster(story, generating=(0, 1))


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_slot_is_left_alone_while_it_changes_roles(tmp_path, is_scheduled):
    """A policy uses a slot that the change has started. Without one the slot gets its roles back."""

    async def story(cluster: Cluster):
        over = asyncio.Event()
        watched = recovering(cluster, tmp_path, is_scheduled=is_scheduled, change_over=over)
        async with watched as (slots, recovery):
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(5)
            assert slots.num_started == 0
            assert recovery.under_way == {0}
            assert restarting(tmp_path) == [], "the change may end the run with it"
            await slots.add([0])  # the change has started it
            over.set()
            await asyncio.sleep(5)
            assert cluster.generators.slots == ((1,) if is_scheduled else (0, 1))
            assert recovery.under_way == frozenset()

    with_cluster(story, generating=(0, 1))


def test_a_slot_is_not_started_for_a_run_that_the_change_has_ended(tmp_path):
    async def story(cluster: Cluster):
        over = asyncio.Event()
        async with recovering(cluster, tmp_path, change_over=over) as (slots, recovery):
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(5)
            slots.fail("the trainer is lost")
            over.set()
            await asyncio.sleep(5)
            assert recovery.under_way == frozenset()
            assert slots.num_started == 0
            assert restarting(tmp_path) == []

    with_cluster(story, generating=(0, 1))


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_slot_that_a_resize_takes_while_the_next_attempt_rests_keeps_its_roles_unless_a_policy_gives_them(
    tmp_path, is_scheduled
):
    async def story(cluster: Cluster):
        async with recovering(cluster, tmp_path, is_scheduled=is_scheduled) as (slots, recovery):
            slots.num_refused = 1
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(START_S + 0.1)
            await slots.add([0])
            slots.ends_without(lambda slot: slot in (0, TRAINER))
            await asyncio.sleep(5)
            assert recovery.under_way == frozenset()
            assert slots.num_started == 2
            assert cluster.generators.slots == ((1,) if is_scheduled else (0, 1))
            assert 0 not in cluster.mailbox.lost

    with_cluster(story, generating=(0, 1))


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_slot_that_is_lost_between_two_roles_comes_back_for_the_policy(tmp_path, is_scheduled):
    async def story(cluster: Cluster):
        cluster.mailbox._roles[3] = ["train"]  # it was about to join the trainer, which stays as it is
        async with recovering(cluster, tmp_path, is_scheduled=is_scheduled) as (_, recovery):
            cluster.slots.kill(3, cluster.mailbox)
            await asyncio.sleep(5)
            assert recovery.under_way == frozenset()
            assert (3 in cluster.mailbox.lost) == (not is_scheduled)
        said = [("slot_restarted", "Slot 3 runs again after 0.50 s, on cpu, pid 10.")]
        assert events(tmp_path) == (said if is_scheduled else [])
        assert restarting(tmp_path) == ([3] if is_scheduled else []), "who follows the run knows that it comes back"

    with_cluster(story, generating=(0, 1))


def test_the_end_of_the_run_does_not_wait_for_a_slot_that_hangs_as_it_comes_back(tmp_path):
    async def story(cluster: Cluster):
        async with recovering(cluster, tmp_path) as (_, recovery):
            cluster.slots.delay(0, AssignRole, 50.0)
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(START_S + 1)
            assert recovery.under_way == {0}
            began_s = clock()
        assert clock() - began_s <= GIVE_UP_S
        cluster.slots.kill(1, cluster.mailbox)
        await asyncio.sleep(5)
        assert recovery.under_way <= {0}, "after the end nothing is begun"

    with_cluster(story, generating=(0, 1))


def with_pair(story, folder: Path, **how: Any) -> None:
    """Play a story with a scorer on slots 4 and 5."""

    async def whole(cluster: Cluster):
        scoring = Scoring(cluster, (4, 5), size=2)
        await scoring.scorer.receive(Manifest(0, "shared_memory", offer(cluster, 0), 0, 0, ()))
        groups = {"score": [(4, 5), (6, 7)]}
        async with recovering(cluster, folder, scorer=scoring.scorer, groups=groups, **how) as (slots, recovery):
            await story(cluster, scoring, slots, recovery)

    with_cluster(whole, generating=(0,))


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize("slot", [4, 5])
def test_a_scorer_on_two_slots_comes_back_on_both_when_one_is_lost(tmp_path, slot, is_scheduled):
    other = 9 - slot

    async def story(cluster: Cluster, scoring: Scoring, slots: MemoryCluster, recovery: Recovery):
        cluster.slots.kill(slot, cluster.mailbox)
        await asyncio.sleep(0.01)
        assert recovery.under_way == {4, 5}, "no policy is to use the other one meanwhile"
        assert await scoring.score() == {4}
        assert recovery.under_way == frozenset()
        assert [each.id for each in scoring.scorer.instances] == ["scorer-4-5+1"]
        assert slots.num_started == 1, "the other one lives on"
        told = [type(command) for number, command in cluster.carrier.sent if number == other]
        assert told.index(ReleaseRole) < told.index(AssignRole), "it gives the old role up before it takes the new one"

    with_pair(story, tmp_path, is_scheduled=is_scheduled)
    said = f"Slot {slot} scores again after 0.50 s, on cpu, pid {FIRST_PID + slot}."
    assert events(tmp_path) == [("slot_restarted", said)]


def test_a_scorer_that_is_lost_on_both_of_its_slots_or_does_not_take_its_role_on_one_is_started_anew_on_both(tmp_path):
    async def story(cluster: Cluster, scoring: Scoring, slots: MemoryCluster, recovery: Recovery):
        for slot in (4, 5):
            cluster.slots.kill(slot, cluster.mailbox)
        await asyncio.sleep(5)
        assert [each.id for each in scoring.scorer.instances] == ["scorer-4-5+1"]
        cluster.carrier.fail(4, "error", on=AssignRole)
        cluster.slots.kill(5, cluster.mailbox)
        await asyncio.sleep(5)
        assert [each.id for each in scoring.scorer.instances] == ["scorer-4-5+3"]
        assert await scoring.score() == {4}
        assert recovery.under_way == frozenset()
        assert slots.num_started == 3

    with_pair(story, tmp_path)
    rows = read_jsonl(tmp_path / "events.jsonl")
    for kind in ("slot_restarting", "slot_restarted"):
        assert sorted(row["slot"] for row in rows if row["kind"] == kind) == [4, 4, 5, 5]


def test_a_slot_that_trains_is_not_killed_because_it_does_not_score_again(tmp_path, monkeypatch):
    """Not while a resize judges what its death would mean, either: the run would not end with it at once."""

    async def story(cluster: Cluster, scoring: Scoring, slots: MemoryCluster, recovery: Recovery):
        monkeypatch.setattr(cluster.trainer, "needs", lambda slot: slot == 4)
        slots.ends_without(lambda slot: False)
        cluster.carrier.fail(4, "error", on=AssignRole)
        cluster.slots.kill(5, cluster.mailbox)
        await asyncio.sleep(10)
        assert 4 not in cluster.mailbox.lost
        assert slots.num_started == 1, "5 alone"
        assert [each.id for each in scoring.scorer.instances] == ["scorer-4-5+2"]

    with_pair(story, tmp_path)


def test_a_slot_that_never_takes_its_role_again_takes_no_other_slot_of_its_scorer_with_it(tmp_path):
    async def story(cluster: Cluster, scoring: Scoring, slots: MemoryCluster, recovery: Recovery):
        cluster.carrier.fail(5, "error", on=AssignRole, times=99)
        cluster.slots.kill(5, cluster.mailbox)
        await asyncio.sleep(60)
        assert recovery.under_way == frozenset()
        assert 4 not in cluster.mailbox.lost
        assert cluster.mailbox.lost[5].endswith("it has been killed")
        assert slots.num_started == 3, "it alone, for each attempt"

    with_pair(story, tmp_path, max_restarts=3)
    rows = read_jsonl(tmp_path / "events.jsonl")
    assert [row["slot"] for row in rows if row["kind"] in ("slot_restarting", "slot_given_back")] == [5, 5]


def test_a_scorer_with_a_slot_that_does_not_start_any_more_is_none_any_more(tmp_path):
    async def story(cluster: Cluster, scoring: Scoring, slots: MemoryCluster, recovery: Recovery):
        slots.num_refused = 1
        cluster.slots.kill(5, cluster.mailbox)
        await asyncio.sleep(5)
        assert recovery.under_way == frozenset()
        assert 4 not in cluster.mailbox.lost
        (said,) = slots.sentences
        assert said.endswith(
            "slot 5 was given back after 1 attempt to start it again (cluster.max_restarts), and no slot scores"
        )

    with_pair(story, tmp_path, max_restarts=1)
    assert [kind for kind, _ in events(tmp_path)] == ["slot_given_back"]


def test_pauses_between_attempts_double_up_to_the_longest():
    assert [pause_s(attempts) for attempts in range(5)] == [0, 1, 2, 4, 8]
    assert pause_s(40) == LONGEST_PAUSE_S


def test_a_generator_that_dies_again_while_the_weights_of_the_moment_are_published_is_brought_back_again(tmp_path):
    async def story(cluster: Cluster):
        async with recovering(cluster, tmp_path) as (slots, recovery):
            await cluster.publish(1)
            asked = cluster.ask("a")
            await steps(5)
            await cluster.trainer.optim_step(1.0)
            cluster.slots.kill(0, cluster.mailbox)
            await eventually(lambda: cluster.sent(Receive)[2:])  # versions 0 and 1, and the one of the moment
            cluster.slots.kill(0, cluster.mailbox)
            await asyncio.sleep(5)
            assert recovery.under_way == frozenset()
            assert slots.num_started == 2
            assert cluster.generators.slots == (0,)
            assert is_whole(await asked, "a")

    with_cluster(story, generating=(0,))


def test_whoever_waits_for_a_slot_is_told_when_it_is_back_or_given_back(tmp_path):
    async def story(cluster: Cluster):
        for max_restarts in (5, 0):
            async with recovering(cluster, tmp_path / str(max_restarts), max_restarts) as (_, recovery):
                told = list[frozenset[int]]()
                recovery.on_change.add(lambda recovery=recovery, told=told: told.append(recovery.under_way))
                cluster.slots.kill(0, cluster.mailbox)
                await asyncio.sleep(5)
                assert told == [frozenset()]

    with_cluster(story, generating=(0, 1))
