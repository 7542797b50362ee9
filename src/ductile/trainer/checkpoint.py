"""A trainer's state on disk: `ductile.trainer.state` without the gradient. Save after an optimizer step.

How it gets there and back is `ductile.parallel.distributed_checkpoint`.
"""

from pathlib import Path

import torch
from torch import Tensor

from ductile.parallel import distributed_checkpoint as state
from ductile.parallel.distributed_checkpoint import HeldTensor
from ductile.parallel.parts import SlotParts
from ductile.trainer.state import named_state, parts_of
from ductile.trainer.trainer import Trainer


def save_state(trainer: Trainer, path: str | Path) -> None:
    """Write the directory `path`; collective. Any number of ranks can load it. Not atomic, but synced to disk."""
    counts = {"step": torch.tensor(trainer.step), "num_updates": torch.tensor(trainer.num_updates)}
    state.save(_held(trainer) | counts, path, trainer.context)


def load_state(trainer: Trainer, path: str | Path) -> None:
    """Overwrite the trainer's state and drop its gradient; collective.

    Raises StateError when `path` does not have a whole state of this model and optimizer.
    """
    counts = {"step": torch.tensor(0), "num_updates": torch.tensor(0)}
    state.load(_held(trainer) | counts, path, trainer.context)
    trainer.go_on_at(int(counts["step"]), int(counts["num_updates"]))


def _held(trainer: Trainer) -> dict[str, Tensor | HeldTensor]:
    """This slot's parts of parameters and moments, by the names of `ductile.trainer.state`, such as
    `exp_avg/layers.0.mlp.down_proj.weight`."""
    of_blocks = {
        f"{kept.name}/{parameter}"
        for parameter, described in trainer.optimizer_state.items()
        for kept in described
        if kept.layout == "blocks"
    }
    held: dict[str, Tensor | HeldTensor] = {}
    for name, local in parts_of(named_state(trainer)).items():
        parts = trainer.parts
        if name in of_blocks:
            parts = SlotParts.of_blocks(trainer.spec, trainer.context.layout, trainer.context.slot)
        held[name] = HeldTensor(local, parts, name.split("/", 1)[1])
    return held
