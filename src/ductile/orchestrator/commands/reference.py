"""The reference model of a KL term: the weights that a run started from, and no others when it goes on."""

import os
from hashlib import blake2b
from pathlib import Path

from ductile.orchestrator.ending.progress import CheckpointError, Progress

NUM_PIECES, PIECE_BYTES = 64, 4096
"""Pieces that are read of each file, and their size: training moves every tensor, so a part of the bytes tells one
state from another."""


def fingerprint(folder: Path) -> str:
    """Fingerprint of the weights in a model folder. Raises OSError."""
    digest = blake2b(digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size} ".encode())
            for piece in range(NUM_PIECES):
                file.seek(max(0, size - PIECE_BYTES) * piece // (NUM_PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def pinned(progress: Progress, folder: Path, checkpoint: Path) -> str:
    """The fingerprint of the reference in `folder`. checkpoint: where `progress` comes from.

    Raises CheckpointError when the run that goes on has compared with another one so far, OSError when there is none.
    """
    found = fingerprint(folder)
    if progress.reference not in ("", found):
        raise CheckpointError(
            f"{folder} has other weights than those that {checkpoint} was trained with as the KL term's reference. "
            "Give the model that the run started from as model.name"
        )
    return found
