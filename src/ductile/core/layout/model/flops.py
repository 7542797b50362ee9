"""Floating-point operations of a forward and of a training pass, by a model's spec.

Source: the count of PaLM (Chowdhery et al. 2022, appendix B) and of Megatron-LM (Narayanan et al. 2021, appendix),
which is what "model FLOPs utilisation" divides by a device's peak. A multiply-add is 2 operations.

    matrices      2 x parameters x tokens forward, 4 backward; 2 where the parameters are not trained. Embeddings are
                  looked up, and not multiplied; norms and biases are not counted. The output embeddings are multiplied
                  for scored tokens alone.
    attention     4 x heads x head size x layers x pairs forward (scores, and values weighed by them), 8 backward.
                  A pair is a token and one that it sees: causal, inside its own document.

    adapters      as matrices. Bs of projections that are fused count as they are multiplied: as one matrix, which has
                  the outputs of all of the module's projections and a column for each row of its As (`model.linear`).

What an implementation computes besides is not counted: the masked half of a square, scores and logits that are made
again in the backward pass. A prompt that several samples share counts once; with cp_style "ring" it is run for each of
them, so utilisation is understated there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ductile.core.layout.model.lora import FUSED
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
    matrices = spec.num_layers * (layer_matrix_parameters(spec) + adapter_products(spec)) * work.num_tokens
    head = spec.vocab_size * spec.hidden_size * work.num_scored
    return 2 * (matrices + head + spec.num_layers * _attention(spec, work))


def training_flops(spec: ModelSpec, work: ForwardWork) -> int:
    """Forward and backward. Of a product's two factors each has a gradient, and each gradient is as large a product.
    With adapters the weights have none; and below the first adapter nothing has."""
    forward = forward_flops(spec, work)
    if spec.lora is None:
        return 3 * forward
    modules, targets = module_parameters(spec), [name for name in FUSED if any(spec.lora.among(name))]
    first = [*FUSED].index(targets[0])
    below = sum([*modules.values()][: first + 1])
    inputs = [spec.projections[name][0] for name in FUSED[targets[0]] if name in spec.lora.targets]
    of_weights = spec.num_layers * adapter_products(spec) * work.num_tokens
    of_inputs = (below + spec.lora.rank * sum(inputs)) * work.num_tokens
    attention = (spec.num_layers - (first > 0)) * _attention(spec, work)
    # Of each product in the forward pass the gradient of its input, of attention both.
    return 2 * forward + 2 * (of_weights - of_inputs + 2 * attention - spec.num_layers * _attention(spec, work))


def layer_matrix_parameters(spec: ModelSpec) -> int:
    """Parameters of one layer's projections, without biases and adapters."""
    return sum(module_parameters(spec).values())


def adapter_products(spec: ModelSpec) -> int:
    """Multiply-adds that adapters of one layer take for each token."""
    if spec.lora is None:
        return 0
    products = 0
    for module, names in FUSED.items():
        inputs, outputs = spec.projections[names[0]][0], sum(spec.projections[name][1] for name in names)
        products += spec.lora.rank * sum(spec.lora.among(module)) * (inputs + outputs)
    return products


def module_parameters(spec: ModelSpec) -> dict[str, int]:
    """The same by module, in the order of a forward pass."""
    sizes = {name: inputs * outputs for name, (inputs, outputs) in spec.projections.items()}
    return {module: sum(sizes[name] for name in names) for module, names in FUSED.items()}


def _attention(spec: ModelSpec, work: ForwardWork) -> int:
    """Multiply-adds of one layer's scores, and of values weighed by them."""
    return 2 * spec.num_heads * spec.head_dim * work.num_pairs


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
