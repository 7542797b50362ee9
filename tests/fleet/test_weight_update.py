"""A version goes to servers, and everything that can happen to it on the way does. In memory and in virtual time."""

import asyncio
import gc
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced

import pytest
from msgspec.structs import replace

from ductile.core.instances.instances import InstanceId
from ductile.core.rollouts.provenance import KnownWeights
from ductile.fleet.updates.donor import Donor
from ductile.fleet.updates.update_parties import ServerHandle, UpdateOptions
from ductile.fleet.updates.weight_update import WeightUpdates
from ductile.messages.outgoing_updates import BeginUpdate
from ductile.messages.updates import EndUpdate, Offer, SendReport, ServerState, UpdateProgress, VersionLease, total_of
from ductile.roles import Interrupted, Late, Refused, SlotLost, TrainerLost
from tests.orchestrator.doubles import clock, run

PARTS = ("fffffffffffff", "0000000000003")
DIGEST = "0000000000002"
LATE_S = 1.0
OPTIONS = UpdateOptions(bucket_timeout_s=2.0, total_timeout_s=20.0, probe_timeout_s=LATE_S)


def test_parts_add_up_modulo_2_to_the_52():
    assert total_of(PARTS) == DIGEST
    assert total_of([]) == "0" * 13


@dataclass
class Server:
    """A server in memory. faults: what happens at a point, `times` times: "exit", "hang", "refuse", "fail", "restart",
    "wedge" (nothing more of this), "drop" (it is done, and the reply is lost) or "drop_before" (it is not, either)."""

    name: str
    faults: dict[str, str] = field(default_factory=dict)
    times: int = 99
    version: int = 1
    digest: str = "old"
    incarnation: str = "first"
    epoch: int = 0
    paused: bool = False
    alive: bool = True
    hangs: bool = False
    progress: UpdateProgress | None = None
    staged: str = ""
    said: list[str] = field(default_factory=list)
    served: list[int] = field(default_factory=list)

    async def _at(self, point, request=None):
        self.said.append(point)
        await asyncio.sleep(0.01)
        fault = self.faults.get(point)
        if fault and self.times > 0:
            self.times -= 1
            if fault == "exit":
                self.alive = False
            elif fault == "hang":
                self.hangs = True
            elif fault == "restart":
                self.incarnation, self.version, self.digest, self.progress = "second", 0, "folder's", None
                if point != "prepare":
                    raise Refused("no such update")
            elif fault == "refuse":
                raise Refused(f"{self.name} says no")
            elif fault == "drop_before":
                await asyncio.sleep(LATE_S)
                raise Late(f"{self.name} did not reply")
            elif fault == "wedge":
                await asyncio.sleep(1e6)
            elif fault == "error":
                raise Interrupted(f"{self.name} responded with 500")
            elif fault == "fail":
                self.progress = UpdateProgress(request.update_id, "failed", reason="the disk is full")
        if not self.alive:
            raise SlotLost(f"{self.name} cannot be reached")
        if self.hangs:
            await asyncio.sleep(LATE_S)
            raise Late(f"{self.name} did not reply")
        if request is not None and getattr(request, "epoch", None) is not None:
            if request.epoch < self.epoch:
                raise Refused("an older epoch")
            self.epoch = request.epoch

    async def _dropped(self, point):
        if self.faults.get(point) == "drop":
            await asyncio.sleep(LATE_S)
            raise Late(f"{self.name} did not reply")

    async def state(self):
        await self._at("state")
        return ServerState(
            self.incarnation, "m", self.version, self.digest, self.epoch, self.paused, update=self.progress
        )

    async def prepare(self, prepare):
        await self._at("prepare", prepare.update)
        if self.progress is None or self.progress.update_id != prepare.update.update_id:
            self.progress = UpdateProgress(prepare.update.update_id, "prepared")
        await self._dropped("prepare")
        return self.progress

    async def verify(self, end: EndUpdate):
        await self._at("verify", end)
        mine = "bad" if self.faults.get("digest") and self.times > 0 else end.digest
        if mine == "bad":
            self.times -= 1
            return UpdateProgress(end.update_id, "failed", reason="it has other bytes")
        self.staged = mine
        self.progress = UpdateProgress(end.update_id, "verified", digest=mine)
        await self._dropped("verify")
        return self.progress

    async def commit(self, end: EndUpdate):
        await self._at("commit", end)
        assert self.paused, "nothing may be sampled while it changes over"
        assert self.staged, "nothing was verified"
        self.version, self.digest = end.version, self.staged
        await self._dropped("commit")
        return UpdateProgress(end.update_id, "committed")

    async def abort(self, end: EndUpdate):
        await self._at("abort")
        self.staged = ""
        return UpdateProgress(end.update_id, "aborted")

    async def pause(self, pause):
        await self._at("pause", pause)
        self.paused = True
        await self._dropped("pause")

    async def resume(self, resume):
        await self._at("resume")
        self.paused = False

    def take_bucket(self):
        self.progress = replace(self.progress, phase="receiving", num_buckets=1)

    @property
    def member(self):
        return ServerHandle(InstanceId(self.name), self, f"http://{self.name}", "secret", "first")


