"""Somebody dies, or stops, at every point of a change. The others say so in time, and go on where they can."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from ductile.fabric import modes
from ductile.records import Formation
from ductile.trainer import prepare, resize
from ductile.trainer.worker import TrainRole
from tests.trainer.fleet import Fleet, SlotFailed, SlotGone
from tests.trainer.naive import make_samples
from tests.trainer.test_resize import leave_groups_to_the_pause, settings, whole  # noqa: F401 (a fixture)

TIMEOUT_S = 1.0
IN_TIME_S = TIMEOUT_S + 8.0
"""Far above what anybody may take, far below what anything else here waits for."""

POINTS: dict[str, tuple[Any, str]] = {
    "prepare: before it says anything": (prepare, "choose_reader"),
    "prepare: before the groups": (prepare, "Ranks"),
    "prepare: before the skeleton": (prepare, "Trainer"),
    "freeze": (resize.Resize, "freeze"),
    "move: before anything": (resize.Resize, "move"),
    "move: in the middle": (modes.Shadow, "meanwhile"),
    "move: before the vote": (resize, "Moved"),
    "commit": (resize.Resize, "commit"),
}


def strike_at(role: TrainRole, point: str, number: int) -> None:
    """The process gets a signal when it comes to this point."""
    owner, name = POINTS[point]
    original: Callable[..., Any] = vars(owner)[name]

    def struck(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), number)
        return original(*arguments, **options)

    setattr(owner, name, struck)


def answers(fleet: Fleet, slots: tuple[int, ...]) -> dict[int, Any]:
    """Of those that are well: replies, or what they complain of, in time."""
    found: dict[int, Any] = {}
    for slot in slots:
        try:
            found[slot] = fleet.answer(slot, IN_TIME_S)
        except SlotFailed as failed:
            found[slot] = failed
    return found


def until_it_fails(fleet: Fleet, after: Formation, victim: int) -> tuple[Any, str]:
    """Go through a change as far as it goes: the change, and the step where it ended."""
    change = fleet.prepare_change(after)
    well = tuple(slot for slot in change.slots if slot != victim)
    progress = None
    for step in ("prepare", "freeze", "move", "commit"):
        for slot in change.slots:
            fleet.post(slot, "handle", fleet.command(step, change, progress))
        found = answers(fleet, well)
        lost = False
        try:
            found[victim] = fleet.answer(victim, 0.3)
        except (SlotGone, TimeoutError):
            lost = True
        if lost or any(isinstance(answer, Exception) for answer in found.values()):
            # As the orchestrator does with a slot that does not answer.
            fleet.processes[victim].kill()
            return change, step
        if step == "freeze":
            progress = fleet.total(change, found)
    raise AssertionError("nothing happened")


def strike_a_joiner(fleet: Fleet, point: str, number: int) -> str:
    """Slots 0 and 1 train, in the middle of a batch, and have afterwards what they had. The step that failed."""
    fleet.hold((0, 1))
    fleet.forward_backward(make_samples((9, 14)))
    had = fleet.call((0, 1), whole)
    fleet.hold_joining((2,))
    fleet.call((2,), strike_at, point, number)
    change, step = until_it_fails(fleet, Formation((2, 1, 0)), victim=2)
    fleet.roll_back(change, (0, 1))
    assert fleet.call((0, 1), whole) == had
    return step


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_joiner_fails_and_the_others_go_on(settings: dict[str, Any], point: str, number: int) -> None:  # noqa: F811
    settings = settings | {"resize": settings["resize"] | {"timeout_s": TIMEOUT_S}}
    with Fleet(settings, range(4)) as fleet:
        step = strike_a_joiner(fleet, point, number)
        assert step == point.partition(":")[0] or point.startswith("prepare")
        fleet.resize(Formation((3, 1)))
        fleet.forward_backward(make_samples((7, 12)))
        assert fleet.optim_step(20.0).step == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_messages_that_do_not_come_harm_nobody(settings: dict[str, Any], number: int) -> None:  # noqa: F811
    """A group of the change's own breaks in the middle; the groups that train are others."""
    settings = settings | {"resize": settings["resize"] | {"timeout_s": TIMEOUT_S, "carrier": "p2p"}}
    with Fleet(settings, range(3)) as fleet:
        assert strike_a_joiner(fleet, "move: in the middle", number) == "move"
        fleet.forward_backward(make_samples((7, 12)))
        assert fleet.optim_step(20.0).step == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_joiner_fails_while_others_make_groups_in_the_pause(settings, number) -> None:  # noqa: F811
    settings = settings | {"resize": settings["resize"] | {"timeout_s": TIMEOUT_S}}
    with Fleet(settings, range(4)) as fleet:
        fleet.call(range(4), leave_groups_to_the_pause)
        assert strike_a_joiner(fleet, "prepare: before the groups", number) == "move"
        fleet.resize(Formation((3, 1)))
        fleet.forward_backward(make_samples((7, 12)))
        assert fleet.optim_step(20.0).step == 1


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_member_fails_and_nobody_waits_for_it(settings: dict[str, Any], point: str, number: int) -> None:  # noqa: F811
    settings = settings | {"resize": settings["resize"] | {"timeout_s": TIMEOUT_S}}
    with Fleet(settings, range(3)) as fleet:
        fleet.hold((0, 1))
        fleet.forward_backward(make_samples((9, 14)))
        fleet.hold_joining((2,))
        fleet.call((0,), strike_at, point, number)
        change, _ = until_it_fails(fleet, Formation((2, 1, 0)), victim=0)
        fleet.roll_back(change, (1, 2))
        fleet.drop((1, 2))
