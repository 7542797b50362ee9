"""A decoder-only transformer: Llama, Qwen2 and Qwen3 on one page. It knows no batch, no cache and no mesh.

Tokens come flat, documents one after the other; `attend` knows which may see which. Names on disk differ
(`ductile.core.layout.model.parameters`).

T tokens, M hidden size, H query heads, K key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ductile.core.layout.model.parameters import is_adapter
from ductile.core.layout.model.spec import ModelSpec
from ductile.kernels.dispatch import add_norm, linear, rms_norm, split_heads, swiglu
from ductile.model.attention import Attend
from ductile.model.linear import Linear, make_linear
from ductile.model.rope import Rope

Head = Callable[[Tensor, Tensor], Tensor]
"""Function that makes the model's output from the last hidden states [T, M] and the output embeddings [V, M]."""


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dim, in fp32, and scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class AddNorm(RMSNorm):
    """Norm of the residual stream, behind what a block adds to it."""

    def forward(self, x: Tensor, change: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x and `change` [T, M] -> x + change, and its norm. Without a change x itself, and its norm."""
        return add_norm(x, change, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.eps = spec.rms_norm_eps
        rows = [heads * spec.head_dim for heads in self.heads]
        self.qkv_proj = make_linear(spec, "attention.qkv_proj", spec.hidden_size, rows, spec.attention_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.o_proj = make_linear(spec, "attention.o_proj", rows[0], [spec.hidden_size], spec.output_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        q, k, v = split_heads(self.qkv_proj(x), self.heads, self._norm_weight(), self.eps, cos, sin)
        return self.o_proj(attend(layer, q, k, v).flatten(1))

    def _norm_weight(self) -> Tensor | None:
        """[H + K, D], for every head that is normalised."""
        if not (isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)):
            return None
        num_q, num_k, _ = self.heads
        return torch.cat((self.q_norm.weight.expand(num_q, -1), self.k_norm.weight.expand(num_k, -1)))


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_up_proj = make_linear(spec, "mlp.gate_up_proj", hidden, [inner, inner], spec.mlp_bias)
        self.down_proj = make_linear(spec, "mlp.down_proj", inner, [hidden], spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = AddNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention = Attention(spec)
        self.mlp_norm = AddNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        x, normed = self.attention_norm(x)
        x, normed = self.mlp_norm(x, self.attention(normed, cos, sin, layer, attend))
        return x + self.mlp(normed)


class Transformer(nn.Module):
    """Made with uninitialised weights; `ductile.model.checkpoint.load_model` fills them. With adapters these alone have
    gradients.

    Layers have the numbers that they have in the whole model, also where only some of them are here: then the
    embeddings are where the first one is (tied ones also where the last one is), and norm and head where the last one
    is.
    """

    def __init__(self, spec: ModelSpec, layers: Sequence[int] | None = None) -> None:
        """`layers`: numbers of the layers that are here, ascending; None: all."""
        super().__init__()
        self.spec = spec
        self.layer_numbers = range(spec.num_layers) if layers is None else layers
        """Numbers of the layers that are here."""
        self.rope = Rope(spec)
        is_first, is_last = 0 in self.layer_numbers, spec.num_layers - 1 in self.layer_numbers
        if is_first or (is_last and spec.tie_embeddings):
            self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleDict({str(number): Layer(spec) for number in self.layer_numbers})
        if is_last:
            self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
            if not spec.tie_embeddings:
                self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.lora is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_adapter(name))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        head: Head = linear,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """Token ids `x` [T] and `positions` [T] (from 0 in each document), int64 -> whatever `head` makes of them: by
        default logits [T, V].

        `layers`: which of the layers that are here to run, one after the other; None: all. Without the model's first
        one `x` is hidden states [T, M], without its last one the result is.

        `head` runs inside forward, so that wrappers which gather weights for the time of a forward (FSDP) cover it.
        """
        numbers = self.layer_numbers if layers is None else layers
        cos, sin = self.rope(positions)
        if numbers[0] == 0:
            x = self.embed(x)
        for number in numbers:
            x = self.layers[str(number)](x, cos, sin, number, attend)
        if numbers[-1] < self.spec.num_layers - 1:
            return x
        output = self.embed if self.spec.tie_embeddings else self.lm_head
        return head(self.norm(x), output.weight)
