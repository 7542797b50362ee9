"""Indices that come several times."""

import torch

from ductile.kernels.select import select


def test_gradients_of_an_index_are_added_up_in_fp32() -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    picked = select(x, 1, torch.tensor([2, 0] + [2] * 8))
    assert picked.shape == (2, 10)
    grad = torch.full((2, 10), 1 / 256, dtype=torch.bfloat16)
    grad[:, 0] = 1.0
    picked.backward(grad)
    assert x.grad is not None
    assert x.grad.tolist() == [[1 / 256, 0.0, 1 + 8 / 256]] * 2  # bf16 would have stayed at 1
