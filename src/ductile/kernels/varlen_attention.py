"""Packed attention on a GPU: one call of torch's variable-length flash kernel a layer, for all documents and branches.

Stems and branches lie one after the other, each a sequence of queries, just as the kernel takes them and gives its
output. A branch sees the stem's keys before its own, so keys and values are gathered: one `index_select` each for all
trees, none where no document branches. The kernel's causal mask ends at the last key: the last query of a sequence sees
all of its keys, the one before it all but the last. That is what a branch behind its stem needs.

Its backward pass adds up a query's gradient from several thread blocks, in no fixed order; the stem's keys get theirs
from every branch, in fp32 and in no fixed order either. `torch.use_deterministic_algorithms(True)` fixes both orders.

T tokens, N sequences, R rows of gathered keys, H query heads, K key/value heads, D head size.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ductile.kernels.select import select
from ductile.kernels.trees import Tree

HEAD_SIZES = range(8, 257, 8)
"""Head sizes that the kernel takes."""
DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)
"""Compute capability of the oldest devices that the kernel runs on."""
PAGE_TOKENS = 256
"""Tokens in the blocks of a cache that the kernel reads in place, or a divisor of them."""


def why_not(dtype: torch.dtype, head_size: int, capability: tuple[int, int] | None) -> str:
    """What keeps the kernel from such heads on such a device; "" if nothing does.

    `capability` is that of an NVIDIA device, None of any other one.
    """
    if capability is None:
        return "the kernel is for NVIDIA devices"
    if capability < CAPABILITY:
        return f"the kernel needs compute capability {_dotted(CAPABILITY)}, and this device has {_dotted(capability)}"
    if dtype not in DTYPES:
        return f"the kernel computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if head_size not in HEAD_SIZES:
        return f"the kernel takes heads of a multiple of 8 up to {HEAD_SIZES[-1]}, and these have {head_size}"
    return ""


def why_not_paged(dtype: torch.dtype, head_size: int, capability: tuple[int, int] | None, block_size: int) -> str:
    """What keeps the kernel from reading keys and values of such heads where a cache has them, in blocks of so many
    tokens; "" if nothing does."""
    if reason := why_not(dtype, head_size, capability):
        return reason
    if block_size % PAGE_TOKENS:
        return f"the kernel reads blocks of {PAGE_TOKENS} tokens, or a multiple, and these have {block_size}"
    if not torch_has_pages():
        return f"the kernel of torch {torch.__version__} reads no blocks; that of torch 2.12 and later does"
    return ""


def capability_of(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
"""Causal attention of N sequences, aligned to their last keys: query [T, H, D], key and value [R, K, D], offsets of
queries and of keys [N + 1] int32, most queries and most keys of a sequence -> [T, H, D]."""


@cache
def torch_kernel() -> Kernel:
    """torch's kernel, with the arguments that this version of torch has."""
    from torch.nn.attention.varlen import varlen_attn  # the import registers operators: only where it is used

    kernel: Any = partial(varlen_attn, **_options(inspect.signature(varlen_attn).parameters))
    return kernel


@cache
def torch_has_pages() -> bool:
    """Return whether this version of torch gives its kernel a table of blocks."""
    from torch.nn.attention.varlen import varlen_attn

    return {"block_table", "seqused_k", "num_splits"} <= inspect.signature(varlen_attn).parameters.keys()


def paged_decode(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor) -> Tensor:
    """Attention of one token of each of N sequences to the first `lengths` [N] int32 tokens of the blocks that are its
    own: q [N, H, D], keys and values [all blocks, block size, K, D], `blocks` [N, W] int32 -> [N, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    most_keys = blocks.shape[1] * keys.shape[1]
    offsets = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    attend: Any = varlen_attn
    # Keys in one piece: torch 2.13 does not put pieces together where they belong (pytorch/pytorch#194167). With one
    # query a sequence nothing is causal.
    return attend(
        q,
        keys,
        values,
        offsets,
        offsets * most_keys,
        1,
        most_keys,
        enable_gqa=True,
        seqused_k=lengths,
        block_table=blocks,
        num_splits=1,
    )


def _options(parameters: Collection[str]) -> dict[str, Any]:
    """torch 2.11 takes fewer key heads than query heads without being told; later versions want to be told."""
    causal = {"window_size": (-1, 0)}
    return causal | {"enable_gqa": True} if "enable_gqa" in parameters else causal


@dataclass(frozen=True, slots=True)
class Sequences:
    """Offsets at which the kernel finds the queries and keys of each of N sequences. None of them is empty."""

    query_offsets: np.ndarray
    """[N + 1] int32: where the queries of each sequence begin and those of the last end, in the T tokens."""
    key_offsets: np.ndarray
    """[N + 1] int32: where the keys of each sequence begin and those of the last end, in the R gathered rows."""
    key_rows: np.ndarray | None
    """[R] int64: the tokens whose keys are gathered. None where these are all tokens in their order."""

    @property
    def most_queries(self) -> int:
        return int(np.diff(self.query_offsets).max())

    @property
    def most_keys(self) -> int:
        return int(np.diff(self.key_offsets).max())


def sequences(trees: "Sequence[Tree]") -> Sequences:
    """The sequences of `trees`, which follow each other from row 0 on, and of which there is at least one.

    stem of 2, branches of 1 and 2       tokens a b | c | d e
    query_offsets 0 2 3 5                           a b | c | d e
    key_offsets   0 2 5 9                           a b | a b c | a b d e
    """
    query_ends = [0]
    keys: list[np.ndarray] = []
    for tree in trees:
        stem = np.arange(tree.start, tree.stem)
        if len(stem):
            query_ends.append(tree.stem)
            keys.append(stem)
        for start, end in tree.branches:
            if end > start:
                query_ends.append(end)
                keys.append(np.concatenate((stem, np.arange(start, end))))
    key_ends = np.cumsum([0, *map(len, keys)])
    gathered = key_ends[-1] > query_ends[-1]
    return Sequences(
        np.array(query_ends, dtype=np.int32),
        key_ends.astype(np.int32),
        np.concatenate(keys).astype(np.int64) if gathered else None,
    )


class VarlenAttention:
    """Attention of one packed batch. What says where its sequences lie goes to the device once, for all layers."""

    def __init__(self, trees: "Sequence[Tree]", device: torch.device, kernel: Kernel | None = None) -> None:
        lies = sequences(trees)
        # Two tensors, also where they are equal: for one and the same, torch 2.15 takes cuDNN's kernel instead, and
        # nothing says that this one takes queries and keys which are cut out of wider rows, as they are here.
        self._query_offsets, self._key_offsets = (
            torch.from_numpy(offsets).to(device) for offsets in (lies.query_offsets, lies.key_offsets)
        )
        self._key_rows = None if lies.key_rows is None else torch.from_numpy(lies.key_rows).to(device)
        self._most = lies.most_queries, lies.most_keys
        self._kernel = kernel or torch_kernel()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
        if self._key_rows is not None:
            k, v = (select(x, 0, self._key_rows) for x in (k, v))
        return self._kernel(q, k, v, self._query_offsets, self._key_offsets, *self._most)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
