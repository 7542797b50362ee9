"""Memory that the optimizer's step takes of a device besides parameters, gradients and the state that lies there:

- an offloaded state comes bucket by bucket: one is updated while the next one comes and the one before goes back
- what a rule works with. Muon has a batch of momenta, whole matrices and the updates at once; AdamW of 8 bits has both
  moments of a parameter in fp32, and quantizes one of them; sign-SGD has signs. torch's fused rules need nothing

The modules that do it are `ductile.trainer.optimizer`, `muon` and `adamw_8bit`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from math import prod
from typing import NamedTuple

from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.memory.options import MemoryOptions
from ductile.core.layout.memory.slot_shapes import Rows, SlotShapes
from ductile.core.layout.model.parameters import is_layer_matrix, parameters
from ductile.core.layout.model.spec import ModelSpec

BUCKET_BYTES = 64 << 20
"""Most bytes of an offloaded optimizer's state that come to the device at a time, but for a parameter that has more."""
MUON_BATCH_BYTES = 64 << 20
"""Most bytes for each slot of the matrices that Muon exchanges at a time, but for a matrix that has more."""
FP32 = 4
QUANTIZING = 4.25
"""Numbers of fp32 that AdamW of 8 bits has for each of a parameter at most: both moments, shares of the blocks' largest
numbers, codes as int32, and either codes as bytes or where blocks are 0."""


class Trained(NamedTuple):
    """A parameter as the slot's optimizer has it."""

    shard: int
    """Numbers of the slot's shard."""
    is_matrix: bool
    kept_bytes: float
    """Bytes of its state on the slot."""
    fused: tuple[int, ...] = ()
    """Rows of the matrices that are fused in it, whole; none where it is no matrix of a layer."""
    columns: int = 0

    @property
    def whole(self) -> int:
        return sum(self.fused) * self.columns


@dataclass(frozen=True, slots=True)
class StepExtra:
    """Bytes that the optimizer's step takes when it takes most."""

    coming: int = 0
    """Offloaded state that is on the device."""
    working: int = 0
    """Temporary memory of the rule."""


