"""Runs decode steps, one new token of each sequence, by recordings of the model's forward pass.

1. A step is padded to a shape: rows (`padded_rows`) and blocks of the table (`padded_blocks`). Padding rows are a
   sequence of one token in the cache's spare block.
2. What a step's sequences are goes into one tensor of inputs, which all shapes share, by one copy. The forward pass
   reads nothing else of them, and writes its logits into a tensor that all shapes share.
3. A shape that comes for the first time is recorded (on a GPU, as a CUDA graph); from then on it is replayed. A
   recording has the weights' addresses in it. New values in the same memory (`Engine.load_weights`) it reads as they
   are. Where weights come to lie elsewhere (`Engine.swap_weights`) others are made: a swap takes no copy, and the
   memory of the older version may still be read by a receiver of it. As versions take turns in two places, recordings
   of the last two places are kept.
4. What is not a decode step, and what padding would make longer than launching its kernels one by one, is left to the
   engine. So is everything once a recording has failed.

N sequences, R rows, W blocks in the table, V vocabulary.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ductile.generator.engine.paged_attention import KVCache, without_cudnn
from ductile.generator.engine.scheduler import Chunk
from ductile.generator.engine.static_attention import GatheredDecode, static_attention
from ductile.model.transformer import Head, Transformer

LEAST_TOKENS = 128
"""Tokens in the table of the shortest shape; the others have a power of two as many."""
MOST_GATHERED_TOKENS = 3 * 32768
"""Tokens in the table of the largest shape whose blocks are copied. Estimated: to copy so many in a layer takes about
as long as to launch a layer's kernels one by one (`paged_attention.GROUP_COST_TOKENS`)."""
KEPT_PLACES = 2
"""Places of the weights whose recordings are kept."""

TOKEN, POSITION, SLOT, BLOCKS = range(4)
"""Columns of the inputs: of each row the new token, its position, where in the cache it goes, and from then on its
blocks."""


class RecordedStep(Protocol):
    """Work that has been done once."""

    def replay(self) -> object:
        """Do it again: the same operators, on the same memory."""
        ...


class StepRecorder(Protocol):
    """Seam to CUDA graphs (`ductile.generator.engine.cuda_graphs`)."""

    def record(self, work: Callable[[], None]) -> RecordedStep:
        """Do the work once and record it. It neither depends on values of tensors nor is given any others next time.
        Raises RuntimeError."""
        ...


@dataclass(frozen=True, slots=True)
class StepShape:
    rows: int
    blocks: int
    """Columns of the table of blocks."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a decode step gave."""

    logits: Tensor
    """[N, V] of the tokens behind the sequences' last ones. Valid until the next step."""
    is_recorded: bool
    """Whether the step was the first of its shape."""


