"""Health of one server, as its fleet judges it. Pure: answers, failures and the time come in, a judgement with its
reason comes out.

    joining → warming → ready ⇄ suspect → draining → gone
                 stale ⇠ any of them ⇢ dead

1. `TRANSITIONS` has every way from one state to another; whatever is not there is refused with a sentence.
2. A server serves (ready, suspect) only after it has committed and verified a version. No probe brings back one that is
   stale or dead: a stale one takes part in the next update, a dead one joins as a new member.
3. A server is condemned by silence, never for being slow: an answer that comes late ends a row of failed probes, and so
   do tokens that come in the meantime.
4. Probes and requests are counted apart: a wedged engine answers probes. Good probes end only what probes have found.
   A suspect whose requests have failed they put on trial: it gets one request at a time, until a token comes. Its row
   of failed requests ends with a completion alone: one that fails after some tokens goes on in it, and new weights do
   not mend an engine. Requests that fail side by side are one failure.
5. An incarnation is one process. Another incarnation at the same address is another member, without a history.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ductile.core.instances.instances import InstanceId

MemberStatus = Literal["joining", "warming", "ready", "suspect", "draining", "stale", "dead", "gone"]
"""joining: found, and waits for weights. warming: weights are on their way. ready: has a committed version. suspect:
as ready, and has failed lately; it is asked last. draining: finishes what it has. stale: lives, and its weights are not
trusted. dead: taken out. gone: has left as it was told."""

SERVING: frozenset[MemberStatus] = frozenset({"ready", "suspect"})
LIVING: frozenset[MemberStatus] = frozenset({"joining", "warming", "ready", "suspect", "draining", "stale"})

Cause = Literal["warm", "commit", "doubt", "recover", "distrust", "die", "drain", "remove"]

TRANSITIONS: "MappingProxyType[tuple[Cause, MemberStatus], MemberStatus]" = MappingProxyType(
    {
        ("warm", "joining"): "warming",
        ("warm", "stale"): "warming",
        ("commit", "warming"): "ready",
        ("commit", "ready"): "ready",
        ("commit", "suspect"): "ready",
        ("commit", "stale"): "ready",
        ("commit", "draining"): "draining",
        ("doubt", "ready"): "suspect",
        ("doubt", "suspect"): "suspect",
        ("recover", "suspect"): "ready",
        ("distrust", "warming"): "stale",
        ("distrust", "ready"): "stale",
        ("distrust", "suspect"): "stale",
        ("distrust", "draining"): "stale",
        ("distrust", "stale"): "stale",
        **{("die", status): "dead" for status in LIVING},
        **{("drain", status): "draining" for status in LIVING},
        **{("remove", status): "gone" for status in LIVING},
        ("remove", "dead"): "gone",
    }
)
"""State that each cause leads to; a pair that is missing is refused."""

_REFUSED: dict[Cause, str] = {
    "warm": "only one that is joining or stale gets weights of its own",
    "commit": "only a living server that was sent a version makes it live",
    "doubt": "only one that serves is doubted",
    "recover": "only a committed update makes it ready again, and a dead one joins as a new member",
    "distrust": "it has no weights to distrust",
    "die": "it is lost already",
    "drain": "it is lost already",
    "remove": "it has left already",
}


class TransitionRefused(ValueError):
    """A cause that leads nowhere from a server's state. The text is a sentence."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """Rules by which failures count. Seconds are of the clock that `now` is of."""

    failure_threshold: int = 3
    """Failures in a row that condemn, of either kind."""
    good_probes: int = 2
    """Answers in a row that make a suspect ready again, or put it on trial where its requests have failed."""
    progress_timeout_s: float = 120.0
    """Longest time that a server with requests may sample nothing."""
    bucket_timeout_s: float = 10.0
    """Longest time that a receiver may take no bucket while another receiver of the same update does."""


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """Reply of a server to a probe."""

    incarnation: str
    version: int
    asked_at: float = float("inf")
    """Time at which the probe was sent: what it says may be older than a commit that we know of."""
    digest: str = ""
    epoch: int = 0
    num_requests: int = 0
    """Requests that it has, also those that wait: an engine that is wedged as they come runs none."""
    is_paused: bool = False
    num_sampled: int = 0
    update_id: str = ""
    """Update that it is receiving; "" when it receives none."""
    num_buckets: int = 0


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """One incarnation of a server. Every method returns the server as it is after that, or raises
    `TransitionRefused`."""

    instance: InstanceId
    address: str
    incarnation: str
    since: float
    """Time at which it came to its state."""
    status: MemberStatus = "joining"
    reason: str = ""
    """Reason for its state, a sentence."""
    version: int | None = None
    """Version that it has committed, and that was verified; None before the first."""
    digest: str = ""
    committed_at: float = 0.0
    offered: int | None = None
    """Version that it is being sent."""
    on_trial: bool = False
    """True for a suspect that answers probes, and whose requests have failed: it gets one at a time."""
    probe_failures: int = 0
    failures_alone: int = 0
    """Latest of `probe_failures`, in a row, that are not the network's fault: meanwhile something was heard of another
    server, or of this one itself."""
    good_probes: int = 0
    request_failures: int = 0
    failed_at: float = float("-inf")
    """Time of the latest failure of a request that was counted."""
    asked_at: float = 0.0
    """Time at which its latest probe was sent."""
    told_at: float = 0.0
    """Time at which it was known what had become of its latest probe."""
    heard_at: float = 0.0
    """Time at which it last answered a probe, or came."""
    num_sampled: int = 0
    is_busy: bool = False
    """True where it had requests to sample for at its latest answer."""
    progressed_at: float = 0.0
    """Time at which it last sampled a token, had nothing to do, or was first seen with something to do."""
    bucket: tuple[str, int] = ("", 0)
    """Update that it receives, and buckets of it."""
    bucket_at: float = 0.0
    """Time at which it last took a bucket."""

    @property
    def is_serving(self) -> bool:
        return self.status in SERVING

    @property
    def is_living(self) -> bool:
        return self.status in LIVING

    def moved(self, cause: Cause, reason: str, now: float) -> "ServerHealth":
        """Raises TransitionRefused."""
        after = TRANSITIONS.get((cause, self.status))
        if after is None:
            raise TransitionRefused(f"{self.instance} is {self.status}, so it cannot {cause}: {_REFUSED[cause]}")
        since = self.since if after == self.status else now
        return replace(self, status=after, reason=reason, since=since, on_trial=False)

    def answered(
        self, reply: ProbeReply, now: float, rules: HealthRules, token_at: float = float("-inf")
    ) -> "ServerHealth":
        """The server has answered a probe, which tells about the process and its version, and nothing of whether it can
        generate. One that is not living stays as it is.

        token_at: when a token of one of our requests last came from it.
        """
        if not self.is_living:
            return self
        if reply.incarnation != self.incarnation:
            return self.moved("die", "its process has ended, and another one has its address", now)
        seen = replace(
            self,
            probe_failures=0,
            failures_alone=0,
            asked_at=max(self.asked_at, min(reply.asked_at, now)),  # an answer may be late, after the next question
            told_at=now,
            good_probes=self.good_probes + 1,
            heard_at=now,
        )._progressed(reply, now)
        if (
            self.version is not None
            and self.status in ("ready", "suspect", "draining")
            and (why := self._strays(reply))
        ):
            return seen.moved("distrust", why, now)
        if now - seen.progressed_at >= rules.progress_timeout_s:
            idle = now - seen.progressed_at
            why = f"it answers probes, and has sampled no token for {idle:.0f} s with {reply.num_requests} requests"
            return seen.moved("die", why, now)
        return seen._recovered(now, rules, token_at)

    def unanswered(
        self,
        why: str,
        now: float,
        asked_at: float = float("inf"),
        others_heard_at: float = float("-inf"),
        replied: bool = False,
        token_at: float = float("-inf"),
    ) -> "ServerHealth":
        """The server has not answered a probe as it should. Whether it is to blame, `blame` says. One that has sent
        tokens since the probe was sent is slow, and not silent: it is doubted, and its row of failures ends.

        asked_at: when the probe was sent. others_heard_at: when another server was last heard of. replied: there was a
        reply, such as HTTP 500. token_at: when a token of one of our requests last came from it.
        """
        if not self.is_living:
            return self
        # Since the middle of the probe before: as all fall silent at once, an answer of another server may still come
        # after that one was sent. And each that is well answers once in so long.
        is_alone = replied or others_heard_at >= (self.asked_at + self.told_at) / 2
        is_slow = token_at > asked_at
        failed = replace(
            self,
            probe_failures=0 if is_slow else self.probe_failures + 1,
            failures_alone=self.failures_alone + 1 if is_alone and not is_slow else 0,
            good_probes=0,
            asked_at=min(asked_at, now),
            told_at=now,
        )
        return failed.moved("doubt", why, now) if self.is_serving else failed

    def request_failed(
        self, why: str, now: float, rules: HealthRules, began_at: float = float("inf")
    ) -> "ServerHealth":
        """A request of ours has failed by the server's fault. (A refusal, such as a wrong key, is none.)

        began_at: when the server got it. One that was there already as the failure before it came is of the same
        incident, which counts once.
        """
        if not self.is_living:
            return self
        failed = replace(self, good_probes=0)
        if began_at > self.failed_at:
            failed = replace(failed, request_failures=self.request_failures + 1, failed_at=now)
        if failed.request_failures >= rules.failure_threshold:
            return failed.moved("die", f"{failed.request_failures} requests in a row failed, the last: {why}", now)
        return failed.moved("doubt", why, now) if self.is_serving else failed

    def generated(self, now: float, rules: HealthRules) -> "ServerHealth":
        """A request of ours has come to its end, which ends a row of failed ones."""
        return replace(self, request_failures=0)._recovered(now, rules) if self.is_living else self

    def sent(self, version: int, now: float) -> "ServerHealth":
        """The server is among those that get this version, from now on. Raises TransitionRefused for a version that is
        older than the server's."""
        self._require_no_older(version)
        if not self.is_living:
            raise TransitionRefused(f"{self.instance} is {self.status}, so it cannot be sent version {version}")
        offered = replace(self, offered=version, bucket_at=now)
        return offered.moved("warm", f"it is sent version {version}", now) if self.status == "joining" else offered

    def committed(self, version: int, digest: str, now: float) -> "ServerHealth":
        """The server has made a version live, and it is verified.

        Raises TransitionRefused for a version that it was not sent: one that has come back while an update was under
        way has none of it. A suspect stays one, and failures stay counted.
        """
        self._require_no_older(version)
        if self.offered != version:
            raise TransitionRefused(f"{self.instance} was not sent version {version}, so it cannot have committed it")
        live = self.moved("commit", f"it has committed version {version}", now)
        live = replace(live, version=version, digest=digest, committed_at=now, offered=None)
        has_failed = live.probe_failures or (live.request_failures and self.status != "ready")
        if live.status == "ready" and (self.status == "suspect" or has_failed):
            return live.moved("doubt", self.reason if self.status == "suspect" else "it has failed lately", now)
        return live

    def update_failed(self, why: str, now: float, keeps_old: bool) -> "ServerHealth":
        """The version that the server was sent did not become live. keeps_old: it had staged it beside the old one,
        and says that it has thrown it away; it then serves as before."""
        after = replace(self, offered=None)
        if not self.is_living:
            return after
        if keeps_old and self.status in ("ready", "suspect", "draining"):
            return after
        return after.moved("distrust", why, now)

    def _progressed(self, reply: ProbeReply, now: float) -> "ServerHealth":
        bucket = (reply.update_id, reply.num_buckets)
        is_busy = reply.num_requests > 0 and not reply.is_paused
        is_stuck = is_busy and self.is_busy and reply.num_sampled == self.num_sampled
        return replace(
            self,
            is_busy=is_busy,
            num_sampled=reply.num_sampled,
            progressed_at=self.progressed_at if is_stuck else now,
            bucket=bucket,
            bucket_at=self.bucket_at if bucket == self.bucket else now,
        )

    def _strays(self, reply: ProbeReply) -> str:
        """Return why the server's weights are not those that it committed; "" when they are, or may be in a moment."""
        if reply.asked_at <= self.committed_at:
            return ""
        if reply.version not in (self.version, self.offered):
            return f"it serves version {reply.version}, and had committed version {self.version}"
        if reply.version == self.version and self.digest and reply.digest and reply.digest != self.digest:
            return f"the digest of its version {self.version} is {reply.digest}, and was {self.digest}"
        return ""

    def _recovered(self, now: float, rules: HealthRules, token_at: float = float("-inf")) -> "ServerHealth":
        if self.status != "suspect" or self.probe_failures or self.good_probes < rules.good_probes:
            return self
        if self.request_failures and token_at <= self.failed_at:
            return replace(self, on_trial=True)
        return self.moved("recover", "it answers again", now)

    def _require_no_older(self, version: int) -> None:
        if self.version is not None and version < self.version:
            raise TransitionRefused(
                f"{self.instance} has version {self.version}, and versions never go back, to {version}"
            )
