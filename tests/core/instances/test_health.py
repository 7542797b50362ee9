"""States of a server: what leads where, which failures count together, and who can come back."""

from dataclasses import replace
from typing import get_args

import pytest

from ductile.core.instances.health import (
    LIVING,
    SERVING,
    TRANSITIONS,
    Cause,
    HealthRules,
    MemberStatus,
    ProbeReply,
    ServerHealth,
    TransitionRefused,
)
from ductile.core.instances.instances import InstanceId

RULES = HealthRules(failure_threshold=3, good_probes=2, progress_timeout_s=60.0)
CAUSES: tuple[Cause, ...] = get_args(Cause)
STATUSES: tuple[MemberStatus, ...] = get_args(MemberStatus)


def server(status: MemberStatus = "ready", version: int | None = 4, **fields) -> ServerHealth:
    given = {"instance": InstanceId("a:1"), "address": "http://a:1", "incarnation": "x", "since": 0.0}
    return ServerHealth(**{**given, "status": status, "version": version, **fields})


def reply(**fields) -> ProbeReply:
    return replace(ProbeReply("x", 4), **fields)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_leads_somewhere_or_is_refused_in_words(cause: Cause, status: MemberStatus) -> None:
    if (cause, status) in TRANSITIONS:
        after = server(status).moved(cause, "because", 5.0)
        assert after.status == TRANSITIONS[cause, status]
        assert after.reason == "because"
        assert after.since == (0.0 if after.status == status else 5.0)
    else:
        with pytest.raises(TransitionRefused, match=f"a:1 is {status}, so it cannot {cause}: "):
            server(status).moved(cause, "because", 5.0)


def test_only_a_commit_leads_back_from_distrust_and_nothing_from_death() -> None:
    into_serving = {pair for pair, after in TRANSITIONS.items() if after in SERVING and pair[1] not in SERVING}
    assert {cause for cause, _ in into_serving} == {"commit"}
    assert {after for (_, status), after in TRANSITIONS.items() if status in ("dead", "gone")} == {"gone"}
    assert {status for _, status in into_serving} <= LIVING


@pytest.mark.parametrize("status", ["joining", "warming", "stale", "dead", "gone"])
def test_no_number_of_good_probes_makes_it_serve(status: MemberStatus) -> None:
    one = server(status)
    for now in range(100):
        one = one.answered(reply(), float(now), RULES).generated(float(now), RULES)
    assert one.status == status


def test_a_suspect_is_ready_again_after_good_probes() -> None:
    one = server().unanswered("no reply", 1.0)
    assert (one.status, one.reason) == ("suspect", "no reply")
    one = one.answered(reply(), 2.0, RULES)
    assert one.status == "suspect"
    assert one.answered(reply(), 3.0, RULES).status == "ready"


def test_a_suspect_with_other_weights_is_not() -> None:
    suspect = server().unanswered("no reply", 1.0)
    changed = suspect.answered(reply(version=3), 2.0, RULES)
    assert changed.status == "stale"
    assert "serves version 3, and had committed version 4" in changed.reason
    lies = replace(suspect, digest="aa").answered(reply(digest="bb"), 2.0, RULES)
    assert lies.status == "stale"
    assert suspect.answered(reply(incarnation="y"), 2.0, RULES).status == "dead"


def test_a_version_that_was_committed_a_moment_ago_is_no_stray() -> None:
    """The reply to the commit may come after that of a probe."""
    one = server().sent(5, 1.0).answered(reply(version=5), 2.0, RULES)
    assert one.status == "ready"
    assert one.version == 4


def test_an_answer_that_is_older_than_the_commit_says_nothing_of_the_version() -> None:
    """The server was asked, then changed over, and the reply came last."""
    one = server().sent(5, 1.0).committed(5, "d", 3.0)
    assert one.answered(reply(version=4, asked_at=2.0), 4.0, RULES).status == "ready"
    assert one.answered(reply(version=4, asked_at=3.5), 4.0, RULES).status == "stale"


def test_two_failures_an_answer_and_two_failures_are_four_of_no_row() -> None:
    one = server()
    for replies in (False, False, True, False, False):
        one = one.answered(reply(), 1.0, RULES) if replies else one.unanswered("no reply", 1.0)
    assert one.probe_failures == 2


def test_an_answered_probe_ends_no_row_of_failed_requests() -> None:
    """A wedged engine answers probes."""
    one = server()
    for number in range(2):
        one = one.request_failed("no tokens", float(number), RULES)
        for count in range(9):
            assert (one.status, one.on_trial) == ("suspect", count >= RULES.good_probes)
            one = one.answered(reply(), number + 0.5, RULES)
    one = one.request_failed("no tokens", 3.0, RULES)
    assert (one.status, one.reason) == ("dead", "3 requests in a row failed, the last: no tokens")


def test_one_on_trial_is_ready_with_a_token_and_its_row_goes_on_until_a_completion() -> None:
    one = server().request_failed("HTTP 500", 1.0, RULES)
    for number in range(2, 4):
        one = one.answered(reply(), number, RULES, token_at=0.9)  # what it sampled before says nothing
    assert (one.status, one.on_trial) == ("suspect", True)
    one = one.answered(reply(), 4.0, RULES, token_at=3.5)
    assert (one.status, one.on_trial, one.request_failures) == ("ready", False, 1)
    again = one.sent(5, 4.5).committed(5, "", 5.0).request_failed("reset", 6.0, RULES)
    assert (one.sent(5, 4.5).committed(5, "", 5.0).status, again.request_failures) == ("ready", 2)
    assert one.generated(5.0, RULES).request_failures == 0


