"""When a rank dies or stops in the middle, everybody else gets an error within the deadline, and keeps the source."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import ductile
from ductile import TransferFailed
from ductile.fabric.transfer import Transfer
from ductile.resharding.reshard import Resharder
from tests.resharding.world import run_world

DEADLINE_S = 1.0
VICTIM = 1


def before(owner: type, method: str, action: Callable[[], None]) -> None:
    original = getattr(owner, method)

    def wrapped(*arguments: object) -> object:
        action()
        return original(*arguments)

    setattr(owner, method, wrapped)


POINTS = {"planned": (Resharder, "_agree"), "ready": (Transfer, "run"), "moved": (Resharder, "_conclude")}


def lose_one(rank: int, point: str, number: int, carrier: str) -> str:
    if rank == VICTIM:
        before(*POINTS[point], lambda: os.kill(os.getpid(), number))
    source = torch.arange(3 * 40_000.0).reshape(3, -1) + rank
    here = ductile.Block((3, 3, 40_000), (rank, 0, 0), source[None])
    target = torch.zeros(3, 3, 40_000)
    with pytest.raises(TransferFailed) as info:
        ductile.reshard({"w": here}, {"w": target}, timeout_s=DEADLINE_S, carrier=carrier)
    assert torch.equal(source, torch.arange(3 * 40_000.0).reshape(3, -1) + rank)
    return str(info.value)


CASES = [
    *((point, signal.SIGKILL, carrier) for point in POINTS for carrier in ("auto", "p2p")),
    ("planned", signal.SIGSTOP, "p2p"),
    ("ready", signal.SIGSTOP, "auto"),
    ("ready", signal.SIGSTOP, "p2p"),
    ("moved", signal.SIGSTOP, "auto"),
]


@pytest.mark.parametrize(("point", "number", "carrier"), CASES)
def test_the_others_are_told(point: str, number: signal.Signals, carrier: str) -> None:
    results = run_world(3, lose_one, point, int(number), carrier, mourned=(VICTIM,))
    for error in (results[0], results[2]):
        # On a loaded machine the two that are left may have waited for each other by then.
        assert "did not reply within 1 s" in error or "slot 1" in error or "nothing came from or went to" in error
        assert error.endswith(
            "The source is untouched; the target may be half written, and the group is of no more use."
        )


def flip_a_bit(rank: int, carrier: str) -> str:
    """Rank 0's own copy changes after it was sent: the others have what it was, and the fingerprints tell."""
    source, target = torch.arange(1000.0), torch.zeros(1000)
    original = Transfer.run

    def run(transfer: Transfer) -> object:
        moved = original(transfer)
        return replace(moved, sent={peer: digest ^ 1 for peer, digest in moved.sent.items()})

    if rank == 0:
        Transfer.run = run
    with pytest.raises(TransferFailed) as info:
        ductile.reshard({"w": source if rank == 0 else None}, {"w": target}, timeout_s=20.0, carrier=carrier)
    return str(info.value)


@pytest.mark.parametrize("carrier", ["auto", "p2p"])
def test_bytes_that_arrive_changed_are_refused_everywhere(carrier: str) -> None:
    (told,) = set(run_world(3, flip_a_bit, carrier))
    assert told.startswith("what rank 1 received from rank 0 is not what was sent; what rank 2 received from rank 0")