@dataclass
class Ranks:
    """The trainer's ranks. takes_s: seconds of a transfer. report: failed receivers by attempt."""

    servers: dict
    takes_s: float = 0.5
    num_bytes_equal: int = 0
    begin: BaseException | None = None
    begins_s: float = 0.0
    """Seconds until they begin: what is trained comes first."""
    reported: list[dict[str, str]] = field(default_factory=list)
    awaited: set[str] = field(default_factory=set)
    """Receivers that they wait for, until these are left out."""
    left_out: dict[str, str] = field(default_factory=dict)
    carrier: str | None = None
    updates: list = field(default_factory=list)
    finished: list = field(default_factory=list)
    kept: list = field(default_factory=list)

    @contextmanager
    def keeping(self, version):
        self.kept.append(version)
        yield
        assert self.kept.pop() == version

    async def begin_update(self, update):
        assert self.kept, "the trainer may change its weights"
        if self.begin:
            raise self.begin
        self.updates.append(update)
        await asyncio.sleep(self.begins_s)
        return [Offer("slot-0", (), ()), Offer("slot-1", (), ())]

    async def sent(self, update_id):
        await asyncio.sleep(self.takes_s)
        names = [each.instance for each in self.updates[-1].receivers]
        gone = [name for name in names if not self.servers[name].alive]
        failed = self.reported.pop(0) if self.reported else dict.fromkeys(gone, "closed the connection")
        while not self.left_out.keys() >= self.awaited:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        report = SendReport(update_id, "", "", 8, 0.1, failed, num_bytes_equal=self.num_bytes_equal)
        return [
            replace(report, sender=f"slot-{rank}", digest=part, tensors={"embed": part, f"of {rank}": part})
            for rank, part in enumerate(PARTS)
        ]

    async def leave_out(self, update_id, instance, reason):
        assert update_id == self.updates[-1].update_id
        self.left_out[instance] = reason

    async def finish_update(self, update_id, aborted):
        self.finished.append((update_id, aborted))


@dataclass
class Scene:
    servers: dict
    ranks: Ranks
    updates: WeightUpdates
    carrier: str = "shared_memory"

    async def publish(self, version=2, **takes):
        return await self.updates.update(version, [server.member for server in self.servers.values()])

    def check(self):
        """What holds however it ended."""
        epochs = [update.epoch for update in self.ranks.updates]
        assert epochs == sorted(set(epochs)), "an epoch came twice, or went back"
        ids = [update.update_id for update in self.ranks.updates]
        assert len({*ids}) == len(ids)
        assert [each for each, _ in self.ranks.finished] == ids, "the ranks may not change the weights any more"
        for server in self.servers.values():
            assert (server.version, server.digest) != (2, "bad")


