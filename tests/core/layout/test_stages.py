"""Which stage has which layers: evenly, by how long stages take, in one run a slot or several."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.pipeline_schedule import runs_of_layers
from ductile.core.layout.geometry.stages import balanced_stages, contiguous_stages, head_layers
from ductile.core.layout.model.spec import ModelSpec

BODY = ModelSpec("llama", 10, 64, 256, num_layers=8, num_heads=4, num_kv_heads=4, head_dim=16)
"""A model whose output embeddings are worth next to nothing."""
HEAD = replace(BODY, vocab_size=3072)
"""A model whose output embeddings are worth three layers."""


def longest(layers: list[int], head: float) -> float:
    return max(*layers[:-1], layers[-1] + head)


def test_equal_stages_are_those_of_a_model_without_a_head_to_speak_of() -> None:
    assert contiguous_stages(5, 2) == (0, 0, 0, 1, 1)
    for pp in (1, 2, 4, 8):
        assert balanced_stages(BODY, pp) == contiguous_stages(8, pp)


def test_the_last_stage_has_fewer_layers_the_more_its_head_is_worth() -> None:
    assert head_layers(HEAD) == 3.0
    assert balanced_stages(HEAD, 2) == (0, 0, 0, 0, 0, 1, 1, 1)
    assert balanced_stages(HEAD, 4) == (0, 0, 0, 1, 1, 2, 2, 3)


def test_interleaved_stages_take_turns() -> None:
    assert balanced_stages(BODY, 2, 2) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert balanced_stages(HEAD, 2, 2) == (0, 0, 0, 1, 1, 0, 0, 1)
    with pytest.raises(ValueError, match="8 layers do not fill 10 stages"):
        balanced_stages(BODY, 5, 2)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 2), st.integers(1, 12000))
def test_no_other_cut_takes_less_time(num_layers: int, pp: int, vpp: int, vocab: int) -> None:
    """Against all cuts of so many layers."""
    num_runs = pp * vpp
    if num_runs > num_layers:
        return
    spec = replace(BODY, num_layers=num_layers, vocab_size=vocab)
    stages = balanced_stages(spec, pp, vpp)
    assert len(stages) == num_layers
    if pp > 1:
        layers = [len(run) for run in runs_of_layers(ParallelLayout.of(range(pp), stages, pp=pp), num_layers)]
        assert len(layers) == num_runs
        cuts = (cut for cut in product(range(1, num_layers + 1), repeat=num_runs) if sum(cut) == num_layers)
        head = head_layers(spec)
        assert longest(layers, head) == min(longest(list(cut), head) for cut in cuts)
