"""Who is to blame, who may join when, and what a topology is."""

import pytest

from ductile.core.instances.health import HealthRules, ProbeReply, ServerHealth
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import (
    FleetTopology,
    TopologyDecision,
    TopologyMember,
    blame,
    joins_due,
    require_members,
    wedged_receivers,
)

RULES = HealthRules(failure_threshold=2, bucket_timeout_s=5.0)


def server(name: str, *others_heard_at: float, replied: bool = False) -> ServerHealth:
    """One that was probed at 0, and then once a second without a good reply; others were last heard of at these times,
    when its probes had failed."""
    one = ServerHealth(InstanceId(name), f"http://{name}:1", "x", 0.0, "ready", version=1)
    for number, heard_at in enumerate(others_heard_at, 1):
        one = one.unanswered("no reply", number + 0.5, float(number), heard_at, replied)
    return one


BLAMED = {
    "one of three is silent": ([server("a", 1.2, 2.2), server("b"), server("c")], "servers", "a"),
    "two of four are": ([server("a", 1, 2), server("b", 1, 2), server("c"), server("d")], "servers", "a b"),
    "all of three are": ([server("a", 0, 0), server("b", 0, 0), server("c", 0, 0)], "self", "a b c"),
    "all were, and one answers again": ([server("a", 0, 0), server("b", 0, 0), server("c")], "none", ""),
    "all were, one answers again, and one does not": (
        [server("a", 0, 0, 2.9, 3.9), server("b", 0, 0), server("c")],
        "servers",
        "a",
    ),
    "all were, and one is slower than another to answer again": (
        [server("a", 0, 0, 2.9), server("b", 0, 0), server("c")],
        "none",
        "",
    ),
    "another one answered just before all fell silent": (
        [server("a", 1.1, 1.1), server("b", 1.1, 1.1)],
        "self",
        "a b",
    ),
    "one that is alone": ([server("a", 0, 0)], "servers", "a"),
    "once is no row": ([server("a", 1), server("b")], "none", ""),
    "all answer with HTTP 500": ([server("a", 0, 0, replied=True), server("b", 0, 0, replied=True)], "servers", "a b"),
}


@pytest.mark.parametrize(("servers", "verdict", "names"), BLAMED.values(), ids=BLAMED)
def test_who_is_to_blame_for_silence(servers: list[ServerHealth], verdict: str, names: str) -> None:
    found = blame(servers, RULES)
    assert (found.verdict, " ".join(found.instances)) == (verdict, names)
    assert bool(found.reason) == (verdict != "none")


def receiver(name: str, num_buckets: int, since: float, update_id: str = "u", heard_at: float = 10.0) -> ServerHealth:
    """One that took its last bucket at `since`, and said so last at `heard_at`."""
    one, said = server(name).sent(2, 0.0), ProbeReply("x", 1, update_id=update_id, num_buckets=num_buckets)
    return one.answered(said, since, RULES).answered(said, heard_at, RULES)


@pytest.mark.parametrize(
    ("receivers", "wedged"),
    [
        ([receiver("a", 3, 1.0), receiver("b", 9, 9.0)], {"a"}),
        ([receiver("a", 3, 1.0), receiver("b", 3, 1.0)], set()),  # the sender is slow
        ([receiver("a", 3, 6.0), receiver("b", 9, 9.0)], set()),
        ([receiver("a", 3, 1.0)], set()),
        ([receiver("a", 3, 1.0, heard_at=1.0), receiver("b", 9, 9.0)], set()),  # it has not been asked since
        ([receiver("a", 3, 1.0), receiver("b", 9, 9.0, "another")], set()),
    ],
)
def test_a_receiver_that_takes_no_bucket_is_wedged_when_another_one_does(receivers, wedged) -> None:
    assert wedged_receivers(receivers, RULES).keys() == wedged


JOINS = {
    "none waits": ({}, 9.0, 3, (), None),
    "one has just come": ({"a": 9.0}, 10.0, 3, (), 4.0),
    "two join as one, when the first has waited": ({"a": 5.0, "b": 9.0}, 10.0, 3, ("a", "b"), None),
    "the window is the first one's": ({"a": 5.5, "b": 9.9}, 10.0, 3, (), 0.5),
    "nobody is left": ({"a": 9.9}, 10.0, 0, ("a",), None),
}


@pytest.mark.parametrize(("waiting", "now", "serving", "joins", "wait_s"), JOINS.values(), ids=JOINS)
def test_joins_wait_for_each_other(waiting, now, serving, joins, wait_s) -> None:
    found = joins_due(waiting, now, 5.0, serving)
    assert (found.now, found.wait_s) == (joins, pytest.approx(wait_s) if wait_s is not None else None)


def test_without_a_cooldown_each_joins_at_once() -> None:
    assert joins_due({InstanceId("a"): 10.0}, 10.0, 0.0, 3).now == ("a",)


def test_one_that_comes_and_goes_keeps_no_other_out() -> None:
    """A flapper's place in the line begins anew each time, the other one's does not."""
    due = [joins_due({InstanceId("a"): 0.0, InstanceId("f"): now}, now, 5.0, 3).now for now in (1.0, 2.0, 4.9, 5.0)]
    assert due == [(), (), (), ("a", "f")]


def member(name: str, incarnation: str = "x", version: int | None = 1) -> TopologyMember:
    return TopologyMember(InstanceId(name), f"http://{name}:1", incarnation, "ready", version)


def test_a_version_is_sent_to_the_receivers_that_do_not_have_it() -> None:
    receivers = (member("c", version=1), member("a", version=2), member("b", version=None))
    decision = TopologyDecision("keep", FleetTopology(3, receivers[:2]), receivers)
    assert [decision.receivers_without(version) for version in (1, 2, 3)] == [("a", "b"), ("c", "b"), ("c", "a", "b")]


def test_the_order_of_members_says_nothing() -> None:
    assert FleetTopology(3, (member("a"), member("b"))) == FleetTopology(3, (member("b"), member("a")))
    assert len({FleetTopology(3, (member("a"), member("b"))), FleetTopology(3, (member("b"), member("a")))}) == 1
    assert FleetTopology(3, (member("a"),)) != FleetTopology(4, (member("a"),))
    assert FleetTopology(3, (member("a"),)) != FleetTopology(3, (member("a", "y"),))


def test_a_target_outside_the_group_is_an_error() -> None:
    members = (member("a"), member("b"))
    assert require_members(["http://b:1"], members) == (member("b"),)
    assert require_members([], members) == ()
    with pytest.raises(ValueError, match="http://c:1 is not in the group, which has http://a:1, http://b:1"):
        require_members(["http://a:1", "http://c:1"], members)