def scene(*servers, carrier="shared_memory", options=OPTIONS, **ranks):
    named = {server.name: server for server in servers}
    doubles = Ranks(named, **ranks)
    epochs = iter(range(1, 99))
    updates = WeightUpdates(
        doubles, options, lambda state, only: only or carrier, lambda above: max(above + 1, next(epochs)), clock
    )
    return Scene(named, doubles, updates, carrier)


def outcomes(result):
    return {each.instance: each.outcome for each in result.outcomes}


def test_all_servers_commit_and_go_on():
    async def story():
        it = scene(Server("a"), Server("b"))
        result = await it.publish()
        assert outcomes(result) == {"a": "committed", "b": "committed"}
        assert (result.attempts, result.digest, it.updates.version, it.updates.digest) == (1, DIGEST, 2, DIGEST)
        for server in it.servers.values():
            assert (server.version, server.digest, server.paused) == (2, DIGEST, False)
            assert [said for said in server.said if said != "state"] == [
                "prepare",
                "verify",
                "pause",
                "commit",
                "resume",
            ]
        assert it.ranks.finished[0][1] is False
        assert result.pause_s < 0.1
        it.check()

    run(story())


def test_what_a_version_is_is_known_tensor_by_tensor_once_servers_have_it():
    async def story():
        it = scene(Server("a"))
        result = await it.publish()
        assert result.tensors == {"embed": DIGEST, "of 0": PARTS[0], "of 1": PARTS[1]}
        assert it.updates.known == KnownWeights(2, DIGEST, result.tensors)
        it.servers["a"].alive = False
        await it.publish(2)
        assert it.updates.digest == DIGEST, "what is sent again, and reaches nobody, says nothing new"
        await it.publish(3)
        assert it.updates.known == KnownWeights(3)

    run(story())


@pytest.mark.parametrize(
    ("num_bytes_equal", "other", "base"),
    [(8, {}, 2), (0, {}, None), (8, {"version": 1}, None), (8, {"digest": "another run's"}, None)],
)
def test_what_has_not_changed_is_looked_for_where_that_pays_and_all_servers_have_it(num_bytes_equal, other, base):
    async def story():
        a, b = Server("a"), Server("b")
        it = scene(a, b, num_bytes_equal=num_bytes_equal)
        await it.publish(2)
        vars(b).update(other)
        await it.publish(3)
        assert [update.base_version for update in it.ranks.updates] == [None, base]

    run(story())


FAULTS = [
    # point, fault, what becomes of it, attempts
    ("state", "exit", "dead", 1),
    ("state", "hang", "stale", 1),
    ("prepare", "exit", "dead", 1),
    ("prepare", "hang", "stale", 1),
    ("prepare", "refuse", "stale", 1),
    ("prepare", "fail", "stale", 3),
    ("prepare", "restart", "dead", 1),
    ("prepare", "drop", "stale", 1),
    ("verify", "exit", "dead", 1),
    ("verify", "hang", "stale", 1),
    ("verify", "refuse", "stale", 1),
    ("verify", "wedge", "stale", 1),
    ("verify", "drop", "committed", 1),
    ("digest", "bad", "stale", 3),
    ("pause", "exit", "dead", 1),
    ("pause", "hang", "stale", 1),
    ("pause", "drop", "stale", 1),
    ("commit", "exit", "dead", 1),
    ("commit", "hang", "stale", 1),
    ("commit", "refuse", "stale", 1),
    ("commit", "restart", "dead", 1),
    ("commit", "drop", "committed", 1),
    ("resume", "exit", "committed", 1),
    ("resume", "drop_before", "committed", 1),
]


