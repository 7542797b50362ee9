"""GRPO's loss, which also writes down how far the generators' log-probs are from the trainer's."""

from functools import partial
from pathlib import Path

from ductile.config.schema.trainer import GRPOLoss
from ductile.trainer.loss import LossInputs, LossOutputs, ppo_clip

_grpo = partial(ppo_clip, config=GRPOLoss(type="grpo"))


def compared(inputs: LossInputs, file: str) -> LossOutputs:
    """Return GRPO's loss. Adds a line with the number of tokens, and the largest difference of one of them."""
    differences = (inputs.logprobs - inputs.rollout_logprobs).detach().abs()
    if differences.numel() and inputs.rollout_logprobs.any():  # else they are made up, where a rank has none
        with Path(file).open("a") as stream:
            stream.write(f"{differences.numel()} {float(differences.max())}\n")
    return _grpo(inputs)
