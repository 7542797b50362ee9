"""What a trainer's state consists of, under which names. How it gets to disk and back is `ductile.parallel.state`.

    model/<parameter>            the parameters that the optimizer updates
    <moment>/<parameter>         exp_avg, exp_avg_sq, momentum_buffer
    step                         optimizer steps; the learning rate follows from it
    num_updates                  those that were not skipped; Adam's bias correction follows from it

No random state is part of it: nothing here draws random numbers after the weights are made. Gradients are not either:
save after an optimizer step.
"""

from pathlib import Path

import torch
from torch import Tensor

from ductile.parallel import state
from ductile.trainer.optimizer import moments, set_num_steps
from ductile.trainer.trainer import Trainer


def save_state(trainer: Trainer, path: str | Path) -> None:
    """Write the directory `path`; collective. Any number of ranks can load it. Not atomic, but synced to disk."""
    counts = {"step": torch.tensor(trainer.step), "num_updates": torch.tensor(trainer.num_updates)}
    state.save(named_state(trainer) | counts, path, trainer.ranks)


def load_state(trainer: Trainer, path: str | Path) -> None:
    """Overwrite the trainer's state and drop its gradient; collective.

    Raises StateError when `path` does not have a whole state of this model and optimizer.
    """
    counts = {"step": torch.tensor(0), "num_updates": torch.tensor(0)}
    state.load(named_state(trainer) | counts, path, trainer.ranks)
    trainer.forget_gradient()
    trainer.step, trainer.num_updates = int(counts["step"]), int(counts["num_updates"])
    set_num_steps(trainer.optimizer, trainer.num_updates)


def named_state(trainer: Trainer) -> dict[str, Tensor]:
    """The trainer's own tensors, not copies. Loading writes into them."""
    named: dict[str, Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        named[f"model/{name}"] = parameter.detach()
        for moment, tensor in moments(trainer.optimizer, parameter):
            named[f"{moment}/{name}"] = tensor
    return named
