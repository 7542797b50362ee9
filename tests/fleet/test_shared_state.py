"""The state under threads: what eight of them do at random is what one after the other would have done."""

import contextlib
import itertools
import random
import threading

import pytest

from ductile.core.instances.fleet_state import FleetState
from ductile.core.instances.health import ProbeReply, TransitionRefused
from ductile.core.instances.instances import InstanceId
from ductile.fleet.servers.shared_state import SharedFleetState

NUM_THREADS, NUM_OPERATIONS = 8, 1000


def test_no_change_is_lost_and_all_are_told_in_order() -> None:
    shared, told, applied = SharedFleetState(), list[tuple[FleetState, FleetState]](), list[tuple[str, str]]()
    shared.on_change.add(lambda before, after: told.append((before, after)))

    def operation(state: FleetState, kind: str, address: str) -> FleetState:
        applied.append((kind, address))  # in the order in which they take effect: `change` calls one at a time
        server = state.at(address)
        if kind == "join":
            return state.joined(address, ProbeReply(f"x{state.births.get(address, 0)}", 0), 0.0)
        if server is None:
            raise TransitionRefused(address)
        if kind == "commit":
            return state.changed(server.sent(1, 0.0).committed(1, "", 0.0))
        return state.changed(server.moved("die" if kind == "die" else "remove", "", 0.0))

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(NUM_OPERATIONS):
            kind, address = chance.choice(["join", "commit", "die", "remove"]), f"http://{chance.choice('abcd')}:1"
            with contextlib.suppress(TransitionRefused):
                shared.change(lambda state, kind=kind, address=address: operation(state, kind, address))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    steps, model = applied.copy(), FleetState()
    assert len(steps) == NUM_THREADS * NUM_OPERATIONS
    for kind, address in steps:
        with contextlib.suppress(TransitionRefused):
            model = operation(model, kind, address)
    assert shared.now == model
    assert told[0][0] == FleetState()
    assert told[-1][1] == model
    assert all(one[1] is two[0] for one, two in itertools.pairwise(told))
    assert [after.epoch for _, after in told] == sorted(after.epoch for _, after in told)


def test_what_raises_changes_nothing() -> None:
    shared = SharedFleetState()
    shared.change(lambda state: state.above(7))
    with pytest.raises(TransitionRefused, match="nobody is not in the fleet"):
        shared.change(lambda state: state.changed(state.of(InstanceId("nobody"))))
    assert shared.now.epoch == 8
