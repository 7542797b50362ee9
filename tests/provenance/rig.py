"""Two generators as slots have them and a trainer's forward pass, in one process, with weights that change at each
publish; faults are put into the generators."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ductile.columns import TokenIds
from ductile.config.schema.inference import InferenceConfig
from ductile.core.instances.instances import Instance, instance_on
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.rollouts.provenance import LIMITS, KnownWeights
from ductile.generator.generate_role import GenerateRole
from ductile.messages.updates import LiveDigest
from ductile.messages.workers import DigestWeights, Finished, Generate, Receive
from ductile.model.checkpoint import load_model
from ductile.model.packed import PackedSamples
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.loop.canaries import Canaries
from ductile.parallel.scoring import as_columns
from ductile.records import GenerateRequest, Generation, Manifest
from ductile.roles import RoleAssignment
from ductile.sampling import Sampling
from ductile.weights.shared_memory import SharedMemory

PROMPTS = [TokenIds(range(5, 45)), TokenIds(range(60, 100))]
"""Long enough for two blocks of the prefix cache."""


@dataclass
class Generator:
    """A generate role, driven as its slot drives it."""

    instance: Instance
    role: GenerateRole
    done: dict[str, Generation] = field(default_factory=dict)

    @property
    def engine(self):
        return self.role._engine

    def generate(self, request: GenerateRequest) -> Generation:
        self.role.handle(Generate((request,)))
        while self.role.has_work():
            for event in self.role.step():
                if isinstance(event, Finished):
                    self.done |= {each.id: each for each in event.generations}
        return self.done.pop(request.id)


class Rig:
    """The generators' side and the trainer's of `Canaries`. Change a generator, then `publish`."""

    def __init__(
        self, folder: Path, model: Path, dtype: str = "float32", num_generators: int = 2, lr: float = 0.02
    ) -> None:
        torch_dtype = getattr(torch, dtype)
        self.trainer, self.lr = load_model(model, dtype=torch_dtype).eval(), lr
        config = InferenceConfig.model_validate(
            {"model": {"name": str(model), "max_model_len": 128, "dtype": dtype}, "block_size": 16}
        )
        self.generators: dict[str, Generator] = {}
        for slot in range(num_generators):
            place = RoleAssignment(slot=slot, layout=ParallelLayout.of((slot,)), epoch=1, device="cpu")
            instance = instance_on("generate", (slot,))
            self.generators[instance.id] = Generator(instance, GenerateRole(config.model_dump(), place))
        self.memory, self.version = SharedMemory(), -1
        self.record = Recorder(folder, clock=lambda: 0.0)
        self.folder, self.adapters = folder, {}
        self.delta: dict[str, Tensor] = {}
        """Part of the trainer's weights that is published beside the tensors, as an adapter."""
        sampling = Sampling(temperature=0.7, seed=3)
        self.canaries = Canaries(PROMPTS, sampling, self, self, LIMITS[dtype], self.record)

    @property
    def instances(self) -> list[Instance]:
        return [each.instance for each in self.generators.values()]

    async def canary(self, instance: Instance, request: GenerateRequest) -> Generation:
        return self.generators[instance.id].generate(request)

    async def digest_weights(self, instance: Instance) -> LiveDigest:
        return self.generators[instance.id].role.handle(DigestWeights()).live

    async def score(self, samples, version):
        with torch.no_grad():
            for name, delta in self.delta.items():
                self.trainer.get_parameter(name).add_(delta)
            logprobs, _ = PackedSamples.of(samples).score(self.trainer)
            for name, delta in self.delta.items():
                self.trainer.get_parameter(name).sub_(delta)
        return as_columns(samples, logprobs)

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.trainer.parameters():
                parameter.add_(torch.randn_like(parameter) * self.lr)

    def publish(self) -> list[dict[str, Any]]:
        """A step, a version, and its canaries. Returns what was told of them."""
        return asyncio.run(self._publish())

    async def _publish(self) -> list[dict[str, Any]]:
        if self.version >= 0:
            self.train()
        self.version += 1
        manifest = self.memory.publish(self.version, self.trainer.named_parameters())
        for generator in self.generators.values():
            generator.role.handle(Receive("generate", self.as_received(generator, manifest)))
        self.memory.withdraw(self.version)
        before = len(self.told())
        self.canaries.check_soon(replace(KnownWeights.of(manifest), adapters=self.adapters))
        await self.canaries._checking
        return self.told()[before:]

    def as_received(self, generator: Generator, manifest: Manifest) -> Manifest:
        return manifest

    def told(self) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.folder / "events.jsonl") if row["kind"] == "canary_disagreed"]

    def close(self) -> None:
        for generator in self.generators.values():
            generator.role.close()
        self.memory.close()
        self.record.close()


def opened(folder: Path, model: Path, **given: Any) -> Iterator[Rig]:
    rig = Rig(folder, model, **given)
    try:
        yield rig
    finally:
        rig.close()
