from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.rollouts.staleness import StalenessBound, admission, freshness, take_order


@dataclass
class Circle:
    """The dumb twin of the loop: groups are started, finish in any order, are taken or thrown away."""

    bound: StalenessBound
    num_steps: int
    version: int = 0
    taken: int = 0
    running: list[int] = field(default_factory=list)  # the version that each group's first token came from
    waiting: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    num_dropped: int = 0

    def start(self):
        allowed = admission(
            self.bound,
            outstanding=len(self.running) + len(self.waiting),
            taken=self.taken,
            steps_left=self.num_steps - self.version,
        )
        self.running += [self.version] * allowed.num_groups
        return allowed

    def takeable(self):
        return take_order(
            self.bound, version=self.version, taken=self.taken, finished=self.waiting, running=self.running
        )

    def take(self):
        oldest = self.waiting.pop(self.takeable()[0])
        verdict = freshness(self.bound, version=self.version, oldest_version=oldest)
        if not verdict.fresh:
            self.num_dropped += 1
            return
        self.ages.append(verdict.age)
        self.taken += 1
        if self.taken == self.bound.groups_per_step:
            self.version, self.taken = self.version + 1, 0


@settings(deadline=None)
@given(
    groups_per_step=st.integers(1, 5),
    max_async_level=st.integers(0, 4),
    max_off_policy_steps=st.integers(0, 4),
    num_steps=st.integers(1, 6),
    on_stale=st.sampled_from(["drop", "wait"]),
    data=st.data(),
)
def test_never_beyond_the_bound_and_never_stuck(
    groups_per_step, max_async_level, max_off_policy_steps, num_steps, on_stale, data
):
    bound = StalenessBound(groups_per_step, max_async_level, max_off_policy_steps, on_stale)
    circle = Circle(bound, num_steps)
    moves = 0
    while circle.version < num_steps:
        circle.start()
        assert circle.running or circle.waiting, "nothing runs, nothing waits, and nothing may be started"
        assert circle.running or circle.takeable(), "nothing runs, and nothing may be taken"
        if circle.running and (not circle.takeable() or data.draw(st.booleans())):
            # The adversary keeps the oldest group running for as long as it can.
            index = data.draw(st.integers(0, len(circle.running) - 1)) if moves < 40 else 0
            circle.waiting.append(circle.running.pop(index))
        else:
            circle.take()
        moves += 1
        assert moves < 2000
    assert max(circle.ages) <= max_off_policy_steps
    assert len(circle.ages) == num_steps * groups_per_step
    if bound.ahead == 0:
        assert set(circle.ages) == {0}
    if on_stale == "wait":
        assert not circle.num_dropped
    assert not circle.running, "what nobody trains on was started"


def test_nothing_is_started_that_would_be_too_old_on_arrival():
    bound = StalenessBound(groups_per_step=4, max_async_level=3, max_off_policy_steps=0)
    assert admission(bound, outstanding=0, taken=0, steps_left=9).num_groups == 4


def test_admission_table():
    bound = StalenessBound(groups_per_step=4, max_async_level=1, max_off_policy_steps=8)
    for outstanding, taken, steps_left, num_groups, reason in [
        (0, 0, 9, 8, "0 groups outstanding"),
        (5, 2, 9, 1, "5 groups outstanding"),
        (4, 4, 9, 0, "max_async_level 1"),
        (1, 0, 1, 3, "1 group outstanding, 1 step to fill"),
        (2, 2, 1, 0, "every step that is left"),
    ]:
        verdict = admission(bound, outstanding=outstanding, taken=taken, steps_left=steps_left)
        assert verdict.num_groups == num_groups
        assert reason in verdict.reason


def test_freshness_says_why():
    bound = StalenessBound(groups_per_step=4, max_async_level=1, max_off_policy_steps=2)
    assert freshness(bound, version=5, oldest_version=3).fresh
    stale = freshness(bound, version=6, oldest_version=3)
    assert not stale.fresh
    assert stale.reason == "its oldest token is 3 versions old, max_off_policy_steps is 2"
    strict = StalenessBound(groups_per_step=4, max_async_level=1, max_off_policy_steps=0)
    assert "is 1 version old" in freshness(strict, version=1, oldest_version=0).reason


def test_take_order_table():
    def order(on_stale, version, taken, finished, running):
        bound = StalenessBound(groups_per_step=2, max_async_level=2, max_off_policy_steps=2, on_stale=on_stale)
        return take_order(bound, version=version, taken=taken, finished=finished, running=running)

    for version, taken, finished, running, expected in [
        (2, 0, [2, 0, 1], [], [1, 2, 0]),  # the oldest first
        (2, 0, [2, 2], [1, 1], [0, 1]),  # step 3 has places for both that run
        (2, 0, [2, 2], [0], [0]),  # this step's second place is for the one that version 3 would be too late for
        (2, 1, [2, 2], [0], []),
        (2, 0, [1, 2], [0, 1], [0]),
        (2, 0, [2, 2, 2], [0, 1, 1], [0]),  # of the four places until step 3, three are kept
        (3, 0, [3, 3], [0], [0, 1]),  # too old already: nobody waits for it
    ]:
        assert order("wait", version, taken, finished, running) == expected, (version, taken, finished, running)
    assert order("drop", 2, 1, [2, 0], [0]) == [0, 1]