@pytest.mark.parametrize("carrier", ["shared_memory", "point_to_point"])
@pytest.mark.parametrize(("point", "fault", "outcome", "attempts"), FAULTS)
def test_a_server_that_fails_does_not_stop_the_version(point, fault, outcome, attempts, carrier):
    async def story():
        victim, other = Server("victim", {point: fault}), Server("other")
        it = scene(victim, other, carrier=carrier)
        result = await it.publish()
        assert outcomes(result) == {"victim": outcome, "other": "committed"}
        assert (other.version, other.digest, other.paused) == (2, DIGEST, False)
        if outcome != "committed":
            assert next(each.reason for each in result.outcomes if each.instance == "victim")
            assert victim.version != 2
        assert result.attempts == attempts
        assert victim.said.count("commit") <= 1, "a commit was sent again although it was done, or nobody knew"
        assert clock() < 15
        it.check()

    run(story())


def test_one_that_hangs_at_verify_is_out_alone_and_the_others_have_committed_by_then():
    async def story():
        it = scene(Server("a"), Server("b"), Server("wedged", {"verify": "wedge"}))
        publishing = asyncio.create_task(it.publish())
        await asyncio.sleep(1.0)
        assert [it.servers[name].version for name in "ab"] == [2, 2]
        assert outcomes(await publishing) == {"a": "committed", "b": "committed", "wedged": "stale"}
        assert clock() < OPTIONS.bucket_timeout_s + 2

    run(story())


def test_one_that_still_gets_buckets_while_it_is_asked_to_verify_is_waited_for():
    """As from another server, which gives them as they are asked for."""

    async def story():
        slow = Server("slow")
        it = scene(slow, takes_s=0.01)
        verify = slow.verify

        async def verify_late(end):
            while (num := slow.progress.num_buckets) < 10:
                await asyncio.sleep(1.0)
                slow.progress = UpdateProgress(end.update_id, "receiving", num + 1)
            return await verify(end)

        slow.verify = verify_late
        assert outcomes(await it.publish()) == {"slow": "committed"}
        assert 9 < clock() < OPTIONS.total_timeout_s

    run(story())


def test_a_rank_that_has_left_the_trainer_by_the_end_costs_no_committed_version():
    async def story():
        it = scene(Server("a"))

        async def finish_update(update_id, aborted):
            raise Refused("this slot does not hold the role 'train'")

        it.ranks.finish_update = finish_update
        assert outcomes(await it.publish()) == {"a": "committed"}
        assert it.updates.version == 2

    run(story())


def test_the_trainer_keeps_its_weights_for_a_server_until_they_have_been_sent_and_no_longer():
    async def story():
        joiner = Server("j", {"verify": "wedge"})
        it = scene(joiner)
        warming = asyncio.create_task(it.updates.warm(joiner.member, 2, [it.ranks]))
        await asyncio.sleep(0.3)
        assert it.ranks.kept == [2]
        await asyncio.sleep(0.7)
        assert "verify" in joiner.said
        assert it.ranks.kept == [], "an optimizer step waits for a server that hangs"
        with pytest.raises(Refused, match="did not reply"):
            await warming

    run(story())


def test_an_error_in_reply_to_a_commit_says_nothing_of_what_has_become_of_it():
    async def story():
        victim = Server("victim", {"commit": "error"}, times=1)
        assert outcomes(await scene(victim).publish()) == {"victim": "committed"}
        assert victim.said[victim.said.index("commit") + 1] == "state"

    run(story())


def test_a_commit_that_did_not_arrive_is_sent_again_once_the_server_has_said_so():
    async def story():
        victim = Server("victim", {"commit": "drop_before"}, times=1)
        result = await scene(victim).publish()
        assert outcomes(result) == {"victim": "committed"}
        assert victim.said.count("commit") == 2
        assert victim.said[victim.said.index("commit") + 1] == "state"

    run(story())


