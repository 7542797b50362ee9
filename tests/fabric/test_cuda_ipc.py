"""The same states as in `test_transfer`, on one GPU that all slots share."""

import pytest
import torch
import torch.distributed as dist

from ductile.core.transfer.planning import Planner
from ductile.fabric.choice import choose
from ductile.fabric.exchange import StoreExchange
from ductile.fabric.groups import Groups
from ductile.fabric.transfer import Transfer
from tests.fabric.cases import PAIRS
from tests.fabric.states import State, differences, padding, state
from tests.ranks import run_ranks

DEVICE = "cuda:0"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="reads between processes on a GPU need a CUDA device"),
]


def on_gpu(buffers: State) -> State:
    return {name: buffer.to(DEVICE) for name, buffer in buffers.items()}


def move_on_gpu(groups: Groups, members: tuple[int, ...], one_sided: bool) -> dict[str, tuple[list[str], dict, dict]]:
    slot, found = dist.get_rank(), {}
    exchange = StoreExchange(groups._store, "exchange", slot, members, 20.0)
    carrier, reason = choose(exchange, DEVICE, lambda: groups.group(members), one_sided)
    assert reason.startswith("cuda_ipc" if one_sided else "p2p"), reason
    for name, (source, target) in PAIRS.items():
        plan = Planner(relays=not one_sided).plan(source.layout(), target.layout())
        old, new = state(plan.source, slot, source.buffers()), padding(plan.target, slot)
        transfer = Transfer(plan, slot, on_gpu(old), on_gpu(new), carrier)
        moved = transfer.run()
        dist.barrier(group=groups.group(members))
        here = {buffer: words.cpu() for buffer, words in transfer.buffers.items()}
        wrong = differences(here, state(plan.target, slot, target.buffers()))
        found[name] = wrong, moved.sent, moved.received
    return found


@pytest.mark.parametrize("one_sided", [True, False], ids=["cuda_ipc", "messages through the host"])
def test_every_byte_arrives(one_sided: bool) -> None:
    outcomes = run_ranks(8, move_on_gpu, one_sided, timeout_s=50.0)
    for name in PAIRS:
        assert [of_slot[name][0] for of_slot in outcomes] == [[]] * 8, name
        sent = {(s, p): value for s, of_slot in enumerate(outcomes) for p, value in of_slot[name][1].items()}
        got = {(p, s): value for s, of_slot in enumerate(outcomes) for p, value in of_slot[name][2].items()}
        assert sent == got, name
