"""Somebody dies, or stops, at every point of a change. The others say so in time, and go on where they can."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric import modes
from ductile.trainer import prepare, resize
from ductile.trainer.train_role import TrainRole
from tests.nightly import mostly_nightly
from tests.trainer.fleet import Fleet, SlotFailed, SlotGone
from tests.trainer.naive import make_samples
from tests.trainer.test_resize import leave_groups_to_the_pause, settings, whole  # noqa: F401 (a fixture)

TIMEOUT_S = 1.0
IN_TIME_S = TIMEOUT_S + 8.0
"""Far above what anybody may take, far below what anything else here waits for."""

POINTS: dict[str, tuple[Any, str]] = {
    "prepare: before it says anything": (prepare, "choose_reader"),
    "prepare: before the groups": (prepare, "ParallelContext"),
    "prepare: before the skeleton": (prepare, "Trainer"),
    "freeze": (resize.Resize, "freeze"),
    "transfer: before anything": (resize.Resize, "transfer_state"),
    "transfer: in the middle": (modes.Shadow, "meanwhile"),
    "transfer: before the vote": (resize, "StateTransferred"),
    "commit": (resize.Resize, "commit"),
}
STRIKES = [(point, number) for point in POINTS for number in (signal.SIGKILL, signal.SIGSTOP)]
ONE_OF_EACH_PHASE = (
    ("prepare: before the groups", signal.SIGSTOP),
    ("freeze", signal.SIGKILL),
    ("transfer: in the middle", signal.SIGSTOP),
    ("commit", signal.SIGKILL),
)


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


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def until_it_fails(fleet: Fleet, after: ParallelLayout, victim: int) -> tuple[Any, str]:
    """Go through a change as far as it goes: the change, and the step where it ended."""
    change = fleet.prepare_change(after)
    well = tuple(slot for slot in change.slots if slot != victim)
    progress = None
    for step in ("prepare", "freeze", "transfer", "commit"):
        for slot in change.slots:
            fleet.post(slot, "handle", fleet.command(step, change, progress))
        found = answers(fleet, well)
        lost = False
        try:
            until_s = time.monotonic() + IN_TIME_S
            while not fleet.has_answered(victim) and not is_stopped(fleet.processes[victim].pid):
                assert time.monotonic() < until_s, f"slot {victim} neither answers nor is stopped"
                time.sleep(0.005)
            found[victim] = fleet.answer(victim, 0.05)
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
    fleet.assign((0, 1))
    fleet.forward_backward(make_samples((9, 14)))
    had = fleet.call((0, 1), whole)
    fleet.assign_joining((2,))
    fleet.call((2,), strike_at, point, number)
    change, step = until_it_fails(fleet, ParallelLayout.of((2, 1, 0)), victim=2)
    fleet.roll_back(change, (0, 1))
    assert fleet.call((0, 1), whole) == had
    return step


@pytest.mark.parametrize(("point", "number"), mostly_nightly(STRIKES, *ONE_OF_EACH_PHASE))
def test_a_joiner_fails_and_the_others_go_on(settings: dict[str, Any], point: str, number: int) -> None:  # noqa: F811
    settings = settings | {"resize": settings["resize"] | {"timeout_s": TIMEOUT_S}}
    with Fleet(settings, range(4)) as fleet:
        step = strike_a_joiner(fleet, point, number)
        assert step == point.partition(":")[0] or point.startswith("prepare")
        fleet.resize(ParallelLayout.of((3, 1)))
        fleet.forward_backward(make_samples((7, 12)))
        assert fleet.optim_step(20.0).step == 1


@pytest.mark.parametrize("number", mostly_nightly([signal.SIGKILL, signal.SIGSTOP], signal.SIGKILL))
def test_messages_that_do_not_come_harm_nobody(settings: dict[str, Any], number: int) -> None:  # noqa: F811
    """A group of the change's own breaks in the middle; the groups that train are others."""
    settings = settings | {"resize": settings["resize"] | {"timeout_s": TIMEOUT_S, "carrier": "p2p"}}
    with Fleet(settings, range(3)) as fleet:
        assert strike_a_joiner(fleet, "transfer: in the middle", number) == "transfer"
        fleet.forward_backward(make_samples((7, 12)))
        assert fleet.optim_step(20.0).step == 1


