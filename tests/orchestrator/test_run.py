"""What a command does in which order, with doubles for the processes."""

import asyncio
from types import SimpleNamespace

import pytest

from ductile.config.schema.bench import BenchConfig
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.model import TrainerModelConfig
from ductile.core.instances.node_slots import SlotsPerNode
from ductile.core.layout.choice.layout_rules import NO_RULES
from ductile.orchestrator.commands import run
from ductile.orchestrator.commands.bench import Bench
from ductile.orchestrator.ending import run_until as run_until_module
from ductile.transport.mailbox import Mailbox
from tests.cluster.memory_cluster import MemoryCluster
from tests.transport.memory_transport import MemoryTransport


class Reached(Exception):
    """Far enough for this test."""


@pytest.mark.parametrize("command", [run._rl, run._batches, run._fake_batches], ids=["rl", "sft", "trainer"])
def test_devices_are_measured_before_models_are_loaded(command, monkeypatch: pytest.MonkeyPatch):
    """Else what it takes is the most that a run uses, or more than the models have left."""
    did: list[str] = []

    async def measure(*arguments: object) -> None:
        did.append("measure")

    async def take_roles(*arguments: object) -> None:
        did.append("take roles")
        raise Reached

    cluster = MemoryCluster(Mailbox(MemoryTransport({})), [0])
    monkeypatch.setattr(run_until_module, "CAUSE_S", 0.0)
    monkeypatch.setattr(run, "placement_of", lambda config: SimpleNamespace(slots=(0,), train=(0,)))
    monkeypatch.setattr(run, "_activity", lambda *arguments: None)
    monkeypatch.setattr(run, "_roles", lambda config, placement: {})
    monkeypatch.setattr(run, "layout_rules", lambda config: NO_RULES)
    monkeypatch.setattr(run, "slots_per_node_of", lambda config, placement: SlotsPerNode(1, 1))
    monkeypatch.setattr(run, "make_cluster", lambda *arguments: cluster)
    monkeypatch.setattr(run, "_announce", lambda *arguments: None)
    monkeypatch.setattr(run, "_begin", measure)
    monkeypatch.setattr(run, "_take_roles", take_roles)
    monkeypatch.setattr(run, "assign_role", take_roles)
    config = SimpleNamespace(cluster=ClusterConfig(command_timeout_s=1.0), bench=object(), ray=None)
    prepared = SimpleNamespace(trainer=SimpleNamespace(model_dump=lambda mode: {}, model=TrainerModelConfig()))
    interrupt = SimpleNamespace(graceful=asyncio.Event())
    told = SimpleNamespace(folder=None, record=SimpleNamespace(event=None), began_s=0.0)
    session = SimpleNamespace(**vars(told), bench=Bench(BenchConfig(), {}), tracing=None, interrupt=interrupt)
    with pytest.raises(Reached):
        asyncio.run(command(config, prepared, session))
    assert did == ["measure", "take roles"]


@pytest.mark.parametrize("sooner", ["a user", "a death"])
def test_nobody_waits_for_a_slot_that_does_not_say_its_memory(sooner: str):
    async def story() -> None:
        async def ask(measure: object) -> dict[int, object]:
            return {} if measure else await asyncio.Future()

        bench = Bench(BenchConfig(), {})
        await bench.begin(ask, "bfloat16")
        bench.on_metrics(2, {"tokens": 10.0, "step_s": 1.0})
        interrupt = SimpleNamespace(graceful=asyncio.Event())
        if sooner == "a user":
            interrupt.graceful.set()
        cluster = MemoryCluster(Mailbox(MemoryTransport({})), [0])
        if sooner == "a death":
            cluster.kill(0)
        async with asyncio.timeout(30.0):
            await run._hear_the_slots(cluster, SimpleNamespace(bench=bench, tracing=None, interrupt=interrupt))
        assert bench.figures()["steps"] == 1
        assert bench.figures()["peak_memory"] == {"gib": None, "reason": "no slot has said it"}

    asyncio.run(story())
