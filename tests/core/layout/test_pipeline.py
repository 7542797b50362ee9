import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.geometry.parallel_layout import ONE_SLOT, ParallelLayout
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape, num_to_run, runs_of_layers


@pytest.mark.parametrize(
    ("pp", "stages", "expected"),
    [
        (2, (), [(0, 1, 2), (3, 4)]),
        (2, (0, 1, 1, 1, 1), [(0,), (1, 2, 3, 4)]),
        (2, (0, 1, 1, 0, 1), [(0,), (1, 2), (3,), (4,)]),
        (5, (), [(0,), (1,), (2,), (3,), (4,)]),
    ],
)
def test_layers_of_each_run(pp: int, stages: tuple[int, ...], expected: list[tuple[int, ...]]) -> None:
    layout = ParallelLayout.of(range(pp), stages, pp=pp)
    assert [tuple(layers) for layers in runs_of_layers(layout, 5)] == expected


@pytest.mark.parametrize(
    ("pp", "stages", "num_layers"),
    [
        (2, (0, 1, 1, 0), 4),  # the last layer, and with it the head, would be where the first one is
        (2, (1, 0), 2),
        (3, (0, 2, 1), 3),
        (2, (0, 1, 0), 3),
        (3, (), 2),
    ],
)
def test_stages_that_no_schedule_takes(pp: int, stages: tuple[int, ...], num_layers: int) -> None:
    layout = ParallelLayout.of(range(pp), stages, pp=pp)
    with pytest.raises(ValueError, match=rf"runs of layers on stages 0 to {pp - 1} in turns"):
        runs_of_layers(layout, num_layers)


@pytest.mark.parametrize(
    ("number", "pp", "runs_of_slot", "schedule", "expected"),
    [
        (1, 4, 1, "1f1b", 1),
        (9, 4, 1, "1f1b", 9),
        (9, 4, 1, "interleaved", 9),  # which is 1F1B with one run a slot
        (3, 4, 2, "1f1b", 3),
        (5, 4, 2, "1f1b", 5),
        (7, 4, 2, "1f1b", 7),
        (9, 4, 2, "1f1b", 10),
        (10, 4, 2, "interleaved", 10),
        (11, 4, 2, "1f1b", 12),
        (13, 4, 2, "1f1b", 15),
        (5, 2, 1, "zero_bubble", 6),
    ],
)
def test_schedules_with_rounds_are_filled_up(number, pp, runs_of_slot, schedule, expected):
    assert num_to_run(number, pp, runs_of_slot, schedule) == expected


@pytest.mark.parametrize(
    ("layout", "expected", "bubble"),
    [
        (ONE_SLOT, 1, 0.0),
        (ParallelLayout.of(range(6), tp=2), 1, 0.0),
        (ParallelLayout.of(range(4), pp=2), 8, 1 / 9),
        (ParallelLayout.of(range(4), (0, 1, 0, 1), pp=2), 4, 1 / 9),
        (ParallelLayout.of(range(8), pp=8), 32, 7 / 39),
        (ParallelLayout.of(range(2), (0, 1) * 8, pp=2), 2, 1 / 17),
    ],
)
def test_a_full_message_fills_the_pipeline(layout: ParallelLayout, expected: int, bubble: float) -> None:
    pipeline = PipelineShape.of(layout)
    assert pipeline.full_message == expected
    assert pipeline.bubble(expected) == pytest.approx(bubble)
    assert pipeline.stretch(expected) == 1


def test_a_message_of_one_micro_batch_keeps_one_stage_at_work() -> None:
    pipeline = PipelineShape(4)
    assert pipeline.bubble(1) == pytest.approx(3 / 4)
    assert pipeline.stretch(1) == pytest.approx(4 * 16 / 19), "the time of one micro-batch, against a full message's"


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 300))
def test_messages_are_alike_and_about_full(pp: int, runs_of_slot: int, number: int) -> None:
    pipeline = PipelineShape(pp, runs_of_slot)
    sizes = pipeline.messages(number)
    assert sum(sizes) == number
    if pp == 1:
        assert sizes == (1,) * number
    elif number:
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= 1.5 * pipeline.full_message
        assert len(sizes) == 1 or min(sizes) >= 0.75 * pipeline.full_message - 1
