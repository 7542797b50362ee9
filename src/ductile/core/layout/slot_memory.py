"""About how much memory a slot needs to train in a layout: an estimate, to choose sizes by before anything runs.

Assumed are fp32 parameters, gradients and two moments (16 bytes a parameter); bf16 arithmetic; nothing computed twice;
one layer's parameters and the embeddings gathered at a time; and `LOGITS` scores of the vocabulary at once.

    activations of a token and layer    what the backward pass reads: the inputs of norms and products, q, k and v, the
                                        output of attention, gate and up: 4 M + 2 (H + K) D + 3 I numbers
    1F1B                                the first stage keeps the activations of pp micro-batches
"""

from ductile.core.layout.flops import layer_matrix_parameters
from ductile.core.layout.parallel_layout import ParallelDims
from ductile.core.layout.spec import ModelSpec

STATE_BYTES = 16
"""Bytes of a parameter with its gradient and its moments."""
COMPUTE_BYTES = 2
LOGITS = 2**27
"""Scores that the head makes at a time, in fp32 (`fused_lm_head_token_chunk_size`)."""
USABLE = 0.9
"""Share of a device's memory that training may take; the rest goes to the driver, to NCCL and to fragmentation."""


def slot_bytes(spec: ModelSpec, dims: ParallelDims, seq_len: int) -> int:
    shards = dims.dp_shard * dims.cp
    layers = -(-spec.num_layers // dims.pp)
    embeddings = spec.vocab_size * spec.hidden_size
    held = (spec.num_parameters - embeddings) // dims.pp + embeddings
    state = held // dims.tp // shards * STATE_BYTES
    gathered = (layer_matrix_parameters(spec) + embeddings) // dims.tp * COMPUTE_BYTES if shards > 1 else 0
    heads = spec.num_heads + spec.num_kv_heads
    numbers = 4 * spec.hidden_size + 2 * heads * spec.head_dim + 3 * spec.intermediate_size
    tokens = -(-seq_len // (dims.cp * dims.tp))
    activations = tokens * numbers * layers * dims.pp * COMPUTE_BYTES
    return state + gathered + activations + LOGITS * 4 // dims.tp
