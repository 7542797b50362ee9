"""The generate role of a slot: an engine, fed by commands, that reports by events."""

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from ductile.config.schema.inference import InferenceConfig
from ductile.core.layout.model.peak import compute_dtype
from ductile.fabric import heap
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.generation_engine import GenerationEngine, KVMigration
from ductile.generator.engine.kv_transfer import KVTransferBuffer, KVUnavailable, RequestKV
from ductile.generator.engine.step_profiler import StepProfiler
from ductile.generator.engine.weight_columns import empty_by_columns
from ductile.messages.updates import Digest
from ductile.messages.workers import (
    Abort,
    DigestWeights,
    Done,
    EngineStats,
    Finished,
    Forget,
    Generate,
    MigratedOut,
    MigrateOut,
    Receive,
    WeightDigests,
)
from ductile.model.checkpoint import dtype_named, empty_model, load_model, read_spec
from ductile.records import GenerateRequest, Generation, KVHandle, Manifest, both_digests
from ductile.roles import Refused, RoleAssignment
from ductile.tasks.tokenizer import Tokenizer
from ductile.weights.instance_role import InstanceRole
from ductile.weights.live_weights import VersionTensors

STATS_EVERY_S = 0.5
REMEMBERED = 64
"""Versions whose digests are known: no token that is trained on is of an older one."""

S = TypeVar("S", Generation, GenerateRequest)