def padded_rows(num: int) -> int:
    """Rows of a step of so many sequences: 1, 2, 4, 8, then multiples of 8, and of an eighth of the power of two below.

    9 -> 16, 100 -> 104, 129 -> 144, 600 -> 640
    """
    if num <= 8:
        return 1 << (num - 1).bit_length()
    step = max(8, 1 << ((num - 1).bit_length() - 4))
    return -(-num // step) * step


def padded_blocks(longest: int, most: int, block_size: int) -> int:
    """Blocks of a step whose longest sequence has so many tokens, in a cache for sequences of at most `most`."""
    tokens = max(LEAST_TOKENS, 1 << (longest - 1).bit_length())
    return -(-min(tokens, max(longest, most)) // block_size)


def _scores_prompt(chunk: Chunk) -> bool:
    """Whether a client wants log-probs of a prompt's tokens that the chunk computes: they are made of hidden states."""
    report = chunk.sequence.report
    return report is not None and report.with_prompt and chunk.start < len(chunk.sequence.request.prompt) - 1


class DecodeRunner:
    """Runs steps that `shape_of` has a shape for. To be called by one thread, as the engine is."""

    def __init__(
        self, model: Transformer, cache: KVCache, max_num_seqs: int, max_len: int, head: Head, recorder: StepRecorder
    ) -> None:
        """max_len: tokens of the longest sequence. head: makes logits of hidden states, as `Transformer` calls it."""
        self._model, self._cache, self._head, self._recorder = model, cache, head, recorder
        self._max_num_seqs, self._max_len = max_num_seqs, max_len
        self._attention, self.why_gathered = static_attention(cache)
        device, rows = cache.keys.device, padded_rows(max_num_seqs)
        most_blocks = padded_blocks(max_len, max_len, cache.block_size)
        self._inputs = torch.zeros(rows * (BLOCKS + most_blocks), dtype=torch.int64, device=device)
        self._logits: Tensor | None = None
        """[R, V]; made by the first step, as the head chooses the type."""
        self._places: dict[tuple[int, ...], dict[StepShape, RecordedStep]] = {}
        """Recordings by the addresses of the weights; those that were used last are last."""
        self.num_recorded = self.num_replayed = 0
        """Steps that were recorded, and all that were replayed, those among them."""
        self.why_off = ""
        """Why nothing is recorded any more; "" while it is."""
        self.weights_moved()

    def weights_moved(self) -> None:
        """Take note that the model's parameters may lie elsewhere."""
        place = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        self._recordings = self._places.pop(place, {})
        self._places[place] = self._recordings
        while len(self._places) > KEPT_PLACES:
            del self._places[next(iter(self._places))]

    def run(self, chunks: Sequence[Chunk]) -> Decoded | None:
        """Run a step's chunks; None where the step is not one for this runner."""
        shape = self.shape_of(chunks)
        if shape is None or self.why_off:
            return None
        self._inputs_of(shape).copy_(torch.from_numpy(self._fill(chunks, shape)))
        recording = self._recordings.get(shape)
        is_new = recording is None
        if recording is None:
            try:
                with without_cudnn():
                    recording = self._recordings[shape] = self._recorder.record(partial(self._forward, shape))
            except RuntimeError as error:
                self._turn_off(error)
                return None
            self.num_recorded += 1
        recording.replay()
        self.num_replayed += 1
        assert self._logits is not None
        return Decoded(self._logits[: len(chunks)], is_new)

    def shape_of(self, chunks: Sequence[Chunk]) -> StepShape | None:
        """Return the shape in which these run, or None."""
        if any(chunk.count > 1 or not chunk.reaches_the_end or _scores_prompt(chunk) for chunk in chunks):
            return None
        longest = max(chunk.end for chunk in chunks)
        shape = StepShape(padded_rows(len(chunks)), padded_blocks(longest, self._max_len, self._cache.block_size))
        copied = shape.rows * shape.blocks * self._cache.block_size if self._attention is GatheredDecode else 0
        return shape if copied <= MOST_GATHERED_TOKENS else None

    def _fill(self, chunks: Sequence[Chunk], shape: StepShape) -> np.ndarray:
        """Return the inputs [R, 3 + W]. A row goes on behind its last block with its first, which is masked."""
        block_size, spare = self._cache.block_size, self._cache.spare_block
        inputs = np.empty((shape.rows, BLOCKS + shape.blocks), dtype=np.int64)
        inputs[len(chunks) :] = spare
        inputs[len(chunks) :, :BLOCKS] = (0, 0, spare * block_size)
        for row, chunk in zip(inputs, chunks, strict=False):
            blocks, position = chunk.blocks(block_size), chunk.start
            slot = blocks[position // block_size] * block_size + position % block_size
            row[:BLOCKS] = (chunk.sequence.tokens[position], position, slot)
            row[BLOCKS:] = blocks[0]
            row[BLOCKS : BLOCKS + len(blocks)] = blocks
        return inputs

    def _inputs_of(self, shape: StepShape) -> Tensor:
        columns = BLOCKS + shape.blocks
        return self._inputs[: shape.rows * columns].view(shape.rows, columns)

    def _forward(self, shape: StepShape) -> None:
        inputs = self._inputs_of(shape)
        tokens, positions, slots = (inputs[:, column].contiguous() for column in (TOKEN, POSITION, SLOT))
        attention = self._attention(self._cache, slots, inputs[:, BLOCKS:].contiguous(), positions + 1)
        logits = self._model(tokens, positions, attention, head=self._head)
        if self._logits is None:
            rows = padded_rows(self._max_num_seqs)
            self._logits = torch.empty(rows, logits.shape[1], dtype=logits.dtype, device=logits.device)
        self._logits[: shape.rows].copy_(logits)

    def _turn_off(self, error: RuntimeError) -> None:
        self.why_off = str(error).partition("\n")[0]
        self._places.clear()
        self._recordings = {}
        print(
            f"decode steps run without CUDA graphs, kernel by kernel, as one could not be captured: {self.why_off}",
            file=sys.stderr,
        )
