"""Context parallelism: the slots along cp run the tokens of one micro-batch together.

1. `aligned` lays the samples out so that they can be split: by documents where the style wants it, and filled up.
2. `split` gives a slot its part: tokens, what is scored of them, and the attention that sees the other slots' tokens.
   Which tokens are scored, after which, is known by then: nothing else looks across the border of a part.
3. The model runs the part, without knowing that it is one.
4. `ContextPart.gather` brings the scores of all slots together, so that each computes the same loss of whole samples.
   Its gradient is the slot's own part: the slots' gradients add up where those of samples do, in FSDP2's reduction.

`ductile.core.layout.geometry.context_parallel` says which tokens are whose, `ulysses` and `ring` how they see each
other.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ductile.core.layout.geometry.context_parallel import CpStyle, document_multiple, num_laid_out, tokens_of_slots
from ductile.model.attention import Attend, PackedAttention
from ductile.model.packed import PackedSamples
from ductile.parallel.ring import RingAttention
from ductile.parallel.ulysses import UlyssesAttention


@dataclass(frozen=True, slots=True)
class ContextPart:
    """A slot's part of a micro-batch: T / cp of the T tokens, and n of the N scores."""

    token_ids: Tensor
    """[T / cp] int64"""
    positions: Tensor
    """[T / cp] int64"""
    rows: Tensor
    """[n] int64: which of the slot's tokens comes before the scored one."""
    targets: Tensor
    """[n] int64: the scored tokens."""
    temperatures: Tensor | None
    """[n] fp32: sampling temperature of each scored token; None when all are 1."""
    attend: Attend
    """Attention of one layer after the other, collective among the slots along cp."""
    scored: Tensor
    """[n] int64: which of the N scores the slot has."""
    num_scored: int
    """N"""
    group: dist.ProcessGroup
    """The slots along cp."""

    def gather(self, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
        """The slot's log-probs and entropies [n] -> those of all slots [N], fp32, in the order of the samples.
        Collective among the slots along cp."""
        if self.group.size() == 1:
            return logprobs, entropies
        return _Gather.apply(logprobs, entropies, self.scored, self.num_scored, self.group)  # pyright: ignore


def aligned(packed: PackedSamples, style: CpStyle, cp: int, tp: int = 1) -> PackedSamples:
    """The same samples, laid out so that `split` can part them, with as few tokens as that takes.

    They may be padded further, to any multiple of `token_multiple`.
    """
    if style == "ring" and cp > 1:
        packed = packed.unshared(document_multiple(style, cp))
    return packed.padded(num_laid_out(style, (len(packed.token_ids),), cp, tp))


def split(packed: PackedSamples, style: CpStyle, group: dist.ProcessGroup) -> ContextPart:
    """This slot's part of samples that are `aligned`. `group` has the slots along cp."""
    cp, rank, device = group.size(), group.rank(), packed.token_ids.device
    attend: Attend = PackedAttention(packed.stems, packed.branches)
    if cp == 1:
        whole = (packed.token_ids, packed.positions, packed.rows, packed.targets, packed.temperatures, attend)
        return ContextPart(*whole, torch.arange(len(packed.targets), device=device), len(packed.targets), group)
    documents = packed.stems if style == "ring" else (len(packed.token_ids),)
    tokens = torch.from_numpy(tokens_of_slots(style, documents, cp)).to(device)
    place = torch.empty(tokens.numel(), dtype=torch.int64, device=device)
    place[tokens.flatten()] = torch.arange(tokens.numel(), device=device)
    owner, row = place[packed.rows] // tokens.shape[1], place[packed.rows] % tokens.shape[1]
    scored = (owner == rank).nonzero()[:, 0]
    if style == "ring":
        attend = RingAttention([length // (2 * cp) for length in packed.stems], group)
    else:
        attend = UlyssesAttention(attend, group)
    return ContextPart(
        token_ids=packed.token_ids[tokens[rank]],
        positions=packed.positions[tokens[rank]],
        rows=row[scored],
        targets=packed.targets[scored],
        temperatures=None if packed.temperatures is None else packed.temperatures[scored],
        attend=attend,
        scored=scored,
        num_scored=len(packed.targets),
        group=group,
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropies: Tensor, scored: Tensor, num_scored: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(scored)
        ctx.set_materialize_grads(False)
        whole = logprobs.new_zeros((2, num_scored))
        whole[:, scored] = torch.stack((logprobs, entropies))
        dist.all_reduce(whole, group=group)  # each number is one slot's, and 0 on the others
        return whole[0].clone(), whole[1].clone()  # a loss may change them in place, as it may without cp

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (scored,) = ctx.saved_tensors
        own_logprobs, own_entropies = (None if grad is None else grad[scored] for grad in (of_logprobs, of_entropies))
        return own_logprobs, own_entropies, None, None, None
