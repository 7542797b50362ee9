"""The whole state's fingerprint is the same in every layout, and nothing can change or move without it."""

from itertools import permutations
from math import prod

import numpy as np
import pytest
import torch

from ductile.fabric import fingerprint as module
from ductile.fabric.digest import ROW_BYTES, fingerprint_of_bytes
from ductile.fabric.fingerprint import MODULUS
from ductile.fabric.memory import Memory
from tests.core.transfer.twin import Recipe
from tests.fabric.cases import PAIRS, dense, experts, mixed
from tests.fabric.states import state
from tests.fabric.whole import fingerprint, name_factor


def whole(recipe: Recipe, changed: int | None = None) -> int:
    """Of all slots. The lowest bit of the element with the number `changed` is flipped wherever it is held."""
    layout, numbers = recipe.layout(), recipe.buffers()
    total = 0
    for slot in layout.slots:
        buffers = state(layout, slot, numbers)
        for name, buffer in buffers.items():
            buffer.view(torch.uint8).view(-1, buffer.element_size())[
                torch.from_numpy(numbers[slot][name] == changed), 0
            ] ^= 1
        total += fingerprint(Memory(layout, slot, buffers))
    return total % MODULUS


@pytest.mark.parametrize("name", PAIRS)
def test_it_is_the_same_before_and_after(name: str) -> None:
    source, target = PAIRS[name]
    assert whole(source) == whole(target)


def test_it_follows_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ITEMS", 7)  # so that every way of cutting a box is taken
    recipe = mixed(range(1))
    layout = recipe.layout()
    buffers = state(layout, 0, recipe.buffers())
    total = 0
    for tensor in layout:
        raw = buffers[tensor.name].view(torch.uint8).numpy()
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}[tensor.item_bytes]
        shape = (*tensor.shape, 2) if tensor.item_bytes == 8 else tensor.shape
        for index, bits in np.ndenumerate(raw.view(kind).reshape(shape)):
            weight = 1
            for level, at in enumerate(reversed(index), 1):
                weight = weight * dumb_weight(level, at)
            value = (int(bits) & 0xFFFF) + (int(bits) >> 16) * 0xD1B54A32D192ED03
            total += value * weight * name_factor(tensor.name)
    assert fingerprint(Memory(layout, 0, buffers)) == total % MODULUS


def dumb_weight(level: int, index: int) -> int:
    value = (index + (level << 40)) * 0x9E3779B97F4A7C15 % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return (value ^ (value >> 31)) | 1


@pytest.mark.parametrize("recipe", [dense(range(3), dp_shard=3), mixed(range(2), tp=2), experts(range(2), ep=2)])
def test_any_changed_element_shows(recipe: Recipe) -> None:
    found = {whole(recipe, tensor.first + index) for tensor in recipe.tensors for index in (0, prod(tensor.shape) - 1)}
    ends = sum(1 if prod(tensor.shape) == 1 else 2 for tensor in recipe.tensors)
    assert len(found | {whole(recipe)}) == ends + 1


def test_padding_does_not_matter() -> None:
    recipe = dense(range(2), tp=2)
    layout, numbers = recipe.layout(), recipe.buffers()
    buffers = state(layout, 1, numbers)
    true = fingerprint(Memory(layout, 1, buffers))
    for name, values in numbers[1].items():
        buffers[name][torch.from_numpy(values == -1)] = 123.0
    assert fingerprint(Memory(layout, 1, buffers)) == true


def rows(*order: int) -> int:
    recipe = dense(range(1))
    layout = recipe.layout()
    buffers = state(layout, 0, recipe.buffers())
    table = buffers["a embedding"].view(-1, 12)
    table[:4] = table[list(order)]
    return fingerprint(Memory(layout, 0, buffers))


def test_swapped_and_repeated_rows_show() -> None:
    assert len({rows(0, 1, 2, 3), rows(1, 0, 2, 3), rows(0, 1, 3, 2), rows(0, 0, 2, 3), rows(1, 1, 2, 3)}) == 5


def test_tensors_in_each_others_places_show() -> None:
    recipe = dense(range(1))
    layout = recipe.layout()
    buffers = state(layout, 0, recipe.buffers())
    swapped = buffers | {"a embedding": buffers["g head"], "g head": buffers["a embedding"]}
    assert fingerprint(Memory(layout, 0, buffers)) != fingerprint(Memory(layout, 0, swapped))


def test_signs_of_two_numbers_show() -> None:
    # The two changes are the highest bits: as 2^31 and 2^63 little of them or nothing would be left modulo 2^52.
    for name in ("b master", "c moment"):
        recipe = mixed(range(1))
        layout = recipe.layout()
        buffers = state(layout, 0, recipe.buffers())
        true = fingerprint(Memory(layout, 0, buffers))
        buffers[name].view(torch.int64 if name == "c moment" else torch.int32)[:2] ^= (
            torch.iinfo(torch.int64).min if name == "c moment" else torch.iinfo(torch.int32).min
        )
        assert fingerprint(Memory(layout, 0, buffers)) != true


@pytest.mark.parametrize(("shape", "start"), [((5, 7), (3, 9)), ((4, 3, 5), (1, 2, 3)), ((300, 70), (9, 0))])
def test_it_does_not_matter_how_a_box_lies(shape: tuple[int, ...], start: tuple[int, ...]) -> None:
    box = torch.arange(prod(shape), dtype=torch.int16).view(shape) * 7
    for order in permutations(range(len(shape))):
        laid = box.permute(order).contiguous().permute([order.index(dim) for dim in range(len(shape))])
        assert (module.weighted_sum(laid, start) - module.plain_weighted_sum(box, start)) % MODULUS == 0


def test_weights_of_a_long_dim_are_the_same_and_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's block has room for one: what were kept of each length would fill its memory."""
    box = torch.arange(5 * module.KEPT_ITEMS, dtype=torch.int64).to(torch.uint8)
    true = module.plain_weighted_sum(box, (3,)) % MODULUS
    kept = module._kept.cache_info()
    monkeypatch.setattr(module, "BLOCK_ITEMS", box.numel())
    for length in range(box.numel() - 70, box.numel()):
        module.plain_weighted_sum(box[:length], (3,))
    assert module.plain_weighted_sum(box, (3,)) % MODULUS == true
    assert module._kept.cache_info() == kept, "none was asked for"


@pytest.mark.parametrize("num_bytes", [0, 1, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 3 * ROW_BYTES + 77])
def test_no_byte_of_a_segment_changes_or_moves_without_its_fingerprint(num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    true = fingerprint_of_bytes(data)
    assert len(true) == 16
    found = {true}
    changed = {0, num_bytes // 2, max(0, num_bytes - 1), min(ROW_BYTES, max(0, num_bytes - 1))} if num_bytes else set()
    for at in changed:
        other = data.clone()
        other[at] ^= 1
        found.add(fingerprint_of_bytes(other))
    if num_bytes > 2 * ROW_BYTES:
        found.add(fingerprint_of_bytes(data.roll(ROW_BYTES)))
        found.add(fingerprint_of_bytes(data.roll(1)))
    assert len(found) == 1 + len(changed) + 2 * (num_bytes > 2 * ROW_BYTES)
