"""Judges servers: the only one that takes any out. Probes, requests and updates bring evidence.

nobody listens; another process has the address; another key is wanted     hard: out at once
no answer, no token, a lost connection                                     counted, in rows; silence with a quorum
an update that failed                                                      its weights are not trusted
"""

from collections.abc import Callable, Iterable

from ductile.core.instances.fleet_state import FleetState
from ductile.core.instances.health import HealthRules, ProbeReply, ServerHealth
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyMember, blame, wedged_receivers
from ductile.core.instances.update_outcomes import InstanceOutcome
from ductile.fleet.registry.discovery import Discovery
from ductile.fleet.servers.monitor import ProbeOutcome, reply_of
from ductile.fleet.servers.requirements import Requirements
from ductile.fleet.servers.server_pool import ServerPool
from ductile.fleet.servers.shared_state import SharedFleetState
from ductile.messages.updates import Digest
from ductile.roles import Failure, Interrupted, Late, NotTaken, Refused, SlotLost


class Judge:
    """Changes the state, and nothing else; what follows is for those that hear of its changes."""

    def __init__(
        self,
        state: SharedFleetState,
        rules: HealthRules,
        discovery: Discovery,
        pool: ServerPool,
        has_authority: bool,
        tell: Callable[[str], None],
    ) -> None:
        """has_authority: of several fleets one rules (`ductile.fleet.registry.authority`)."""
        self.rules = rules
        self.own_fault = ""
        """Reason for which no server can be asked, where the fault is on our side, a sentence."""
        self._state, self._discovery, self._pool, self._tell = state, discovery, pool, tell
        self._warns = not has_authority
        self._ruled_at = float("-inf" if has_authority else "inf")
        """Time at which our rule was last renewed."""
        self._foreign: dict[tuple[str, int], float] = {}
        """Address and epoch of servers with epochs of others, and when they were first seen."""
        self._own_digests: frozenset[Digest] = frozenset()
        self._had: set[str] = set()
        """Incarnations of the servers that have been members."""
        self._requirements = Requirements()

    def require(self, requirements: Requirements, own_digests: frozenset[Digest]) -> None:
        """Let only servers join, from now on, that meet these. own_digests: of versions that this run has given to
        servers before it was gone on with."""
        self._requirements, self._own_digests = requirements, own_digests

    def rule_renewed(self, at: float) -> None:
        """Note that our rule was renewed at this time."""
        self._ruled_at = at

    # -- Probes -----------------------------------------------------------------------------------------------------

    def probed(self, address: str, outcome: ProbeOutcome) -> None:
        """Note what a probe of the address has found, and take out whoever is to blame."""
        now, server = self._state.clock(), self._state.now.at(address)
        if outcome.kind == "answered" and outcome.state is not None:
            unmet = self._requirements.unmet(address, outcome.state)
            if server is not None or not outcome.state.leaving:
                self._answered(address, reply_of(outcome.state, outcome.asked_at), unmet, now)
            if outcome.state.leaving:
                self._leaves(address, outcome.state.incarnation, now)
        elif outcome.kind == "unasked":
            self._blame_ourselves(outcome.reason)
        elif outcome.kind == "denied":
            self._reject(address, "", f"{outcome.reason}; it is not asked again")
        if server is not None:
            match outcome.kind:
                case "closed" if server.status == "draining":
                    self._state.apply(server.instance, lambda each: each.moved("remove", "it has left", now))
                case "closed" | "denied":
                    self.lost(server.instance, outcome.reason)
                case "silent" | "odd":
                    self._unanswered(server, outcome, now)
                case _:
                    pass
        self._condemn(now)

    def _answered(self, address: str, reply: ProbeReply, unmet: str, now: float) -> None:
        self.own_fault = ""
        state = self._state.now
        server = state.at(address)
        if server is not None and server.incarnation != reply.incarnation and reply.asked_at < server.asked_at:
            return  # said late, by the process before
        if reply.epoch > state.epoch and any(each.incarnation == reply.incarnation for each in state.servers.values()):
            self._state.fence(f"the server {address}")
        if server is not None:
            token_at = self._pool.heard_at(server.instance)
            self._state.apply(server.instance, lambda each: each.answered(reply, now, self.rules, token_at))
        elif twin := next((each for each in state.living if each.incarnation == reply.incarnation), None):
            self._reject(address, reply.incarnation, f"{address} is the server that the run has at {twin.address}")
        elif unmet:
            self._reject(address, reply.incarnation, unmet)
        elif not self._discovery.why_not(address, reply.incarnation) and not self._state.fenced:
            if reply.epoch > state.epoch and self._foreign.setdefault((address, reply.epoch), now) >= self._ruled_at:
                return  # a new ruler's, unless we still rule after that
            is_ours = reply.digest in self._own_digests or reply.incarnation in self._had
            self._had.add(reply.incarnation)
            if reply.epoch and self._warns and not is_ours:
                self._warns = False  # it is said once
                self._tell(
                    f"{address} has weights of another run: if that one still goes on it ends, as this one has its "
                    "servers from now on (with a registry, the later of two runs waits)"
                )
            self._state.change(lambda state: state.above(reply.epoch).joined(address, reply, now))

    def _leaves(self, address: str, incarnation: str, now: float) -> None:
        """Drain the server at the address, whose process says that it is leaving."""
        found = self._state.now.at(address)
        if found is not None and found.incarnation == incarnation and found.status != "draining":
            self._state.apply(found.instance, lambda each: each.moved("drain", "it says that it is leaving", now))

    def _reject(self, address: str, incarnation: str, why: str) -> None:
        """Keep the process there out, and say so once."""
        if self._discovery.reject(address, incarnation, why):
            self._tell(why)

    def _unanswered(self, server: ServerHealth, outcome: ProbeOutcome, now: float) -> None:
        others = [each for each in self._state.now.living if each.instance != server.instance]
        heard = [max(each.heard_at, self._pool.heard_at(each.instance)) for each in others]
        others_at, replied = max(heard, default=float("-inf")), outcome.kind == "odd"
        token_at = self._pool.heard_at(server.instance)
        self._state.apply(
            server.instance,
            lambda each: each.unanswered(outcome.reason, now, outcome.asked_at, others_at, replied, token_at),
        )

    def _condemn(self, now: float) -> None:
        """Take out the servers that are to blame for what was found."""
        living = self._state.now.living
        verdict = blame(living, self.rules)
        if verdict.verdict == "self":
            self._blame_ourselves(verdict.reason)
        else:
            for instance in verdict.instances:
                self.lost(instance, verdict.reason)
        for instance, why in wedged_receivers(living, self.rules).items():
            self.lost(instance, why)

    def _blame_ourselves(self, why: str) -> None:
        if not self.own_fault:
            self._tell(why)
        self.own_fault = why

    # -- Requests ---------------------------------------------------------------------------------------------------

    def request_ended(self, server: InstanceId, failure: Failure | None, began_at: float) -> None:
        """Note how a request has ended that the server has had since `began_at`. A server that refuses one is kept
        out: it would refuse the next one as well."""
        now = self._state.clock()
        if failure is None:
            self._state.apply(server, lambda each: each.generated(now, self.rules))
        elif isinstance(failure, SlotLost):
            found = self._state.now.servers.get(server)
            if found is not None and found.status == "draining":
                self._state.apply(server, lambda each: each.moved("remove", "it has left", now))
            else:
                self.lost(server, str(failure))
        elif isinstance(failure, Interrupted | Late):
            self._state.apply(server, lambda each: each.request_failed(str(failure), now, self.rules, began_at))
        elif isinstance(failure, Refused) and not isinstance(failure, NotTaken):
            found = self._state.now.servers.get(server)
            if found is not None and found.is_living:
                self._reject(found.address, found.incarnation, f"{server} has refused a request: {failure}")
                self.lost(server, f"it has refused a request: {failure}")

    def lost(self, server: InstanceId, why: str) -> None:
        """Take out a server of which it is certain that it cannot be used any more."""
        self._state.apply(server, lambda each: each.moved("die", why, self._state.clock()))

    # -- Updates ----------------------------------------------------------------------------------------------------

    def update_began(self, version: int, receivers: Iterable[InstanceId]) -> tuple[TopologyMember, ...]:
        """Note that the receivers are sent a version, and return those that are still there. Raises TransitionRefused
        for a version that is older than what one of them has."""
        wanted, now = [*receivers], self._state.clock()

        def send(state: FleetState) -> FleetState:
            for server in [state.of(each) for each in wanted if each in state.servers]:
                if server.is_living:
                    state = state.changed(server.sent(version, now))
            return state

        servers = self._state.change(send).servers
        return tuple(TopologyMember.of(servers[each]) for each in wanted if each in servers and servers[each].is_living)

    def update_ended(self, version: int, digest: Digest, outcomes: Iterable[InstanceOutcome]) -> None:
        """Note a version's outcome at each of its receivers. Only those that were sent it can have committed it."""
        now = self._state.clock()
        for each in outcomes:
            id, why = InstanceId(each.instance), each.reason
            match each.outcome:
                case "committed":
                    self._state.apply(id, lambda server: server.committed(version, digest, now))
                case "dead":
                    self.lost(id, why)
                case "stale":
                    self._state.apply(id, lambda server, why=why: server.update_failed(why, now, keeps_old=False))

    def update_aborted(self, receivers: Iterable[InstanceId], why: str) -> None:
        """Note that an update has ended before any receiver changed over: they serve what they had."""
        why = f"the version that it was sent was aborted: {why}"
        for each in receivers:
            self._state.apply(each, lambda server: server.update_failed(why, self._state.clock(), keeps_old=True))
