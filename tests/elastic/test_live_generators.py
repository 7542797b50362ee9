"""Real generators in real processes: requests that change hands, slots that join with offered weights, a kill -9."""

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from ductile.cluster.local import ROLES, LocalCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.inference import InferenceConfig
from ductile.config.schema.trainer import TrainerConfig
from ductile.core.instances.instances import instance_on
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.orders import Migration
from ductile.fleet.requests.assign_role import assign_role
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.requests.instance_port import RoleSlots
from ductile.fleet.requests.scorer import RemoteScorer
from ductile.fleet.requests.weight_offers import WeightOffers
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.workers import OfferWeights
from ductile.records import GenerateRequest, Generation, Sample, Sampling
from ductile.transport.deadlines import Deadlines
from tests.core.scheduling.scenes import id_on
from tests.tiny import make_model_folder
from tests.transport.transports import eventually

TRAINER = 9
TIMEOUT_S = 60.0
DEADLINES = Deadlines.same(TIMEOUT_S)
NUM_TOKENS = 300
"""About half a second of a generator that has nothing else to do."""


class Harness:
    """A trainer on slot 9; generators 0 and 1 for each test, and what else it admits. Slots that died come again."""

    def __init__(self, folder: Path) -> None:
        model = str(make_model_folder(folder / "model"))
        self.train = TrainerConfig.model_validate(
            {"model": {"name": model, "seq_len": 64}, "optim": {"type": "adamw", "lr": 0.1}, "loss": {"type": "sft"}}
        ).model_dump(mode="json")
        inference = {"model": {"name": model, "max_model_len": 512}, "max_num_seqs": 8}
        self.inference = InferenceConfig.model_validate(inference).model_dump(mode="json")
        self.runner = asyncio.Runner()
        self.cluster = LocalCluster([0, 1, 2, TRAINER], ClusterConfig(device="cpu"), folder, ROLES)
        self.cluster.ends_without(lambda slot: slot == TRAINER)
        self.version = 0
        self.runner.run(self.cluster.__aenter__())
        self.mailbox = self.cluster.mailbox
        layout = ParallelLayout.of((TRAINER,))
        self.runner.run(assign_role(self.mailbox, "train", self.train, [layout], TIMEOUT_S, self.cluster.rendezvous))
        self.trainer = RemoteTrainer(self.mailbox, layout, DEADLINES)

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        self.runner.run(asyncio.wait_for(self._with_generators(story), 150))

    async def _with_generators(self, story: Coroutine[Any, Any, None]) -> None:
        await self.cluster.add([0, 1, 2])
        self.mailbox.epoch += 1
        self.offers = WeightOffers(self.trainer)
        self.generators = RemoteGenerators(
            RoleSlots(self.mailbox, "generate", TIMEOUT_S), (), 8, 16, DEADLINES, self.offers
        )
        self.scorer = RemoteScorer(RoleSlots(self.mailbox, "score", TIMEOUT_S), (), DEADLINES, self.offers)
        await self.publish()
        for slot in (0, 1):
            assert await self.admit(slot)
        await story
        for instance in self.generators.instances:
            await self.generators.dismiss(instance)
        for instance in self.scorer.instances:
            await self.scorer.dismiss(instance)

    async def admit(self, slot: int) -> bool:
        return await self.generators.admit(instance_on("generate", (slot,)), self.inference)

    async def dismiss(self, slot: int) -> None:
        await self.generators.dismiss(instance_on("generate", (slot,)))

    async def publish(self) -> None:
        self.version += 1
        manifest = await self.trainer.publish(self.version)
        await asyncio.gather(self.generators.receive(manifest), self.scorer.receive(manifest))
        await self.trainer.withdraw(self.version)

    def ask(self, name: str, temperature: float = 0.0) -> "asyncio.Task[Generation]":
        sampling = Sampling(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=7)
        prompt = tuple(5 + ord(letter) % 90 for letter in f"tell me of {name}")
        return asyncio.create_task(self.generators.generate(GenerateRequest(name, prompt, sampling)))

    def where(self) -> Mapping[str, int]:
        """Slot of each request's generator."""
        slots = {each.id: each.slots[0] for each in self.generators.all_instances}
        return {each.id: slots[each.instance] for each in self.generators.unfinished()}

    async def in_the_middle(self) -> None:
        await asyncio.sleep(0.1)

    def close(self) -> None:
        self.runner.run(self.cluster.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory):
    harness = Harness(tmp_path_factory.mktemp("generators"))
    yield harness
    harness.close()


