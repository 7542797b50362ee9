"""Weights that lie column by column, which a CPU multiplies a few tokens with faster.

A product of as many tokens as a decode step has takes less time than with rows of outputs, as checkpoints and trainers
have them: the library reads the weight as it is instead of laying it out anew. With hundreds of tokens that is a small
part of the work, and the time is the same.
"""

from torch import nn


def lay_by_columns(model: nn.Module) -> None:
    """Have the model's linear layers keep their weights so. Names, shapes and values stay."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()