class GenerateRole(InstanceRole):
    """`ductile.roles.SlotRole`. `settings` is a dumped `InferenceConfig`."""

    does, peers = "generates", "generators"

    def __init__(self, settings: dict[str, Any], assignment: RoleAssignment) -> None:
        super().__init__(assignment)
        config = InferenceConfig.model_validate(settings)
        with_weights = not assignment.joining
        self._engine: GenerationEngine = load_engine(config, assignment.device, with_weights=with_weights)
        self._transfer_buffer = KVTransferBuffer()
        self._step_profiler = StepProfiler()
        self._stats_due = time.monotonic()
        self._digests: dict[int, Digest] = {}
        """Digests of the latest versions."""
        self._dtypes: dict[str, torch.dtype] = {}
        """Dtypes in which the live version was published."""
        self._stats_owed = False
        """Whether requests have left, so that statistics must be told again even if there is nothing to do any more."""

    def handle(self, command: Any) -> Any:
        """All of a `Generate`'s requests are taken, or none: it raises `RequestRefused` before the first."""
        match command:
            case Generate(requests=requests, caches=caches):
                self.needs_weights(command)
                self._engine.check(*requests)
                for request in requests:
                    self._engine.add(request, self._fetch(request, caches.get(request.id)))
            case Abort(ids=ids):
                self._engine.abort(ids)
            case MigrateOut(ids=ids, with_cache=with_cache):
                return self._migrate_out(ids, with_cache)
            case Forget(ids=ids):
                self._transfer_buffer.forget(ids)
            case Receive(manifest=manifest):
                self._note_digest(manifest)
                return super().handle(command)
            case DigestWeights():
                return self._weight_digests()
            case _:
                return super().handle(command)
        return Done()

    def has_work(self) -> bool:
        return self._engine.has_work() or self._stats_owed

    def step(self) -> list[Finished | EngineStats]:
        events: list[Finished | EngineStats] = []
        start = time.perf_counter()
        generations = self._engine.step()
        for failure in self._engine.failed.values():
            raise failure  # in a run nothing that a request says can fail: the weights are broken, or we are
        if self._engine.last_step is not None:
            self._step_profiler.record(self._engine.last_step, time.perf_counter() - start)
        if generations:
            events.append(Finished(tuple(map(self._with_digests, generations))))
        now = time.monotonic()
        if now >= self._stats_due or not self._engine.has_work():
            events.append(self._stats())
            self._stats_due = now + STATS_EVERY_S
            self._stats_owed = False
        return events

    def close(self) -> None:
        super().close()
        self._transfer_buffer.close()
        del self._engine
        heap.trim_all()

    def live_weights(self) -> tuple[int, Iterable[tuple[str, Tensor]]]:
        return self._engine.version, self._engine.weights()

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self._engine.load_weights(tensors, version)

    def offer(self) -> Manifest | None:
        """The digest is that of the version as it was published, also where the engine has it in another dtype."""
        manifest = super().offer()
        announced = "" if manifest is None else self._digests.get(manifest.version, "")
        return replace(manifest, digest=announced) if manifest and announced else manifest

    def _note_digest(self, manifest: Manifest) -> None:
        self._digests[manifest.version] = manifest.digest
        named = ((entry.name, dtype_named(entry.dtype)) for entry in manifest.tensors)
        self._dtypes |= {name: dtype for name, dtype in named if dtype is not None}
        while len(self._digests) > REMEMBERED:
            del self._digests[next(iter(self._digests))]

    def _with_digests(self, sampled: S) -> S:
        """The same with the digests of the versions that its tokens are of here."""
        versions = np.unique(sampled.versions.array).tolist()
        here = {version: self._digests[version] for version in versions if version in self._digests}
        return replace(sampled, digests=both_digests(sampled.digests, here))

    def _weight_digests(self) -> WeightDigests:
        version, weights = self.live_weights()
        tensors = dict(weights)
        dtypes = {name: self._dtypes.get(name, tensor.dtype) for name, tensor in tensors.items()}
        return WeightDigests(VersionTensors(version, tensors, dtypes).read(self._digests.get(version, "")))

    def _fetch(self, request: GenerateRequest, handle: KVHandle | None) -> RequestKV | None:
        if handle is None or not isinstance(self._engine, KVMigration):
            return None
        try:
            return self._engine.fetch(handle, request)
        except KVUnavailable as why:
            print(f"the context of request {request.id} is computed again: the cache {why}", file=sys.stderr)
            return None

    def _migrate_out(self, ids: tuple[str, ...], with_cache: tuple[str, ...]) -> MigratedOut:
        if not isinstance(self._engine, KVMigration):
            raise Refused(f"the engine of slot {self._slot} cannot give requests up that it has begun")
        left, caches = self._engine.migrate_out(ids, frozenset(with_cache))
        requests = tuple(map(self._with_digests, left))
        self._stats_owed = True
        handles: dict[str, KVHandle] = {}
        for id, cache in caches.items():
            try:
                handles[id] = self._transfer_buffer.put(id, cache)
            except OSError as why:  # the requests have left the engine: nothing may stop them now
                print(f"request {id} goes without its cache: {why}", file=sys.stderr)
        return MigratedOut(requests, handles)

    def _stats(self) -> EngineStats:
        decoded, prefilled = self._step_profiler.drain()
        generated = self._engine.num_generated()
        return msgspec.structs.replace(self._engine.stats(), generated=generated, decoded=decoded, prefilled=prefilled)


def load_engine(
    config: InferenceConfig, device: str, tokenizer: Tokenizer | None = None, with_weights: bool = True
) -> Engine:
    """The engine over the folder that `model.name` says; without weights only its `config.json` and tokenizer are read.
    Raises `ModelFolderError`, `TokenizerError`, `ValueError`."""
    if config.model.name is None:
        raise ValueError("model.name is not set; it must be a Hugging Face model folder")
    tokenizer = tokenizer or Tokenizer.of(config.model)
    dtype = resolve_dtype(config.model.dtype, device)
    if with_weights:
        model = load_model(config.model.name, dtype=dtype, device=device, lora=config.model.adapters)
    else:
        empty = empty_model if device.startswith("cuda") else empty_by_columns
        model = empty(read_spec(config.model.name, lora=config.model.adapters), dtype, device)
    return Engine(model, config, tokenizer.eos_token_ids, tokenizer.decode, device)


def resolve_dtype(name: Literal["auto", "float32", "bfloat16"], device: str) -> torch.dtype:
    return getattr(torch, compute_dtype(None if name == "auto" else name, device))