def test_one_on_trial_is_ready_with_its_first_completion_and_none_that_misses_a_probe_is_on_trial() -> None:
    one = server().request_failed("HTTP 500", 1.0, RULES)
    one = one.answered(reply(), 2.0, RULES).answered(reply(), 3.0, RULES)
    assert (one.status, one.on_trial) == ("suspect", True)
    silent = one.unanswered("no reply", 4.0, 3.5)
    assert (silent.status, silent.on_trial) == ("suspect", False)
    assert silent.answered(reply(), 5.0, RULES).generated(5.1, RULES).status == "suspect", "it has answered once"
    proven = one.generated(4.0, RULES)
    assert (proven.status, proven.on_trial, proven.request_failures) == ("ready", False, 0)


def test_requests_that_fail_side_by_side_are_one_failure() -> None:
    """A moment without a network resets all of a server's streams."""
    one = server()
    for _ in range(9):
        one = one.request_failed("reset", 5.0, RULES, began_at=4.0)
    assert (one.status, one.request_failures) == ("suspect", 1)
    for number in (6, 7):
        one = one.request_failed("reset", number + 0.5, RULES, began_at=number)
    assert one.status == "dead"


def test_a_completion_ends_it_and_ends_no_row_of_failed_probes() -> None:
    one = server().request_failed("x", 1.0, RULES).request_failed("x", 1.0, RULES).unanswered("no reply", 1.0)
    one = one.generated(2.0, RULES)
    assert (one.request_failures, one.probe_failures, one.status) == (0, 1, "suspect")


def test_a_commit_ends_neither() -> None:
    """The fleet recovers from another server's loss by an update; the survivor may be wedged all the same."""
    one = server().request_failed("x", 1.0, RULES).request_failed("x", 1.0, RULES)
    one = one.sent(5, 2.0).committed(5, "d", 3.0)
    assert (one.version, one.status, one.request_failures) == (5, "suspect", 2)
    assert one.request_failed("x", 4.0, RULES).status == "dead"
    stale = one.moved("distrust", "its bytes differ", 4.0).sent(6, 5.0).committed(6, "d", 6.0)
    assert (stale.status, stale.request_failures) == ("suspect", 2)


def test_one_that_was_not_sent_the_version_is_not_promoted() -> None:
    """It has finished to restart while an update was under way."""
    for one in (server("joining", None), server("stale"), server("warming", None), server("ready")):
        with pytest.raises(TransitionRefused, match="was not sent version 5"):
            one.committed(5, "d", 1.0)
    assert server("stale").sent(5, 0.0).committed(5, "d", 1.0).status == "ready"
    assert server("joining", None).sent(5, 0.0).committed(5, "d", 1.0).status == "ready"


def test_versions_never_go_back() -> None:
    with pytest.raises(TransitionRefused, match="versions never go back"):
        server().sent(3, 0.0)


def test_a_failed_update_is_not_trusted_and_an_aborted_one_changes_nothing() -> None:
    sent = server().sent(5, 0.0)
    assert sent.update_failed("digests differ", 1.0, keeps_old=False).status == "stale"
    kept = sent.update_failed("", 1.0, keeps_old=True)
    assert (kept.status, kept.version, kept.offered) == ("ready", 4, None)
    assert server("warming", None).update_failed("", 1.0, keeps_old=True).status == "stale"


def test_an_engine_that_samples_nothing_is_condemned_though_it_answers() -> None:
    one = server()
    for now in range(0, 60, 10):
        one = one.answered(reply(num_requests=2, num_sampled=100), float(now), RULES)
        assert one.status == "ready"
    one = one.answered(reply(num_requests=2, num_sampled=100), 60.0, RULES)
    assert one.status == "dead"
    assert "sampled no token for 60 s with 2 requests" in one.reason


@pytest.mark.parametrize("busy", [{"num_requests": 0}, {"num_requests": 2, "is_paused": True}])
def test_one_that_has_nothing_to_do_or_is_paused_is_not(busy) -> None:
    one = server()
    for now in range(0, 600, 10):
        one = one.answered(reply(num_sampled=100, **busy), float(now), RULES)
    assert one.status == "ready"


def test_a_slow_one_is_not() -> None:
    one = server()
    for now in range(0, 6000, 50):
        one = one.answered(reply(num_requests=1, num_sampled=now), float(now), RULES)
    assert one.status == "ready"


def test_the_time_without_a_token_begins_when_it_is_first_seen_with_requests() -> None:
    """One that is well may be probed by nobody for long (`enable_health_monitor`)."""
    one = server().answered(reply(num_sampled=100), 1.0, RULES).request_failed("reset", 500.0, RULES)
    one = one.answered(reply(num_requests=3, num_sampled=100), 501.0, RULES)
    assert one.status == "suspect"
    assert one.answered(reply(num_requests=3, num_sampled=100), 560.0, RULES).status == "suspect"
    assert one.answered(reply(num_requests=3, num_sampled=100), 561.0, RULES).status == "dead"
