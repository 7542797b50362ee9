"""A 64-bit fingerprint of a whole state that does not depend on its layout: the same before and after any reshard.

    sum over tensors    name factor
      * weighted sum over elements (`ductile.fabric.fingerprint`)

Each slot adds up the elements that it is the first to hold; the sum over all slots, modulo 2^64, is the state's. So a
tensor in another's place shows too.
"""

from hashlib import blake2b
from zlib import crc32

from ductile.core.transfer.cells import atoms
from ductile.fabric.fingerprint import MODULUS, weighted_sum
from ductile.fabric.memory import Memory


def fingerprint(memory: Memory) -> int:
    """This slot's part. The parts of all slots, added modulo 2^64, are the fingerprint of the state."""
    total = 0
    for tensor in memory.layout:
        owned = atoms(tensor.holdings)
        for index, slots in enumerate(owned.slots):
            if slots[(crc32(tensor.name.encode()) + index) % len(slots)] == memory.slot:
                start, stop = tuple(owned.start[index].tolist()), tuple(owned.stop[index].tolist())
                total += name_factor(tensor.name) * weighted_sum(memory.box(tensor.name, (start, stop)), start)
    return total % MODULUS


def name_factor(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1
