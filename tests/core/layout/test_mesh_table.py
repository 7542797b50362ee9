"""A mesh on paper: the rows of few slots and of many, and that the shares are those of the layout."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules, layout_for
from ductile.core.layout.choice.mesh_table import EachBytes, mesh_table, numbering, slot_shares
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from tests.core.layout.test_planner import QWEN, TINY

EIGHT = """\
slot  pp  dp_shard  tp  layers                      of the state
   0   0         0   0  0-18, embeddings        19.1 %   1.7 GiB
   1   0         0   1  0-18, embeddings        19.1 %   1.7 GiB
   2   0         1   0  0-18, embeddings        19.1 %   1.7 GiB
   3   0         1   1  0-18, embeddings        19.1 %   1.7 GiB
   4   1         0   0  19-27, tied embeddings  12.5 %   1.1 GiB
   5   1         0   1  19-27, tied embeddings  12.5 %   1.1 GiB
   6   1         1   0  19-27, tied embeddings  12.5 %   1.1 GiB
   7   1         1   1  19-27, tied embeddings  12.5 %   1.1 GiB"""
THOUSAND = """\
slot = 256 pp + 128 dp_replicate + 8 dp_shard + tp
slots     layers                          of the state
0-255     0-8, embeddings       0.39 %   35.4 MiB each
256-511   9-17                 0.186 %   16.9 MiB each
512-767   18-26                0.186 %   16.9 MiB each
768-1023  27, tied embeddings  0.225 %   20.4 MiB each"""


def table(num_slots: int, asked: AskedLayout) -> str:
    return "\n".join(mesh_table(QWEN, layout_for(range(num_slots), LayoutRules(QWEN, asked)), EachBytes(16, 4)))


def test_few_slots_have_a_row_each_and_many_a_row_a_stage() -> None:
    assert table(1, AskedLayout()) == "slot 0 has all of the state: 8.9 GiB"
    assert table(8, AskedLayout(pp=2, tp=2)) == EIGHT
    assert table(1024, AskedLayout(pp=4, tp=8, dp_replicate=2)) == THOUSAND


def test_layers_are_those_of_all_runs_of_a_stage() -> None:
    layout = layout_for(range(4), LayoutRules(TINY, AskedLayout(pp=2, pp_schedule="interleaved")))
    assert [share.layers for share in slot_shares(TINY, layout).values()] == ["0-1,4, embeddings"] * 2 + [
        "2-3,5, head"
    ] * 2
    alone = layout_for((7,), LayoutRules(TINY))
    assert slot_shares(TINY, alone)[7].layers == "0-5, embeddings, head"


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (ParallelLayout.of(range(8), pp=2, tp=2), "slot = 4 pp + 2 dp_shard + tp"),
        (ParallelLayout.of(range(4, 8), tp=2), "slot = 4 + 2 dp_shard + tp"),
        (ParallelLayout.of((0, 1, 5, 4)), "rank = dp_shard, counted through slots 0-1,5,4"),
    ],
)
def test_a_formula_says_which_slot_is_where(layout: ParallelLayout, says: str) -> None:
    assert numbering(layout) == says


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_shares_are_those_of_the_layout(pp: int, dp: int, tp: int, copies: int, tied: bool) -> None:
    spec = replace(TINY, tie_embeddings=tied)
    layout = ParallelLayout.of(range(pp * dp * tp * copies), pp=pp, tp=tp, dp_replicate=copies)
    whole = model_layout(spec, layout, "float32")
    sizes = {slot: sum(size for _, size in whole.buffer_sizes(slot).values()) for slot in layout.slots}
    assert {slot: share.numbers for slot, share in slot_shares(spec, layout).items()} == sizes
