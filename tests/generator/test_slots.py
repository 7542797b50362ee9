"""Generators in processes of their own: handing over, joining, leaving, and a source that is killed in between."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ductile.cluster.local import LocalCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.inference import InferenceConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.generator.generate_role import load_engine
from ductile.messages.workers import (
    AssignRole,
    Done,
    EndOffer,
    Event,
    Finished,
    Forget,
    Generate,
    MigratedOut,
    MigrateOut,
    OfferWeights,
    Published,
    Receive,
    ReleaseRole,
)
from ductile.records import GenerateRequest, Generation
from tests.cluster.processes import is_running
from tests.generator.conftest import request, run
from tests.tiny import make_model_folder
from tests.transport.transports import eventually

MIB = 1 << 20
ASKED = tuple(request(str(i), "what is 1 + 2? " * 4, 30, temperature=1.0) for i in range(3))


class Generators:
    """Slots 0 to 2 and the event loop that they live in. The model has 20 M parameters (80 MiB), the cache 128 MiB."""

    def __init__(self, folder: Path) -> None:
        model = make_model_folder(
            folder / "model", "qwen3", hidden_size=512, intermediate_size=1536, num_hidden_layers=6
        )
        self.config = InferenceConfig.model_validate({"model": {"name": str(model)}, "cache_memory_gib": 0.125})
        self.folder = folder
        self.done: dict[str, tuple[int, Generation]] = {}
        self.runner = asyncio.Runner()
        self.cluster = LocalCluster(range(3), ClusterConfig(device="cpu"), folder)
        self.cluster.ends_without(lambda slot: False)
        self.runner.run(self.cluster.__aenter__())
        self.cluster.mailbox.subscribe(self._listen)

    def _listen(self, slot: int, event: Event) -> None:
        if isinstance(event, Finished):
            for generation in event.generations:
                assert generation.id not in self.done
                self.done[generation.id] = (slot, generation)

    def ask(self, slot: int, *commands: Any) -> Any:
        """Send them one behind the other. Returns the reply to the last."""

        async def all_replies() -> list[Any]:
            return await asyncio.gather(*(self.cluster.mailbox.ask(slot, command, 30) for command in commands))

        return self.runner.run(all_replies())[-1]

    def assign(self, slot: int, joining: bool = False) -> None:
        self.ask(
            slot,
            AssignRole("generate", self.config.model_dump(mode="json"), ParallelLayout.of((slot,)), joining=joining),
        )

    def tokens(self, requests: tuple[GenerateRequest, ...]) -> dict[str, tuple[int, ...]]:
        """Wait for their ends."""
        ids = {one.id for one in requests}
        self.runner.run(eventually(lambda: ids <= self.done.keys(), 30))
        return {id: self.done.pop(id)[1].token_ids for id in ids}

    def private_bytes(self, slot: int) -> int:
        status = Path(f"/proc/{self.cluster.processes[slot].pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    def close(self) -> None:
        self.runner.run(self.cluster.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def generators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generators]:
    made = Generators(tmp_path_factory.mktemp("slots"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(generators: Generators) -> dict[str, tuple[int, ...]]:
    done = run(load_engine(generators.config, "cpu"), list(ASKED))
    return {id: generation.token_ids for id, generation in done.items()}


def test_releasing_the_role_gives_its_memory_back(generators: Generators) -> None:
    before = generators.private_bytes(2)
    for _ in range(2):
        generators.assign(2)
        generators.ask(2, Generate(ASKED))
        generators.tokens(ASKED)
        # The weights, and of the cache what was used.
        assert before + 50 * MIB < generators.private_bytes(2) < before + 120 * MIB
        generators.ask(2, ReleaseRole("generate"))
        assert generators.private_bytes(2) < before + 40 * MIB  # libraries that were used for the first time


def test_requests_move_to_a_slot_that_joined_and_back(
    generators: Generators, expected: dict[str, tuple[int, ...]]
) -> None:
    generators.assign(0)
    generators.assign(1, joining=True)
    offered = generators.ask(0, OfferWeights("generate"))
    assert isinstance(offered, Published)
    assert offered.manifest is not None
    generators.ask(1, Receive("generate", offered.manifest))
    generators.ask(0, EndOffer("generate"))

    first = generators.ask(0, Generate(ASKED), MigrateOut(("0", "1", "2"), ("0", "1")))
    assert isinstance(first, MigratedOut)
    assert {one.id for one in first.requests} == {"0", "1", "2"}
    assert all(one.generated for one in first.requests)
    assert first.caches.keys() == {"0", "1"}
    back = generators.ask(1, Generate(first.requests, first.caches), MigrateOut(("0", "2"), ("0", "2")))
    assert isinstance(back, MigratedOut)
    assert generators.ask(0, Forget(("0", "1")), Generate(back.requests, back.caches)) == Done()
    assert generators.ask(1, Forget(("0", "2"))) == Done()
    slots = {"0": 0, "1": 1, "2": 0}
    generators.runner.run(eventually(lambda: slots.keys() <= generators.done.keys(), 30))
    assert {id: generators.done[id][0] for id in slots} == slots
    assert generators.tokens(ASKED) == expected
    for slot in (0, 1):
        assert "computed again" not in (generators.folder / f"slot_{slot}.log").read_text()
        generators.ask(slot, ReleaseRole("generate"))


def test_when_the_source_is_killed_the_receiver_computes_again(
    generators: Generators, expected: dict[str, tuple[int, ...]]
) -> None:
    for slot in (0, 1):
        generators.assign(slot)
    left = generators.ask(0, Generate(ASKED), MigrateOut(("0", "1", "2"), ("0", "1", "2")))
    assert left.caches.keys() == {"0", "1", "2"}
    pid = generators.cluster.processes[0].pid
    os.kill(pid, signal.SIGKILL)
    generators.runner.run(eventually(lambda: not is_running(pid)))
    assert generators.ask(1, Generate(left.requests, left.caches)) == Done()
    assert generators.tokens(ASKED) == expected
    log = (generators.folder / "slot_1.log").read_text()
    assert log.count(f"is computed again: the cache is gone: /proc/{pid}/fd/") == 3
    generators.ask(1, ReleaseRole("generate"))
