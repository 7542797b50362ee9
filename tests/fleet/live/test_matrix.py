"""Faults at moments of an update, of a request and of nothing at all, each on its victims.

    fault x moment x victim, without the cells of which another one is the same:

    * a process that is killed and one that exits are the same at a point where it waits;
    * what is done to the reply (500, drop, late) is done at messages, so not while nothing is said, or buckets come by
      shared memory;
    * wrong bytes are loaded or not; where in a bucket they are says nothing;
    * a server has one worker here (`test_synthetic.py` has several);
    * two victims at once: at the moments where one alone behaves differently from a dead server.

Whatever happens: the trainer goes on, and the servers that are well have the version; the victim has it too, or is left
out with a reason, and comes back by the next one at the latest; requests in flight end (`Rig.wrong` has the rest).
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ductile.fleet.updates.update_parties import UpdateResult
from tests.fleet.live.rig import BUCKET_S, SILENT_S, Rig

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(120)]

UPDATE = ("prepare", "bucket-first", "bucket-mid", "bucket-last", "verify", "commit", "commit-reply", "resume")
MESSAGES = ("prepare", "verify", "commit", "commit-reply", "resume")
ROUTES = {
    "prepare": "/weights/prepare", "verify": "/weights/verify", "commit": "/weights/commit", "resume": "/resume",
    "pause": "/pause", "idle": "/fleet/state", "generate": "/v1/completions",
}  # fmt: skip
DIES = ("kill", "restart")
FOUND_S = 2.0
MAY_HAVE_IT = ("commit", "commit-reply", "resume")
"""Moments at which a victim may have changed over."""
AGAIN = ("500", "wrong-bytes", "no-room")
"""Faults that need not come again: the victim, and nobody else, is sent the version once more."""


class Cell(NamedTuple):
    fault: str
    moment: str
    victims: tuple[str, ...] = ("a",)

    def __str__(self) -> str:
        return f"{self.fault}-{self.moment}-{'+'.join(self.victims)}"


def cells() -> Iterator[Cell]:
    for moment in ("idle", "generate", *UPDATE):
        yield Cell("kill", moment)
        yield Cell("stop", moment)
        yield Cell("restart", moment)
    for moment in ("idle", "generate", "prepare", "bucket-mid", "verify", "commit", "resume"):
        yield Cell("stop+cont", moment)
    for moment in MESSAGES:
        yield Cell("drop", moment)
        yield Cell("late", moment)
    for moment in ROUTES:
        yield Cell("500", moment)
    yield Cell("drop", "generate")
    yield Cell("late", "generate")
    yield Cell("wrong-bytes", "bucket-mid")
    yield Cell("no-room", "prepare")
    yield Cell("wedge", "generate")
    for moment in ("idle", "generate", "bucket-mid", "commit"):
        yield Cell("kill", moment, ("a", "b"))
    for moment in ("bucket-mid", "commit"):
        yield Cell("stop", moment, ("a", "b"))


def check(result: UpdateResult, cell: Cell, victims: set[str]) -> None:
    """The victims alone are left out, and the others are sent nothing twice."""
    outcomes = {each.instance: each.outcome for each in result.outcomes}
    of_victims = {outcomes.pop(each) for each in victims if each in outcomes}
    assert {*outcomes.values()} == {"committed"}, result
    if cell.moment not in MAY_HAVE_IT:
        assert "committed" not in of_victims, result
    assert result.attempts == 1 or cell.fault in AGAIN, result


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_cell(rig: Rig, cell: Cell) -> None:
    rig.run(story_of(rig, cell))


async def story_of(rig: Rig, cell: Cell) -> None:
    for _ in range(9):
        rig.ask(60)
    victims = [rig.servers[name] for name in cell.victims]
    before = {name: rig.servers[name].incarnations[-1] for name in cell.victims}
    ids = {rig.health(name).instance for name in cell.victims}
    held = cell.fault in ("kill", "stop", "stop+cont", "restart") and cell.moment in UPDATE
    for server in victims:
        if cell.fault == "kill" and cell.moment in UPDATE:
            server.fault(cell.moment, "exit")
        elif held:
            server.fault(cell.moment, "hold")
        elif cell.fault == "500":
            server.fault("500", ROUTES[cell.moment])
        elif cell.fault in ("drop", "late"):
            server.fault(cell.moment, "drop" if cell.fault == "drop" else f"late {2 * BUCKET_S}")
        elif cell.fault in ("wrong-bytes", "no-room", "wedge"):
            server.fault(cell.fault, "on")
    publishing = None
    if cell.moment not in ("idle", "generate"):
        publishing = rig.publishing()
        for server in victims:
            if held:
                await rig.until(lambda server=server: server.reached(cell.moment), 8.0, f"{cell.moment} is reached")
    elif cell.moment == "generate" and cell.fault in ("kill", "stop", "stop+cont", "restart"):
        for server in victims:
            await rig.until(lambda server=server: server.state().num_running > 0, 5.0, f"{server} generates")
    elif cell.fault in ("500", "drop", "late"):
        point = "500" if cell.fault == "500" else cell.moment
        for server in victims:
            await rig.until(lambda server=server: server.reached(point), 5.0, f"{point} is reached")
    for name, server in zip(cell.victims, victims, strict=True):
        match cell.fault:
            case "kill" if cell.moment in ("idle", "generate"):
                server.kill()
            case "stop" | "stop+cont":
                server.stop()
                server.clear()
            case "restart":
                server.restart()
        assert name in rig.names
    if cell.fault in ("kill", "stop", "stop+cont"):
        for name in cell.victims:
            await rig.taken_out(name, before[name], FOUND_S + (SILENT_S if cell.fault != "kill" else 0.0))
    if publishing is not None:
        check(await publishing, cell, ids)
    if cell.fault == "stop+cont":
        for server in victims:
            server.cont()
    if cell.fault in ("stop", "kill"):
        rest = [name for name in rig.names if name not in cell.victims]
        await rig.ready(*rest)
        await rig.publish()
        await rig.ready(*rest)
        return
    if cell.fault == "wedge":
        await rig.taken_out("a", before["a"], 5.0)
    await rig.ready(*(name for name in rig.names if name not in cell.victims))
    for server in victims:
        server.clear()
    await rig.publish()
    await rig.ready(*rig.names)
    after = {name: rig.servers[name].state().incarnation for name in cell.victims}
    assert (after != before) == (cell.fault == "restart")
