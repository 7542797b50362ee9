"""A trainer's state on disk: `ductile.trainer.state` without the gradient. Save after an optimizer step.

How it gets there and back is `ductile.parallel.state`.
"""

from pathlib import Path

import torch

from ductile.parallel import state
from ductile.trainer.state import named_state
from ductile.trainer.trainer import Trainer


def save_state(trainer: Trainer, path: str | Path) -> None:
    """Write the directory `path`; collective. Any number of ranks can load it. Not atomic, but synced to disk."""
    counts = {"step": torch.tensor(trainer.step), "num_updates": torch.tensor(trainer.num_updates)}
    state.save(named_state(trainer) | counts, path, trainer.context)


def load_state(trainer: Trainer, path: str | Path) -> None:
    """Overwrite the trainer's state and drop its gradient; collective.

    Raises StateError when `path` does not have a whole state of this model and optimizer.
    """
    counts = {"step": torch.tensor(0), "num_updates": torch.tensor(0)}
    state.load(named_state(trainer) | counts, path, trainer.context)
    trainer.go_on_at(int(counts["step"]), int(counts["num_updates"]))
