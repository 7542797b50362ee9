"""Muon: momentum whose matrices are made orthogonal before they are added to the weights.

Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; the learning rate is scaled by
0.2 sqrt(max(rows, columns)), with which steps are as long as AdamW's (Liu et al. 2025, arXiv:2502.16982, 2.2).

Orthogonalizing needs a whole matrix, and layouts have parts of it. So in a step momentum is updated where it lies, what
it gives goes to the matrix's owner by one packed exchange, a batch of matrices at a time, is made orthogonal there, and
comes back by another. Plans are those that move states (`ductile.core.transfer.planning`), so that any layout's update
is that of one slot. Fused weights are split first: each of query, key and value
is a matrix of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from ductile.config.schema.trainer import MuonConfig
from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.model.parameters import is_layer_matrix, parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.transfer.owned import batches_of, owned_layout
from ductile.core.transfer.planning import Planner
from ductile.parallel.data import flat_shard, local_shard
from ductile.parallel.packed_exchange import PackedExchange
from ductile.parallel.parallel_context import ParallelContext

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic iteration, which are those of `torch.optim.Muon`."""
NUM_ITERATIONS = 5
LEAST_NORM = 1e-7
BATCH_BYTES = 64 << 20
"""Most bytes for each slot of the matrices that are exchanged at a time, but for a matrix that has more."""
AXES_OF_STAGE = ("dp_replicate", "dp_shard", "cp", "tp")


class WholeMatrices:
    """Exchanges between a stage's slots, by which each of its layers' matrices is whole on one of them, and back."""

    def __init__(self, spec: ModelSpec, context: ParallelContext, dtype: torch.dtype) -> None:
        """dtype: what matrices travel in, and are made orthogonal in. Collective over the stage's slots."""
        self.dtype = dtype
        self._slot, self._group = context.slot, context.group(*AXES_OF_STAGE)
        self._members = context.layout.group(context.slot, AXES_OF_STAGE)
        self._num_elements = {each.name: prod(each.shape) for each in parameters(spec)}
        self._fused_rows = {each.name: each.rows for each in parameters(spec) if is_layer_matrix(each.name)}
        layout = model_layout(spec, context.layout, str(dtype).removeprefix("torch."))
        ours = [
            each
            for each in layout
            if each.name in self._fused_rows and {*each.holdings.slots.tolist()} & {*self._members}
        ]
        self._stored = Layout(ours, self._members)
        self._planner = Planner(relays=False)
        self._exchanges: dict[tuple[str, ...], tuple[PackedExchange, PackedExchange]] = {}

    def batches(self, names: Sequence[str]) -> list[list[str]]:
        """Return the names in batches that are exchanged at a time; the same on all of the stage's slots."""
        num_bytes = {name: self._stored[name].num_bytes for name in names}
        return batches_of(num_bytes, BATCH_BYTES * len(self._members))

    def even_share(self, name: str) -> int:
        """Return how many numbers of a parameter each of the stage's slots would have, were all dealt out evenly."""
        return -(-self._num_elements[name] // len(self._members))

    def apply(self, change: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what becomes of a batch of matrices, of which this slot has `parts`, flat: each is whole, and split
        into those that are fused in it, when `change` is called. Collective."""
        if len(self._members) == 1:
            shapes = {name: self._stored[name].shape for name in parts}
            return {name: self._changed(change, name, part.view(shapes[name])).view(-1) for name, part in parts.items()}
        there, back = self._exchange(tuple(parts))
        like = next(iter(parts.values()))
        whole = there.run(parts, like)
        for name, matrix in whole.items():
            whole[name] = self._changed(change, name, matrix.view(self._stored[name].shape)).view(-1)
        return back.run(whole, like)

    def _changed(self, change: Callable[[Tensor], Tensor], name: str, matrix: Tensor) -> Tensor:
        return torch.cat([change(part) for part in matrix.split(self._fused_rows[name])])

    def _exchange(self, names: tuple[str, ...]) -> tuple[PackedExchange, PackedExchange]:
        if names not in self._exchanges:
            stored = Layout([self._stored[name] for name in names], self._members)
            costs = {
                each.name: sum(_cost(rows, each.shape[1]) for rows in self._fused_rows[each.name]) for each in stored
            }
            owned = owned_layout(stored, costs)
            there, back = self._planner.plan(stored, owned), self._planner.plan(owned, stored)
            self._exchanges[names] = (
                PackedExchange(there, self._slot, self._members, self._group),
                PackedExchange(back, self._slot, self._members, self._group),
            )
        return self._exchanges[names]


class Muon:
    """The update rule of some of a stage's matrices."""

    def __init__(
        self,
        config: MuonConfig,
        parameters: Mapping[str, nn.Parameter],
        weight_decay: float,
        matrices: WholeMatrices,
    ) -> None:
        self._config, self._parameters, self._weight_decay = config, parameters, weight_decay
        self._matrices = matrices
        self._batches = matrices.batches([*parameters])

    @torch.no_grad()
    def step(self, lr: float, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Update the parameters by their gradients. Collective over the stage's slots."""
        for batch in self._batches:
            self._update(batch, lr, state)

    def _update(self, batch: Sequence[str], lr: float, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """All that it makes is gone when it returns, before the next batch has any."""
        parts = {name: self._momentum(name, state[name]["momentum_buffer"]) for name in batch}
        updates = self._matrices.apply(_scaled_orthogonal, parts)
        for name in batch:
            weights = local_shard(self._parameters[name])
            weights.mul_(1 - lr * self._weight_decay).add_(updates[name].view(weights.shape), alpha=-lr)

    def _momentum(self, name: str, buffer: Tensor) -> Tensor:
        """This slot's part, flat."""
        gradient = self._parameters[name].grad
        assert gradient is not None, "the trainer has looked for a gradient"
        of_slot, mu = flat_shard(gradient), self._config.mu
        momentum = local_shard(buffer).view(-1)
        momentum.lerp_(of_slot, 1 - mu)
        return (of_slot.lerp(momentum, mu) if self._config.nesterov else momentum).to(self._matrices.dtype)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest orthogonal matrix, in the matrix's dtype: its singular values become about 1, by Newton
    and Schulz's iteration."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if is_tall else matrix
    wide = wide / wide.norm().clamp(min=LEAST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


def _scaled_orthogonal(matrix: Tensor) -> Tensor:
    return orthogonal(matrix) * (0.2 * max(matrix.shape) ** 0.5)


def _cost(rows: int, columns: int) -> int:
    """Multiplications of an iteration."""
    short, long = sorted((rows, columns))
    return short * short * (2 * long + short)
