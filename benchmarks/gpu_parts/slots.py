"""Several slots that share one device, and the roles they hold: the product's own path, from cluster to worker."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ductile.cluster.local import LocalCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.config.schema.inference import InferenceConfig
from ductile.config.schema.trainer import TrainerConfig
from ductile.core.instances.instances import Instance, instance_on
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.elastic.transaction import ResizeOptions, Transaction
from ductile.fleet.requests.assign_role import assign_role
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.requests.instance_port import RoleSlots
from ductile.fleet.requests.weight_offers import WeightOffers
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.control import Resized
from ductile.messages.workers import AssignRole
from ductile.records import GenerateRequest, Sample, Sampling
from ductile.transport.deadlines import Deadlines
from gpu_parts.models import make_folder, shape_of
from gpu_parts.part import Setting

TIMEOUT_S = 40.0
SAMPLE_TOKENS = 32


def generator_on(slot: int) -> Instance:
    return instance_on("generate", (slot,))


class Slots:
    """A cluster whose slots have a model of one shape to train and to generate with."""

    def __init__(self, cluster: LocalCluster, model: Path, vocab_size: int) -> None:
        self.cluster, self.mailbox, self.vocab_size = cluster, cluster.mailbox, vocab_size
        trainer = TrainerConfig.model_validate(
            {
                "model": {"name": str(model), "seq_len": SAMPLE_TOKENS, "debug": {"random_init": True}},
                "loss": {"type": "sft"},
                "optim": {"type": "adamw", "lr": 1e-5},
                "resize": {"timeout_s": TIMEOUT_S},
            }
        )
        # Blocks are counted, and not a share of the device taken, which several slots have.
        inference = {"model": {"name": str(model), "max_model_len": 256}, "max_num_seqs": 8, "num_blocks": 256}
        self.train_settings = trainer.model_dump(mode="json")
        self.generate_settings = InferenceConfig.model_validate(inference).model_dump(mode="json")
        self.terms = ResizeOptions(self.train_settings, cluster.rendezvous, TIMEOUT_S, leave_s=5.0)

    async def train(self, members: Sequence[int]) -> RemoteTrainer:
        layout = ParallelLayout.of(members)
        await assign_role(self.mailbox, "train", self.train_settings, [layout], TIMEOUT_S, self.cluster.rendezvous)
        return RemoteTrainer(self.mailbox, layout, Deadlines.same(TIMEOUT_S))

    async def generate(self, slots: Sequence[int], trainer: RemoteTrainer) -> RemoteGenerators:
        """Generators without weights: their first are those that are published first."""
        for slot in slots:
            joining = AssignRole("generate", self.generate_settings, ParallelLayout.of((slot,)), joining=True)
            await self.mailbox.ask(slot, joining, TIMEOUT_S)
        offers = WeightOffers(trainer)
        return RemoteGenerators(
            RoleSlots(self.mailbox, "generate", TIMEOUT_S),
            map(generator_on, slots),
            8,
            16,
            Deadlines.same(TIMEOUT_S),
            offers,
        )

    async def half_a_batch(self, trainer: RemoteTrainer) -> None:
        """A micro-batch for every rank."""
        mask = (False,) + (True,) * (SAMPLE_TOKENS - 1)
        tokens = [tuple((7 * i + 13 * n) % self.vocab_size for i in range(SAMPLE_TOKENS)) for n in range(8)]
        await trainer.forward_backward([Sample(t, mask) for t in tokens[: trainer.num_ranks]], SAMPLE_TOKENS)

    async def step(self, trainer: RemoteTrainer) -> None:
        await self.half_a_batch(trainer)
        report = await trainer.optim_step(100.0)
        if report.metrics["skipped"]:
            raise RuntimeError("the gradient is not finite")

    async def resize(self, trainer: RemoteTrainer, after: Sequence[int]) -> Resized:
        transaction = Transaction(self.mailbox, trainer, ParallelLayout.of(after), self.terms, self.cluster.condemn)
        result = await transaction.run()
        if result.outcome != "resized":
            raise RuntimeError(f"resize to {list(after)}: {result.reason}")
        return result

    async def admit(self, generators: RemoteGenerators, slot: int) -> None:
        """Have the slot generate as well."""
        if not await generators.admit(generator_on(slot), self.generate_settings):
            raise RuntimeError(f"slot {slot} got no weights")

    async def completions(self, generators: RemoteGenerators, version: int) -> None:
        """Two from each generator; all of their tokens must be of this version."""
        sampling = Sampling(max_tokens=4, ignore_eos=True, seed=1)
        num = 2 * len(generators.slots)
        asked = [GenerateRequest(f"{version}/{n}", (3, 4, 5, n + 6), sampling) for n in range(num)]
        for generation in await asyncio.gather(*map(generators.generate, asked)):
            if generation.versions != (version,) * 4:
                raise RuntimeError(f"{generation.id} was sampled from versions {generation.versions}, not {version}")


@asynccontextmanager
async def slots_on(setting: Setting, shape: str, num_slots: int) -> AsyncIterator[Slots]:
    where: dict[str, Any] = {"device": setting.device}
    if setting.device == "cuda":
        where["slots_per_device"] = num_slots
    with tempfile.TemporaryDirectory() as folder:
        sizes = shape_of(shape, setting)
        model = make_folder(Path(folder) / "model", sizes)
        cluster = LocalCluster(range(num_slots), ClusterConfig(**where), Path(folder))
        await cluster.start()
        try:
            yield Slots(cluster, model, sizes["vocab_size"])
        except BaseException:
            print_logs(Path(folder))
            raise
        finally:
            await cluster.stop()


def print_logs(folder: Path) -> None:
    for log in sorted(folder.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}")
