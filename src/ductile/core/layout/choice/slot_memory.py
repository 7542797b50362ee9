"""About how much memory a slot needs to train in a layout: an estimate, to choose sizes by before anything runs.

state           parameters, gradient and what the optimizer keeps, sharded: `SlotMemory.state_bytes` a parameter
gathered        one layer's parameters and the embeddings at a time, or all of the slot's, where they are kept
gradients       of all the slot's parameters, where they are reduced once a step
activations     of a token and layer: what the backward pass reads, which are the inputs of norms and products, q, k
                and v, the output of attention, gate and up: 4 M + 2 (H + K) D + 3 I numbers. Nothing is computed
                twice. In 1F1B the first stage keeps those of pp micro-batches
scores          of the vocabulary, `LOGITS` at a time
"""

from dataclasses import dataclass

from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.model.flops import layer_matrix_parameters
from ductile.core.layout.model.spec import ModelSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LOGITS = 2**27
"""Scores that the head of a slot makes at a time (`fused_lm_head_token_chunk_size`)."""
SCORE_BYTES = 8
"""Bytes of a score and its probability, in fp32."""
USABLE = 0.9
"""Share of a device's memory that its roles may take; the rest goes to the driver, to NCCL and to fragmentation."""


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """What training keeps on a slot, in bytes, and how much memory there is for it."""

    room_bytes: int
    """Memory that a slot has for training."""
    state_bytes: int = 16
    """Bytes of a parameter, its gradient and what the optimizer keeps for it."""
    compute_bytes: int = 2
    """Bytes of a number in forward and backward passes."""
    gradient_bytes: int = 0
    """Bytes of a number of gradients that each slot keeps whole until the optimizer step; 0 where ranks add them up
    before."""
    keeps_gathered: bool = False
    """Whether gathered parameters are kept until the backward pass; with pp they are always."""
    least_bytes: int = 0
    """Bytes that a slot is taken to have in any case: those that the layouts need in which the run begins, and that
    were asked for by hand."""

    def needed(self, spec: ModelSpec, dims: ParallelDims, seq_len: int) -> int:
        """Bytes that a slot needs in a layout of these sizes."""
        shards = dims.dp_shard * dims.cp
        layers = -(-spec.num_layers // dims.pp)
        embeddings = spec.vocab_size * spec.hidden_size
        of_slot = ((spec.num_parameters - embeddings) // dims.pp + embeddings) // dims.tp
        if dims.pp > 1 or self.keeps_gathered:
            gathered = of_slot
        else:
            gathered = (layer_matrix_parameters(spec) + embeddings) // dims.tp
        copied = gathered * self.compute_bytes if shards > 1 else 0
        heads = spec.num_heads + spec.num_kv_heads
        numbers = 4 * spec.hidden_size + 2 * heads * spec.head_dim + 3 * spec.intermediate_size
        tokens = -(-seq_len // (dims.cp * dims.tp))
        activations = tokens * numbers * layers * dims.pp * self.compute_bytes
        state = of_slot // shards * self.state_bytes + of_slot * self.gradient_bytes
        scores = min(LOGITS, -(-seq_len // dims.cp) * -(-spec.vocab_size // dims.tp))
        return state + copied + activations + scores * SCORE_BYTES

    def missing(self, needed_bytes: int) -> int:
        """Bytes of these that a slot does not have."""
        return max(0, needed_bytes - max(self.room_bytes, self.least_bytes))