@pytest.mark.parametrize("fault", ["exit", "refuse", "fail", "restart", "condemned"])
def test_ranks_are_told_at_once_of_who_is_out_and_the_others_get_it_in_the_same_attempt(fault):
    """Before its first bucket or in the middle of them; also one that hangs, once the fleet knows that it is gone."""

    async def story():
        victim, other = Server("victim", {} if fault == "condemned" else {"prepare": fault}), Server("other")
        it = scene(victim, other, takes_s=0.3, awaited={"victim"})
        if fault == "condemned":
            it.updates.leave_out(victim.member.id, "there is no update yet: nothing happens")
            loop = asyncio.get_running_loop()
            loop.call_later(0.2, lambda: setattr(victim, "hangs", True))
            loop.call_later(0.5, it.updates.leave_out, victim.member.id, "it did not answer 2 probes in a row")
        result = await it.publish()
        expected = {"exit": "dead", "restart": "dead", "condemned": "dead"}.get(fault, "stale")
        assert outcomes(result) == {"victim": expected, "other": "committed"}
        assert len(it.ranks.updates[0].receivers) == 2
        assert it.ranks.left_out["victim"] in result.outcomes[-1].reason
        assert other.said.count("prepare") == 1
        assert clock() < 1.5
        it.check()

    run(story())


def test_ranks_are_told_of_who_was_lost_while_they_had_not_begun():
    async def story():
        victim, other = Server("victim"), Server("other")
        it = scene(victim, other, begins_s=0.3, awaited={"victim"})
        asyncio.get_running_loop().call_later(0.1, it.updates.leave_out, victim.member.id, "it was killed")
        assert outcomes(await it.publish()) == {"victim": "dead", "other": "committed"}
        assert it.ranks.left_out == {"victim": "it was killed"}
        assert "prepare" not in victim.said
        assert clock() < 1.5
        it.check()

    run(story())


@pytest.mark.parametrize("point", ["prepare", "verify", "pause", "commit"])
def test_nobody_waits_for_the_reply_of_one_that_is_known_to_be_gone(point):
    async def story():
        victim, other = Server("victim"), Server("other")
        it = scene(victim, other)

        async def never(message):
            it.updates.leave_out(victim.member.id, "it did not answer 2 probes in a row")
            await asyncio.sleep(1e6)

        setattr(victim, point, never)
        assert outcomes(await it.publish()) == {"victim": "dead", "other": "committed"}
        assert clock() < 2
        it.check()

    with warnings.catch_warnings(record=True) as found:
        run(story())
        gc.collect()
    assert not [str(each.message) for each in found if "never awaited" in str(each.message)]


def test_each_server_is_sent_its_own_token_alone_and_none_is_shown():
    async def story():
        a, b = Server("a"), Server("b")
        it = scene(a, b, carrier="http")
        prepared = {}
        for server in (a, b):
            do = server.prepare

            async def prepare(message, do=do):
                prepared[message.instance] = message
                return await do(message)

            server.prepare = prepare
        members = [ServerHandle(InstanceId(each.name), each, "http://x", f"key of {each.name}") for each in (a, b)]
        await it.updates.update(2, members)
        for name, message in prepared.items():
            tokens = {each.instance: each.token for each in message.update.receivers}
            assert tokens == {"a": "", "b": "", name: f"key of {name}"}
        assert {each.token for each in it.ranks.updates[0].receivers} == {"key of a", "key of b"}
        assert "key of" not in f"{it.ranks.updates[0]!r} {members!r} {BeginUpdate(it.ranks.updates[0])!r}"

    run(story())


def test_what_the_sender_could_not_bring_is_sent_again_to_that_server_alone():
    async def story():
        a, b = Server("a"), Server("b")
        it = scene(a, b, reported=[{"b": "bucket 3 was not acknowledged"}, {}])
        result = await it.publish()
        assert outcomes(result) == {"a": "committed", "b": "committed"}
        assert [[each.instance for each in update.receivers] for update in it.ranks.updates] == [["a", "b"], ["b"]]
        assert a.said.count("commit") == 1
        it.check()

    run(story())


