"""The digest of a version: 52 bits that whoever has all of its tensors finds alike.

    sum over tensors    factor of the name * weighted sum over elements (`ductile.fabric.fingerprint`)

modulo 2^52, of the bits that are published, whatever the dtype in which the optimizer has them. A box adds what its
elements add to the whole tensor's, so it does not matter how tensors were cut, or who has which part. It guards
against accidents, not against an attacker who wants two versions to collide.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

from torch import Tensor

from ductile.fabric import boxes
from ductile.fabric.boxes import BoxCopy
from ductile.fabric.fingerprint import MODULUS, copy_and_sum, weighted_sum
from ductile.messages.updates import Digest, digest_text


def box_digest(name: str, box: Tensor, start: tuple[int, ...]) -> int:
    """Return the part of a box of the tensor `name` that begins at index `start`, 0 to 2^52 - 1."""
    return _name_factor(name) * weighted_sum(box if box.dim() else box[None], start or (0,)) % MODULUS


def copy_with_digest(name: str, target: Tensor, box: Tensor, start: tuple[int, ...], past_cache: bool = False) -> int:
    """Copy a box, and return the `box_digest` of what was written, in the target's dtype: in one pass, where both are
    of one dtype and on a CPU.

    past_cache: nobody reads the target soon."""
    if target.dtype != box.dtype:
        return box_digest(name, target.copy_(box), start)
    if not start:
        target, box, start = target[None], box[None], (0,)
    return _name_factor(name) * copy_and_sum(target, box, start, past_cache) % MODULUS


def copy_all_with_digest(names: Sequence[str], copies: list[BoxCopy], past_cache: bool = False) -> list[int | None]:
    """Do what `copy_with_digest` does for many boxes at once; what a box costs beside its bytes counts where there are
    thousands. None for a box that was not copied, as that cannot be done so.

    names: of the boxes' tensors."""
    summed = boxes.copy_and_sum(copies, past_cache)
    return [
        None if each is None else _name_factor(name) * each % MODULUS for name, each in zip(names, summed, strict=True)
    ]


def whole_digest(tensors: Iterable[tuple[str, Tensor]]) -> Digest:
    """Return the digest of a version from its whole tensors, by name."""
    return total(box_digest(name, tensor, (0,) * tensor.dim()) for name, tensor in tensors)


def total(parts: Iterable[int]) -> Digest:
    """Return the digest of boxes that have these parts."""
    return digest_text(sum(parts))


@lru_cache(maxsize=1 << 16)
def _name_factor(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1
