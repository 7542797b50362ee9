"""The loss that parity is shown with: it notes what it was given, by token, on every slot that computes it.

A token is known by the log-prob at which it was sampled; `tests.trainer.naive.make_samples` draws one for each.
"""

from dataclasses import replace
from typing import NamedTuple

from ductile.config.schema.trainer import GRPOLoss
from ductile.trainer.loss import LossInputs, LossOutputs, ppo_clip

LOSS = GRPOLoss(kl_coef=0.01, clip_high=0.3)
ENTROPY_COEF = 0.01

Token = float
"""Log-prob at which the token was sampled, in fp32: no two tokens have the same one."""


class Recorded(NamedTuple):
    logprob: float
    entropy: float


_recorded: list[tuple[Token, Recorded]] = []


def recording_loss(inputs: LossInputs) -> LossOutputs:
    """GRPO's loss with a bonus for entropy, so that every gradient that a head can have is asked for."""
    tokens, logprobs, entropies = (
        tensor.detach().tolist() for tensor in (inputs.rollout_logprobs, inputs.logprobs, inputs.entropies)
    )
    made_up = 0.0  # the one token of a rank that has none
    for token, *what in zip(tokens, logprobs, entropies, strict=True):
        if token != made_up:
            _recorded.append((token, Recorded(*what)))
    outputs = ppo_clip(inputs, LOSS)
    return replace(outputs, loss=outputs.loss - ENTROPY_COEF * inputs.entropies)


def take_recorded() -> list[tuple[Token, Recorded]]:
    """All tokens of this process since they were last taken, in the order in which the loss saw them."""
    taken = list(_recorded)
    _recorded.clear()
    return taken