def test_of_a_group_that_fails_together_the_one_with_the_fewest_buckets_has_held_the_others_up():
    async def story():
        wedged, other = Server("wedged"), Server("other")
        it = scene(wedged, other, carrier="point_to_point", reported=[{"wedged": "broken", "other": "broken"}] * 2)
        for server, num in ((wedged, 3), (other, 8)):
            it.servers[server.name].prepare = progressed(server, num)
        result = await it.publish()
        assert outcomes(result) == {"wedged": "stale", "other": "committed"}
        assert [len(update.receivers) for update in it.ranks.updates] == [2, 2, 1]

    def progressed(server, num):
        async def prepare(prepare):
            server.progress = UpdateProgress(prepare.update.update_id, "receiving", num_buckets=num)
            return server.progress

        return prepare

    run(story())


def test_ranks_that_cannot_send_leave_all_servers_with_what_they_have():
    async def story():
        it = scene(Server("a"), Server("b"), begin=Refused("no space left on device"))
        result = await it.publish()
        assert outcomes(result) == {"a": "stale", "b": "stale"}
        assert all("no space left" in each.reason for each in result.outcomes)
        assert result.attempts == 3
        assert all("commit" not in server.said for server in it.servers.values())

    run(story())


def test_a_trainer_that_is_lost_ends_the_update_and_servers_abort():
    async def story():
        it = scene(Server("a"))

        async def sent(update_id):
            raise TrainerLost("slot 0 was killed")

        it.ranks.sent = sent
        with pytest.raises(TrainerLost):
            await it.publish()
        assert it.servers["a"].said[-1] == "abort"
        assert (it.servers["a"].version, it.updates.version) == (1, None)
        it.check()

    run(story())


def test_what_ended_an_update_is_raised_and_servers_abort_also_where_a_rank_cannot_be_told_of_the_end():
    async def story():
        it = scene(Server("a"))

        async def sent(update_id):
            raise SlotLost("slot 1 was killed")

        async def finish_update(update_id, aborted):
            raise Late("slot 0 did not reply")

        it.ranks.sent, it.ranks.finish_update = sent, finish_update
        aborted = asyncio.Event()
        abort = it.servers["a"].abort

        async def slowly(end):
            await asyncio.sleep(0.5)
            aborted.set()
            return await abort(end)

        it.servers["a"].abort = slowly
        with pytest.raises(SlotLost, match="slot 1 was killed"):
            await it.publish()
        assert aborted.is_set()

    run(story())


def test_a_rank_that_dies_as_the_version_is_sent_again_takes_it_from_no_server_that_has_it():
    async def story():
        it = scene(Server("a"), Server("b"), reported=[{"b": "bucket 3 was not acknowledged"}])
        sent = it.ranks.sent

        async def sent_once(update_id):
            if len(it.ranks.updates) == 2:
                raise SlotLost("slot 1 was killed")
            return await sent(update_id)

        it.ranks.sent = sent_once
        result = await it.publish()
        assert outcomes(result) == {"a": "committed", "b": "stale"}
        assert "slot 1 was killed" in result.outcomes[-1].reason
        assert (it.servers["a"].version, it.updates.version, it.updates.digest) == (2, 2, DIGEST)
        assert it.servers["b"].said[-1] == "abort"
        it.check()

    run(story())


def test_ranks_are_not_waited_for_where_nobody_has_prepared():
    async def story():
        it = scene(Server("a", {"prepare": "refuse"}))
        asked, sent = [], it.ranks.sent
        it.ranks.sent = lambda update_id: asked.append(update_id) or sent(update_id)
        assert outcomes(await it.publish()) == {"a": "stale"}
        assert not asked
        it.check()

    run(story())


def test_ranks_that_say_nothing_do_not_hold_the_run_up():
    async def story():
        it = scene(Server("a"), takes_s=1e6)
        result = await it.publish()
        assert outcomes(result) == {"a": "stale"}
        assert clock() < 3 * OPTIONS.total_timeout_s + 5

    run(story())


def test_a_server_of_a_run_that_has_ended_is_met_with_a_newer_epoch():
    async def story():
        it = scene(Server("a", epoch=10**15))
        assert outcomes(await it.publish()) == {"a": "committed"}
        assert it.ranks.updates[0].epoch == 10**15 + 1

    run(story())


