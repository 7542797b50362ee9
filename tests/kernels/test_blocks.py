"""Blocks are the tensors, cut at the same rows."""

import pytest
import torch

from ductile.kernels.blocks import BLOCK_BYTES, blocks


@pytest.mark.parametrize("num_rows", [0, 1, 7, 1000])
def test_blocks_put_together_are_the_tensors(num_rows: int) -> None:
    tensors = torch.randn(num_rows, 3, 400), torch.randn(num_rows, 1).bfloat16()
    in_blocks = list(blocks(*tensors))
    for tensor, parts in zip(tensors, zip(*in_blocks, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), tensor)
    assert all(part.numel() * part.element_size() <= BLOCK_BYTES for block in in_blocks for part in block)


def test_what_is_written_to_a_block_is_in_the_tensor() -> None:
    tensor = torch.zeros(300, 900)
    for (block,) in blocks(tensor):
        block += 1
    assert torch.equal(tensor, torch.ones(300, 900))


def test_a_row_wider_than_a_block_is_one() -> None:
    assert len(list(blocks(torch.zeros(3, BLOCK_BYTES)))) == 3
