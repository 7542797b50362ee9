"""Floating-point operations of a forward and of a training pass, by a model's spec.

Source: the count of PaLM (Chowdhery et al. 2022, appendix B) and of Megatron-LM (Narayanan et al. 2021, appendix),
which is what "model FLOPs utilisation" divides by a device's peak. A multiply-add is 2 operations.

    matrices      2 x parameters x tokens forward, 4 backward. Embeddings are looked up, and not multiplied; norms and
                  biases are not counted. The output embeddings are multiplied for scored tokens alone.
    attention     4 x heads x head size x layers x pairs forward (scores, and values weighed by them), 8 backward.
                  A pair is a token and one that it sees: causal, inside its own document.

What an implementation computes besides is not counted: the masked half of a square, scores and logits that are made
again in the backward pass. A prompt that several samples share counts once; with cp_style "ring" it is run for each of
them, so utilisation is understated there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ductile.core.layout.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """How much a model has to compute in a forward pass."""

    num_tokens: int = 0
    """Tokens that go through all layers."""
    num_pairs: int = 0
    """Pairs of a token and one that it sees, itself among them."""
    num_scored: int = 0
    """Tokens that are compared with the whole vocabulary."""

    @classmethod
    def of(cls, stems: Sequence[int], branches: Sequence[Sequence[int]], num_scored: int) -> "ForwardWork":
        """Documents of these lengths, and what branches off from each: a branch sees its stem and itself.

        ForwardWork.of([3], [[2, 1]], 3)     6 tokens; 6 pairs in the stem, 6 + 3 and 3 + 1 in the branches
        """
        num_tokens = num_pairs = 0
        for stem, of_stem in zip(stems, branches, strict=True):
            num_tokens += stem + sum(of_stem)
            num_pairs += _triangle(stem) + sum(branch * stem + _triangle(branch) for branch in of_stem)
        return cls(num_tokens, num_pairs, num_scored)

    def __add__(self, other: "ForwardWork") -> "ForwardWork":
        return ForwardWork(
            self.num_tokens + other.num_tokens, self.num_pairs + other.num_pairs, self.num_scored + other.num_scored
        )


def forward_flops(spec: ModelSpec, work: ForwardWork) -> int:
    matrices = spec.num_layers * layer_matrix_parameters(spec) * work.num_tokens
    head = spec.vocab_size * spec.hidden_size * work.num_scored
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * work.num_pairs
    return 2 * (matrices + head + attention)


def training_flops(spec: ModelSpec, work: ForwardWork) -> int:
    """Forward and backward. Of a product's two factors each has a gradient, and each gradient is as large a product."""
    return 3 * forward_flops(spec, work)


def layer_matrix_parameters(spec: ModelSpec) -> int:
    """Parameters of one layer's projections, without biases."""
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = (2 * query + 2 * key) * spec.hidden_size
    return attention + 3 * spec.hidden_size * spec.intermediate_size


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