def test_a_server_that_has_no_carrier_in_common_is_left_behind_with_the_sentence():
    async def story():
        it = scene(Server("a"), Server("b", version=7))

        def choose(state, only):
            if state.version == 7:
                raise Refused("the server takes http: leave the key out")
            return "shared_memory"

        it.updates = WeightUpdates(it.ranks, OPTIONS, choose, lambda above: above + 1, clock)
        result = await it.publish()
        assert outcomes(result) == {"a": "committed", "b": "stale"}
        assert "leave the key out" in next(each.reason for each in result.outcomes if each.instance == "b")

    run(story())


def test_no_server_at_all_is_no_error():
    async def story():
        result = await scene().publish()
        assert (result.outcomes, result.attempts) == ((), 0)

    run(story())


def test_a_joiner_gets_the_committed_version_and_no_other():
    async def story():
        it = scene(Server("a"))
        await it.publish()
        joiner = Server("j", version=0, digest="folder's")
        it.servers["j"] = joiner
        result = await it.updates.warm(joiner.member, 2, [it.ranks])
        assert outcomes(result) == {"j": "committed"}
        assert (joiner.version, joiner.digest) == (2, DIGEST)
        it.check()

    run(story())


def test_a_joiner_asks_the_next_source_when_the_first_has_not_got_it_or_dies():
    async def story():
        it = scene(Server("a"))
        await it.publish()
        joiner = Server("j")
        it.servers["j"] = joiner
        donor = Ranks(it.servers, begin=Refused("a is gone"))
        assert outcomes(await it.updates.warm(joiner.member, 2, [donor, it.ranks])) == {"j": "committed"}
        assert await it.updates.warm(Server("k").member, 2, [donor]) is None, "it is no fault of k's"
        with pytest.raises(Refused, match="l says no"):
            await it.updates.warm(Server("l", {"prepare": "refuse"}).member, 2, [donor, it.ranks])

    run(story())


@pytest.mark.parametrize(
    ("only", "carrier"), [(None, "http"), ("http", "http"), ("shared_memory", "shared_memory"), ("disk", "disk")]
)
def test_the_way_of_joining_says_who_is_asked(only, carrier):
    async def story():
        joiner = Server("j")
        it = scene(joiner, carrier="shared_memory", options=replaced(OPTIONS, join_carrier=only))
        donor = Ranks(it.servers, carrier="http")
        result = await it.updates.warm(joiner.member, 2, [donor, it.ranks])
        assert outcomes(result) == {"j": "committed"}
        assert result.carriers == {"j": carrier}
        assert (len(donor.updates), len(it.ranks.updates)) == ((1, 0) if carrier == "http" else (0, 1))

    run(story())


@pytest.mark.parametrize("failure", [SlotLost, Late, Interrupted, Refused])
def test_a_donor_that_is_gone_is_not_its_joiners_fault(failure):
    async def story():
        class Port:
            async def lease(self, asked):
                raise failure("the donor does not answer")

        it = scene(Server("j"))
        joiner = it.servers["j"].member
        assert outcomes(await it.updates.warm(joiner, 2, [Donor(Port(), 2), it.ranks])) == {"j": "committed"}
        assert await it.updates.warm(joiner, 2, [Donor(Port(), 2)]) is None

    run(story())


