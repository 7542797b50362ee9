import pytest

from ductile.core.layout.parallel_layout import ONE_SLOT, ParallelLayout
from ductile.core.layout.pipeline import micro_batches_of_message, num_to_run, runs_of_layers


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
        (5, 4, 1, "1f1b", 5),
        (3, 4, 2, "1f1b", 3),
        (5, 4, 2, "1f1b", 8),
        (8, 4, 2, "1f1b", 8),
        (5, 2, 1, "zero_bubble", 6),
    ],
)
def test_schedules_with_rounds_are_filled_up(number, pp, runs_of_slot, schedule, expected):
    assert num_to_run(number, pp, runs_of_slot, schedule) == expected


@pytest.mark.parametrize(
    ("layout", "expected", "why"),
    [
        (ONE_SLOT, 1, "a slot waits for no other stage"),
        (ParallelLayout.of(range(6), tp=2), 1, "a slot waits for no other stage"),
        (
            ParallelLayout.of(range(4), pp=2),
            8,
            "2 stages fill and empty for each message: with 8 micro-batches 11%",
        ),
        (ParallelLayout.of(range(4), (0, 1, 0, 1), pp=2), 4, "with 4 micro-batches 11%"),
        (ParallelLayout.of(range(8), pp=8), 32, "with 32 micro-batches 18%"),
        (ParallelLayout.of(range(2), (0, 1) * 8, pp=2), 2, "with 2 micro-batches 6%"),
    ],
)
def test_a_message_fills_the_pipeline(layout: ParallelLayout, expected: int, why: str) -> None:
    number, reason = micro_batches_of_message(layout)
    assert number == expected
    assert why in reason
