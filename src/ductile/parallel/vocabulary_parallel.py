"""The vocabulary dealt out over tp: each slot has equally many rows of the embeddings; the last ones may be padding.

No slot ever has a token's logits over the whole vocabulary. Each makes those of its own rows; what a log-prob and an
entropy follow from are three numbers a token and slot, which all slots give each other, once a micro-batch.

T tokens, S = T / R of them on each of R slots, N scored ones, M hidden size, P rows of the vocabulary on each slot.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ductile.model.logprobs import LogprobHead, VocabularyPart
from ductile.parallel.sequence_parallel import gather, gathered, reduce_scatter


class VocabularyParallelEmbedding(nn.Embedding):
    """Looks up the tokens that are among the slot's rows; the sum over the slots has them all."""

    def __init__(self, whole: nn.Embedding, group: dist.ProcessGroup) -> None:
        """Takes the place of `whole`, which has the slot's rows already."""
        vars(self).update(vars(whole))
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """token ids [T] -> embeddings of the slot's tokens [S, M]."""
        row = input - self.group.rank() * len(self.weight)
        elsewhere = (row < 0) | (row >= len(self.weight))
        found = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        # Not by a product with 0: the first row may be padding, which can be anything.
        return reduce_scatter(found.masked_fill(elsewhere[:, None], 0.0), self.group)


@dataclass(frozen=True, slots=True)
class VocabularyParallelHead:
    """`LogprobHead` of a tp slot, called as `head(hidden [S, M], weight [P, M])`: equal results on every slot."""

    head: LogprobHead
    """The head of the whole micro-batch."""
    vocab_size: int
    """Rows of the whole vocabulary, without padding."""
    group: dist.ProcessGroup

    def __call__(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        start = self.group.rank() * len(weight)
        num_rows = min(max(0, self.vocab_size - start), len(weight))
        row = self.head.targets - start
        here = (row >= 0) & (row < num_rows)
        head = replace(self.head, targets=row.where(here, 0), part=VocabularyPart(here, self._over_all_rows))
        return head(gather(hidden, self.group), weight[:num_rows] if num_rows < len(weight) else weight)

    def _over_all_rows(self, of_part: Tensor) -> Tensor:
        if not of_part.numel():
            return of_part
        target_logits, log_totals, mean_logits = gathered(of_part[None], self.group).unbind(1)
        log_total = log_totals.logsumexp(0)
        share = (log_totals - log_total).exp()
        return torch.stack((target_logits.sum(0), log_total, (share * mean_logits).sum(0)))