@pytest.mark.parametrize("failure", [SlotLost, Late, Interrupted, Refused])
@pytest.mark.parametrize("point", ["end_lease", "state"])
def test_a_donor_that_dies_while_it_gives_is_not_its_joiners_fault(failure, point):
    async def story():
        class Port:
            dies = True

            async def lease(self, asked):
                return VersionLease(asked.version, DIGEST, Offer("a", (), (), "http://a/weights/buckets/0"))

            async def end_lease(self, end):
                self.at("end_lease")

            async def state(self):
                self.at("state")

            def at(self, where):
                if self.dies and where == point:
                    raise failure("the donor does not answer")

            def describe(self):
                return "a"

        it, port = scene(), Port()
        for sources in ([Donor(port, 2), it.ranks], [Donor(port, 2)], [Donor(port, 2), Donor(Port(), 2)]):
            joiner = it.servers["j"] = Server("j", {"digest": "it has not got all of them"}, times=1)
            result = await it.updates.warm(joiner.member, 2, sources)
            assert (result and outcomes(result)) == (None if len(sources) == 1 else {"j": "committed"})
        port.dies = False
        with pytest.raises(Refused, match="it has other bytes"):
            await it.updates.warm(Server("k", {"digest": "others"}).member, 2, [Donor(port, 2)])

    run(story())


def test_a_donor_is_told_when_the_joiner_has_the_version():
    async def story():
        told = []

        class Port:
            async def lease(self, asked):
                offer = Offer("a", (), (), f"http://a/weights/buckets/{len(told)}")
                return VersionLease(asked.version, DIGEST, offer)

            async def end_lease(self, end):
                told.append(end.location)
                raise Late("a lease ends by itself where nobody says that it has")

            def describe(self):
                return "a"

        joiners = Server("j"), Server("k", {"digest": "bad"}), Server("l", {"verify": "exit"})
        it = scene(*joiners)
        for joiner in joiners:
            with suppress(Refused):
                await it.updates.warm(joiner.member, 2, [Donor(Port(), 2)])
        assert told == [f"http://a/weights/buckets/{number}" for number in range(3)]

    run(story())


def test_a_version_that_is_published_meanwhile_goes_before_a_joiner():
    async def story():
        it = scene(Server("a"))
        await it.publish()
        joiner = Server("j")
        it.servers["j"] = joiner
        it.ranks.takes_s = 5.0
        warming = asyncio.create_task(it.updates.warm(joiner.member, 2, [it.ranks]))
        await asyncio.sleep(1)
        it.ranks.takes_s = 0.5
        began_s = clock()
        result = await it.publish(3)
        assert outcomes(result) == {"a": "committed", "j": "committed"}
        assert clock() - began_s < 2
        assert await warming is None, "it would be the version before"
        assert (joiner.version, it.servers["a"].version) == (3, 3)

    run(story())


def test_joiners_that_wait_for_their_turn_give_way_to_a_version():
    async def story():
        it = scene(Server("a"), takes_s=5.0)
        joiners = [Server(f"j{number}") for number in range(3)]
        it.servers |= {each.name: each for each in joiners}
        warming = [asyncio.create_task(it.updates.warm(each.member, 2, [it.ranks])) for each in joiners]
        await asyncio.sleep(1)
        assert outcomes(await it.updates.update(3, [it.servers["a"].member])) == {"a": "committed"}
        assert clock() < 1 + 5 + 1
        assert await asyncio.gather(*warming) == [None, None, None], "each begins again, with the new version"

    run(story())


def test_a_joiner_is_not_blamed_for_a_version_that_servers_have_and_that_is_not_live_yet():
    """The run's slots are still receiving it, and so the version before is asked for."""

    async def story():
        it = scene(Server("a"))
        joiner = Server("j")
        publishing = asyncio.create_task(it.publish(3))
        await asyncio.sleep(0.1)
        assert await it.updates.warm(joiner.member, 2, [it.ranks]) is None
        assert outcomes(await publishing) == {"a": "committed"}
        assert await it.updates.warm(joiner.member, 2, [it.ranks]) is None
        assert joiner.said == []

    run(story())


def test_a_joiner_that_dies_is_dead_and_holds_nobody_up():
    async def story():
        it = scene(Server("a"))
        await it.publish()
        joiner = Server("j", {"prepare": "exit"})
        it.servers["j"] = joiner
        assert outcomes(await it.updates.warm(joiner.member, 2, [it.ranks])) == {"j": "dead"}
        assert outcomes(await it.updates.update(3, [it.servers["a"].member])) == {"a": "committed"}

    run(story())
