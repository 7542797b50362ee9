"""A fleet through any history: epochs and versions only go up, and no serving server was never given weights (I7)."""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ductile.core.instances.fleet_state import FleetState
from ductile.core.instances.health import HealthRules, ProbeReply, ServerHealth, TransitionRefused
from tests.nightly import examples

RULES = HealthRules(failure_threshold=2)
ADDRESSES = ["http://a:1", "http://b:1", "http://c:1"]
address = st.sampled_from(ADDRESSES)


class Histories(RuleBasedStateMachine):
    """What a fleet can see, in any order. The model: for each process the version that it was last told to commit, and
    how many processes there have been at each address."""

    def __init__(self) -> None:
        super().__init__()
        self.state = FleetState()
        self.before = self.state
        self.now = 0.0
        self.process = dict.fromkeys(ADDRESSES, 0)
        self.tokens_at = dict.fromkeys(ADDRESSES, -1.0)
        self.committed: dict[str, int] = {}
        self.newest = 0

    def change(self, made: FleetState) -> None:
        self.before, self.state = self.state, made
        self.now += 1.0

    def judge(self, at: str, change: Callable[[ServerHealth], ServerHealth]) -> bool:
        server = self.state.at(at)
        if server is None:
            return False
        try:
            self.change(self.state.changed(change(server)))
        except TransitionRefused:
            return False
        return True

    def incarnation(self, at: str) -> str:
        return f"{at}/{self.process[at]}"

    def reply(self, at: str) -> ProbeReply:
        return ProbeReply(self.incarnation(at), self.committed.get(self.incarnation(at), 0))

    @rule(at=address, samples=st.booleans())
    def answers(self, at: str, samples: bool) -> None:
        if samples:
            self.tokens_at[at] = self.now
        if self.state.at(at) is None:
            self.change(self.state.joined(at, self.reply(at), self.now))
        else:
            self.judge(at, lambda one: one.answered(self.reply(at), self.now, RULES, self.tokens_at[at]))

    @rule(at=address)
    def is_found_again(self, at: str) -> None:
        self.change(self.state.joined(at, self.reply(at), self.now))

    @rule(at=address)
    def restarts(self, at: str) -> None:
        self.process[at] += 1

    @rule(at=address)
    def is_silent(self, at: str) -> None:
        self.judge(at, lambda one: one.unanswered("silent", self.now))

    @rule(at=address)
    def fails_a_request(self, at: str) -> None:
        self.judge(at, lambda one: one.request_failed("failed", self.now, RULES))

    @rule(at=address)
    def generates(self, at: str) -> None:
        self.judge(at, lambda one: one.generated(self.now, RULES))

    @rule(at=address, cause=st.sampled_from(["die", "drain", "remove", "doubt", "distrust", "warm"]))
    def is_moved(self, at: str, cause) -> None:
        self.judge(at, lambda one: one.moved(cause, "told", self.now))

    @rule(receivers=st.sets(address), fails=st.sets(address))
    def update(self, receivers: set[str], fails: set[str]) -> None:
        """An update to some, of which some do not commit. Who has restarted meanwhile commits nothing."""
        self.newest += 1
        version = self.newest
        sent = [at for at in sorted(receivers) if self.judge(at, lambda one: one.sent(version, self.now))]
        for at in sent:
            server = self.state.at(at)
            if server is None or at in fails or server.incarnation != self.incarnation(at):
                self.judge(at, lambda one: one.update_failed("failed", self.now, False))
            else:
                self.committed[server.incarnation] = version
                self.judge(at, lambda one: one.committed(version, "", self.now))

    @rule()
    def a_new_attempt(self) -> None:
        self.change(self.state.above(self.state.epoch))

    @invariant()
    def nothing_goes_back(self) -> None:
        assert self.state.epoch >= self.before.epoch
        assert self.state.membership >= self.before.membership
        assert (self.state.version or 0) >= (self.before.version or 0)

    @invariant()
    def a_change_of_those_that_serve_is_a_new_epoch(self) -> None:
        ids = [{server.instance for server in each.serving} for each in (self.before, self.state)]
        assert (ids[0] == ids[1]) or self.state.membership > self.before.membership

    @invariant()
    def who_serves_has_committed_what_it_is_said_to_have(self) -> None:
        for server in self.state.serving:
            assert server.version is not None
            assert self.committed[server.incarnation] == server.version

    @invariant()
    def who_is_ready_answers_and_has_sampled_since_a_request_failed(self) -> None:
        for server in self.state.servers.values():
            if server.status == "ready":
                assert not server.probe_failures
                assert not server.request_failures or self.tokens_at[server.address] > server.failed_at
            assert not server.on_trial or (server.status == "suspect" and server.request_failures)

    @invariant()
    def an_address_has_one_living_server_and_an_id_one_process(self) -> None:
        living = [server.address for server in self.state.living]
        assert len(living) == len({*living})
        for server in self.state.servers.values():
            was = self.before.servers.get(server.instance)
            assert was is None or was.incarnation == server.incarnation
            assert was is None or was.is_living or not server.is_living

    @invariant()
    def a_new_member_has_no_history(self) -> None:
        for server in self.state.servers.values():
            if server.instance not in self.before.servers:
                assert (server.status, server.version) == ("joining", None)
                assert not server.probe_failures
                assert not server.request_failures


Histories.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestHistories = Histories.TestCase


def test_the_time_of_the_last_change_of_those_that_serve_never_goes_back() -> None:
    """One that is lost in the middle of an update is lost later than the update, by its own clock, has ended."""
    state = FleetState()
    for at in ADDRESSES[:2]:
        state = state.joined(at, ProbeReply(f"process {at}", 0), 1.0)
    first, second = state.servers
    state = state.changed(state.of(first).sent(1, 2.0))
    state = state.changed(state.of(first).committed(1, "digest", 2.0))
    state = state.changed(state.of(second).sent(1, 3.0))
    state = state.changed(state.of(first).moved("die", "it was killed", 10.5))
    assert (state.membership, state.membership_since) == (2, 10.5)
    state = state.changed(state.of(second).committed(1, "digest", 10.0))
    assert (state.membership, state.membership_since) == (3, 10.5)
    assert state.of(second).since == 10.0