@pytest.mark.parametrize(
    ("point", "number"),
    mostly_nightly(
        [strike for strike in STRIKES if strike[0] in ("prepare: before the groups", "prepare: before the skeleton")],
        ("prepare: before the groups", signal.SIGKILL),
    ),
)
def test_a_joiner_fails_while_others_make_groups_in_the_pause(settings, number, point) -> None:  # noqa: F811
    settings = settings | {"resize": settings["resize"] | {"timeout_s": TIMEOUT_S}}
    with Fleet(settings, range(4)) as fleet:
        fleet.call(range(4), leave_groups_to_the_pause)
        assert strike_a_joiner(fleet, point, number) == "transfer"
        fleet.resize(ParallelLayout.of((3, 1)))
        fleet.forward_backward(make_samples((7, 12)))
        assert fleet.optim_step(20.0).step == 1


def run_out_of_memory(role: TrainRole) -> None:
    """The next trainer that this slot builds."""
    build = prepare.Trainer

    def failing(*arguments: Any) -> Any:
        prepare.Trainer = build
        raise RuntimeError("out of memory")

    prepare.Trainer = failing


def num_sockets(role: TrainRole) -> int:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


@pytest.mark.parametrize("victim", [0, 2], ids=["a member", "a joiner"])
def test_a_build_that_fails_in_the_pause_keeps_nobody_waiting(settings: dict[str, Any], victim: int) -> None:  # noqa: F811
    """It closes its groups, and so those that wait for its messages fail too, long before the timeout."""
    settings = settings | {"resize": settings["resize"] | {"timeout_s": 10 * IN_TIME_S, "carrier": "p2p"}}
    with Fleet(settings, range(3)) as fleet:
        fleet.call(range(3), leave_groups_to_the_pause)
        fleet.assign((0, 1))
        fleet.forward_backward(make_samples((9, 14)))
        had = fleet.call((0, 1), whole)
        fleet.assign_joining((2,))
        fleet.call((victim,), run_out_of_memory)
        change = fleet.prepare_change(ParallelLayout.of((2, 1, 0)))
        fleet.step("prepare", change)
        fleet.until_prepared(change)
        progress = fleet.total(change, fleet.step("freeze", change))
        sockets = fleet.call((victim,), num_sockets)
        for slot in change.slots:
            fleet.post(slot, "handle", fleet.command("transfer", change, progress))
        found = answers(fleet, change.slots)
        assert str(found[victim]) == f"slot {victim}: RuntimeError: out of memory"
        assert fleet.call((victim,), num_sockets) == sockets
        fleet.roll_back(change)
        assert fleet.call((0, 1), whole) == had
        fleet.resize(ParallelLayout.of((2, 1)))
        fleet.forward_backward(make_samples((7, 12)))
        assert fleet.optim_step(20.0).step == 1


@pytest.mark.parametrize(("point", "number"), mostly_nightly(STRIKES, *ONE_OF_EACH_PHASE))
def test_a_member_fails_and_nobody_waits_for_it(settings: dict[str, Any], point: str, number: int) -> None:  # noqa: F811
    settings = settings | {"resize": settings["resize"] | {"timeout_s": TIMEOUT_S}}
    with Fleet(settings, range(3)) as fleet:
        fleet.assign((0, 1))
        fleet.forward_backward(make_samples((9, 14)))
        fleet.assign_joining((2,))
        fleet.call((0,), strike_at, point, number)
        change, _ = until_it_fails(fleet, ParallelLayout.of((2, 1, 0)), victim=0)
        fleet.roll_back(change, (1, 2))
        fleet.release((1, 2))
