"""What becomes of a weight update at each server, and who is sent it again."""

import pytest

from ductile.core.instances.instances import InstanceId
from ductile.core.instances.update_outcomes import InstanceOutcome, Shortfall, lacking, next_attempt

A, B, C = map(InstanceId, "abc")


@pytest.mark.parametrize(
    ("short", "attempt", "again", "ended"),
    [
        ({}, 1, "", {"a": "committed"}),
        ({B: Shortfall("gone", "b is gone.")}, 1, "", {"a": "committed", "b": "dead"}),
        ({B: Shortfall("restarted", "b is new")}, 1, "", {"a": "committed", "b": "dead"}),
        ({B: Shortfall("silent", "b hangs")}, 1, "", {"a": "committed", "b": "stale"}),
        ({B: Shortfall("refused", "another model")}, 1, "", {"a": "committed", "b": "stale"}),
        ({B: Shortfall("undone", "its group broke")}, 1, "b", {"a": "committed"}),
        (
            {B: Shortfall("undone", "its group broke"), C: Shortfall("gone", "c")},
            2,
            "b",
            {"a": "committed", "c": "dead"},
        ),
        ({B: Shortfall("undone", "its group broke")}, 3, "", {"a": "committed", "b": "stale"}),
        ({B: Shortfall("undone", "it fails"), C: Shortfall("held_up", "b failed")}, 1, "bc", {"a": "committed"}),
        (
            {B: Shortfall("undone", "it fails"), C: Shortfall("held_up", "b failed")},
            2,
            "c",
            {"a": "committed", "b": "stale"},
        ),
    ],
)
def test_who_is_at_fault_is_not_sent_it_again(short, attempt, again, ended):
    decision = next_attempt((A,), short, attempt, 3)
    assert decision.again == tuple(again)
    assert {each.instance: each.outcome for each in decision.ended} == ended


def test_one_that_was_tried_several_times_says_so():
    [_, b] = next_attempt((A,), {B: Shortfall("undone", "its digest differs.")}, 3, 3).ended
    assert b == InstanceOutcome("b", "stale", "its digest differs (in 3 attempts)")


@pytest.mark.parametrize(
    ("healthy", "waited_s", "what"),
    [(2, 99, "go_on"), (1, 0, "wait"), (1, 4.9, "wait"), (1, 5, "fail"), (0, 6, "fail")],
)
def test_a_run_with_too_few_servers_waits_so_long(healthy, waited_s, what):
    assert lacking(healthy, 2, waited_s, 5) == what