def test_requests_that_change_hands_again_and_again_say_what_they_would_have_said(harness: Harness):
    async def story():
        generators, names = harness.generators, [f"{kind}{n}" for kind in "gs" for n in range(4)]

        async def generated() -> dict[str, Generation]:
            asked = [harness.ask(name, temperature=float(name.startswith("s"))) for name in names]
            return {generation.id: generation for generation in await asyncio.gather(*asked)}

        undisturbed = await generated()
        assert await harness.admit(2)
        disturbed = asyncio.create_task(generated())
        num_moved = num_with_cache = 0
        for turn in range(12):
            await asyncio.sleep(0.05)
            migrations = [
                Migration(name, id_on(slot), id_on((slot + 1 + index % 2) % 3), with_cache=(index + turn) % 2 == 0)
                for index, (name, slot) in enumerate(harness.where().items())
            ]
            results = await generators.migrate(migrations)
            assert all(result.why in ("", "it had ended") for result in results)
            num_moved += sum(result.instance is not None for result in results)
            num_with_cache += sum(result.with_cache for result in results)
        for name, generation in (await disturbed).items():
            assert generation.token_ids == undisturbed[name].token_ids
            assert len(generation.logprobs) == len(generation.versions) == NUM_TOKENS
            assert generation.logprobs == pytest.approx(undisturbed[name].logprobs, abs=1e-4)
            assert set(generation.versions) == {harness.version}
        assert num_moved > num_with_cache > 0

    harness.run(story())


def test_joiners_have_the_live_weights_whoever_offers_them(harness: Harness):
    async def story():
        samples = [Sample(tuple(range(5, 25)), (False,) + (True,) * 19)] * 2
        await harness.trainer.forward_backward(samples, 64)
        await harness.trainer.optim_step(38.0)
        await harness.publish()
        says = (await harness.ask("a")).token_ids
        offered: list[int] = []
        harness.mailbox.watch(lambda slot, command: offered.append(slot) if command is OfferWeights else None)
        assert await harness.admit(2)
        assert offered == [0]
        await harness.dismiss(0)
        await harness.dismiss(1)
        assert (await harness.ask("a")).token_ids == says
        await harness.dismiss(2)
        offered.clear()
        assert await harness.admit(1), "the trainer offers them, too"
        assert (await harness.ask("a")).token_ids == says
        assert await harness.scorer.admit(instance_on("score", (0,)), harness.train)
        scored = await harness.scorer.score(samples, "policy")
        assert await harness.scorer.admit(instance_on("score", (2,)), harness.train)
        assert offered == [0], "the trainer offered them to the first scorer, and that one to the second"
        for floats, others in zip(await harness.scorer.score(samples, "policy"), scored, strict=True):
            assert [*floats] == pytest.approx([*others], abs=1e-5)

    harness.run(story())


def test_what_a_killed_generator_had_is_said_by_another(harness: Harness):
    async def story():
        undisturbed = await asyncio.gather(*(harness.ask(name) for name in "abcd"))
        restarted: list[str] = []
        harness.generators.on_restarted.add(lambda sentence, lost: restarted.append(sentence))
        asked = [harness.ask(name) for name in "abcd"]
        await harness.in_the_middle()
        lost = [name for name, slot in harness.where().items() if slot == 1]
        harness.cluster.processes[1].signal(signal.SIGKILL)
        assert [each.token_ids for each in await asyncio.gather(*asked)] == [each.token_ids for each in undisturbed]
        assert len(restarted) == len(lost) == 2
        assert all("was killed by SIGKILL" in sentence for sentence in restarted)
        assert harness.generators.slots == (0,)

    harness.run(story())


@pytest.mark.parametrize("victim", [0, 1], ids=["source", "target"])
def test_a_kill_in_the_middle_of_a_migration_loses_no_request(harness: Harness, victim: int):
    async def story():
        assert await harness.admit(2)
        asked = {name: harness.ask(name) for name in "abcdef"}
        await harness.in_the_middle()
        leaving = [name for name, slot in harness.where().items() if slot == 0]
        migrations = [Migration(name, id_on(0), id_on(1), with_cache=True) for name in leaving]
        # Stopped, it cannot reply; what is asked of it then ends with its life, and not before.
        harness.cluster.processes[victim].signal(signal.SIGSTOP)
        handing = asyncio.create_task(harness.generators.migrate(migrations))
        await eventually(lambda: harness.mailbox.doing(victim).startswith("running"))
        harness.cluster.processes[victim].signal(signal.SIGKILL)
        results = await handing
        assert len(results) == len(migrations) == 2
        for name, task in asked.items():
            assert len((await task).token_ids) == NUM_TOKENS, name
        assert victim not in harness.generators.slots

    harness.run(story())
