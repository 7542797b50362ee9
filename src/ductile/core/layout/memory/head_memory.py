"""What the head takes that scores tokens: `model/logprobs.py`, line by line.

n rows of logits at a time, V rows of the vocabulary on the slot, M hidden size. In bytes of a number:

forward     a chunk's logits in fp32, and their exponentials beside those of the chunk before
backward    probabilities and their gradient in fp32, and the gradient in the compute dtype; of the weight's gradient
            [V, M] a sum in fp32, and a chunk's product in the compute dtype

With `fp32_lm_head` the compute dtype is fp32 here, and from the forward to the backward pass there is a copy of the
weight in it.
"""

from dataclasses import dataclass

from ductile.core.layout.memory.options import MemoryOptions
from ductile.core.layout.memory.slot_shapes import SlotShapes

CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Most logits of a chunk, by kind of device, where the config leaves it open: `model.logprobs.CHUNK_ELEMENTS`, which is
held equal by a test, as that module takes torch."""
FP32 = 4


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """Bytes of the head, for a micro-batch whose tokens are all scored."""

    kept: int
    """Hidden states of the scored tokens, and the last norm's input, from the forward to the backward pass."""
    kept_logits: int
    """Probabilities that wait for the backward pass: those of a micro-batch that is one chunk."""
    forward_activations: int
    forward_logits: int
    """Logits, and the copy of the weight."""
    backward_activations: int
    """Gradients of hidden states, beside what is kept."""
    backward_logits: int
    """Logits and their gradients, those that are kept among them, while these are most."""
    product_logits: int
    """The same while the weight's gradient is most."""
    sum_gradients: int
    """Gradient of the weight, in fp32."""
    product_gradients: int
    """A chunk's part of it; then the whole of it in the compute dtype, where that is another one."""


def head_memory(shapes: SlotShapes, options: MemoryOptions) -> HeadMemory:
    """Return what the head of the last stage takes."""
    is_cast = options.fp32_lm_head and shapes.compute_bytes < FP32
    c, num_scored = FP32 if is_cast else shapes.compute_bytes, shapes.tokens
    weight = FP32 * shapes.vocab_rows * shapes.hidden_size
    copied = weight if is_cast else 0
    most = options.head_chunk_tokens or max(1, CHUNK_ELEMENTS[shapes.device] // shapes.vocab_rows)
    first = min(most, num_scored)
    second = min(most, num_scored - first)
    logits, following = first * shapes.vocab_rows, second * shapes.vocab_rows
    cast = c if c < FP32 else 0
    hidden = num_scored * shapes.hidden_size * c
    if following:  # the chunk before is there until its names are those of the next one
        forward = 2 * FP32 * logits + (FP32 + cast) * following
        backward = max((FP32 + FP32 + cast) * logits, (FP32 + FP32) * following + c * logits)
    else:
        forward = max(FP32 + cast, 2 * FP32) * logits
        backward = (FP32 + FP32 + cast) * logits
    return HeadMemory(
        kept=shapes.hidden_bytes + hidden,
        kept_logits=0 if following else FP32 * logits,
        forward_activations=shapes.hidden_bytes + (shapes.summed_bytes if shapes.tp > 1 else 0),
        forward_logits=forward + copied,
        backward_activations=hidden,
        backward_logits=backward + copied,
        product_logits=(FP32 + c) * logits + copied,
        sum_gradients=0 if shapes.adapters else weight,
        product_gradients=0 if shapes.adapters else c * shapes.vocab_rows * shapes.hidden_size,
    )
