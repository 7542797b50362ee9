"""The page about the library is run as it is written."""

import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ductile.fabric import rendezvous
from tests.ranks import result_of, start, stop

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
EXAMPLES = [block.partition("```")[0] for block in PAGE.read_text().split("```python\n")[1:]]


def run_example(rank: int, size: int, port: int, code: str, check: str) -> object:
    """As torchrun would start it, and then a look at what it has made."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": rendezvous.LOOPBACK}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(code, str(PAGE), "exec"), names)
    try:
        return CHECKS[check](names)
    finally:
        dist.destroy_process_group()


def run(code: str, size: int, check: str) -> list[object]:
    store = rendezvous.host_store()
    started = [start(run_example, rank, size, store.port, code, check) for rank in range(size)]
    try:
        return [result_of(connection, f"rank {rank}") for rank, (_, connection) in enumerate(started)]
    finally:
        stop(*(process for process, _ in started))


def whole_states(names: dict[str, object]) -> list[object]:
    """Fingerprints of every tensor of both sides, gathered; None where this rank has no part."""
    return [None if part is None else gathered(*part) for part in (names["old"], names["new"])]


def gathered(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found: dict[str, Tensor] = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        found |= {f"{key}/{name}": value for key, value in optimizer.state[parameter].items()}
    tensors = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}
    return {name: blake2b(tensor.detach().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def locals_of(names: dict[str, object]) -> list[dict[str, Tensor]]:
    sides = (names["old"], names["new"])
    return [{n: p.detach().clone().tolist() for n, p in side[0].module.named_parameters()} for side in sides]


CHECKS = {"whole": whole_states, "locals": locals_of}


def test_examples_have_twenty_lines() -> None:
    assert all(sum(bool(line.strip()) for line in block.splitlines()) <= 20 for block in EXAMPLES)


def test_fsdp2_example() -> None:
    first, second, third = run(EXAMPLES[0], 3, "whole")
    assert first[0] == first[1]
    assert len(first[0]) == 2 + 2 * 3  # each parameter with two moments and a step count
    assert second[0] == second[1] == first[0]
    assert third == [None, first[0]]


def test_megatron_example() -> None:
    ranks = run(EXAMPLES[1], 4, "locals")
    old, new = ([torch.tensor(rank[side]["0.weight"]) for rank in ranks] for side in (0, 1))
    gate = torch.cat([tensor[:4] for tensor in old])
    up = torch.cat([tensor[4:] for tensor in old])
    for rank in range(4):
        half = slice(8 * (rank % 2), 8 * (rank % 2) + 8)
        assert torch.equal(new[rank], torch.cat([gate[half], up[half]]))
    old, new = ([torch.tensor(rank[side]["1.weight"]) for rank in ranks] for side in (0, 1))
    for rank in range(4):
        assert torch.equal(new[rank], torch.cat(old[2 * (rank % 2) : 2 * (rank % 2) + 2], dim=1))
    assert all(rank[1]["1.bias"] == ranks[0][1]["1.bias"] for rank in ranks)


def test_the_library_costs_nothing_until_it_is_asked_for() -> None:
    code = "import sys, ductile, ductile.cli; assert 'torch' not in sys.modules; ductile.Resharder; import torch"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