def trained_parameters(
    spec: ModelSpec, shapes: SlotShapes, options: MemoryOptions, num_layers: int, root: Sequence[Rows], num_shards: int
) -> Iterator[Trained]:
    """Yield what is trained on a slot with so many layers, in the model's order. root: embeddings, norm and head, of
    those that it has."""

    def of(rows: Rows, fused: tuple[int, ...] = (), columns: int = 0) -> Trained:
        shard, is_matrix = -(-rows[0] // num_shards) * rows[1], rows[1] > 1
        return Trained(shard, is_matrix, shard * _kept_of_a_number(options, bool(fused)), fused, columns)

    others = () if spec.lora is not None else tuple(root)
    matrices = shapes.adapter_rows if spec.lora is not None else [shapes.layer_rows[place] for place in (1, 2, 4, 5)]
    layer = [of(rows, *whole) for rows, whole in zip(matrices, _matrices_of_layer(spec), strict=True)]
    if spec.lora is None:
        layer += [of(rows) for rows in shapes.layer_rows if rows[1] == 1]
    yield from map(of, others[:1])
    for _ in range(num_layers):
        yield from layer
    yield from map(of, others[1:])


def step_extra(trained: Sequence[Trained], options: MemoryOptions, dims: ParallelDims) -> StepExtra:
    """Return what the step takes on a slot that trains these."""
    offloads = options.optim_cpu_offload
    buckets = list(_buckets(trained)) if offloads else [trained]
    sizes = [int(sum(each.kept_bytes for each in bucket)) if offloads else 0 for bucket in buckets]
    near = [sum(sizes[max(0, place - 1) : place + 2]) for place in range(len(buckets))]
    extras = [StepExtra(coming, _working(bucket, options, dims)) for coming, bucket in zip(near, buckets, strict=True)]
    return max(extras, key=lambda extra: extra.coming + extra.working, default=StepExtra())


def _kept_of_a_number(options: MemoryOptions, is_layer_matrix: bool) -> float:
    if options.rule != "muon":
        return options.optimizer_bytes
    return options.parameter_bytes * (1 if is_layer_matrix else 2)  # what is no matrix of a layer has AdamW's moments


@lru_cache(maxsize=64)
def _matrices_of_layer(spec: ModelSpec) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Rows of the fused matrices, and columns, of each trained matrix of a layer."""
    of_first = [each for each in parameters(spec) if each.name.startswith("layers.0.") and each.is_trained]
    return tuple((each.rows, each.shape[1]) for each in of_first if is_layer_matrix(each.name))


def _buckets(trained: Sequence[Trained]) -> Iterator[list[Trained]]:
    bucket: list[Trained] = []
    num_bytes = 0.0
    for each in trained:
        if bucket and num_bytes + each.kept_bytes > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0.0
        bucket.append(each)
        num_bytes += each.kept_bytes
    yield bucket


def _working(bucket: Sequence[Trained], options: MemoryOptions, dims: ParallelDims) -> int:
    if options.rule == "muon":
        return _muon_bytes([each for each in bucket if each.fused], options, dims)
    if options.rule == "adamw_8bit":
        largest = max((each.shard for each in bucket if each.is_matrix), default=0)
        copied = 0 if options.parameter_bytes == FP32 else 1  # the gradient, in fp32
        return int(largest * FP32 * (QUANTIZING + copied))
    signs = max((each.shard for each in bucket), default=0) * options.parameter_bytes
    return signs if options.rule == "sign_sgd" else 0


def _muon_bytes(matrices: Sequence[Trained], options: MemoryOptions, dims: ParallelDims) -> int:
    """The momenta of a batch, and what becomes of them: on a slot that is alone one after the other, else whole
    matrices of which each slot has some, and the messages that bring them and take them back."""
    members = prod((dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp))
    most = 0
    for batch in _batches(matrices, MUON_BATCH_BYTES * members // options.compute_bytes):
        parts = sum(each.shard for each in batch)
        if members == 1:
            done = [sum(each.whole for each in batch[:place]) for place in range(len(batch))]
            making = max(before + _orthogonalizing(each) for before, each in zip(done, batch, strict=True))
            most = max(most, parts + making)
            continue
        owned, moved = _most_owned(batch, members), (members - 1) / members
        making = owned + max(map(_orthogonalizing, batch))
        returning = owned + parts + int(moved * (2 * owned + parts))
        coming = owned + int(moved * (2 * parts + owned))
        most = max(most, parts + max(making, returning, coming))
    return most * options.compute_bytes


def _batches(matrices: Sequence[Trained], most: int) -> Iterator[list[Trained]]:
    batch: list[Trained] = []
    for each in matrices:
        if batch and sum(one.whole for one in batch) + each.whole > most:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _orthogonalizing(matrix: Trained) -> int:
    """Numbers beside a matrix while it is made orthogonal: those of its fused ones that are done, of the one that runs
    it and its next iteration, and two products with itself; then all of them, and all in one."""
    most, done = 2 * matrix.whole, 0
    for rows in matrix.fused:
        short = min(rows, matrix.columns)
        most = max(most, done + 2 * rows * matrix.columns + 2 * short * short)
        done += rows * matrix.columns
    return most


def _most_owned(batch: Sequence[Trained], members: int) -> int:
    """Numbers of the whole matrices of the slot that has most, as they are dealt out: the dearest first, each to the
    slot with least so far."""
    loads = [(0, 0)] * members
    heapify(loads)
    most = 0
    for cost, whole in sorted(((_cost(each), each.whole) for each in batch), reverse=True):
        load, owned = loads[0]
        heapreplace(loads, (load + cost, owned + whole))
        most = max(most, owned + whole)
    return most


def _cost(matrix: Trained) -> int:
    """Multiplications of an iteration."""
    sides = (sorted((rows, matrix.columns)) for rows in matrix.fused)
    return sum(short * short * (2 * long + short) for short, long in sides)
