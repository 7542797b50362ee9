"""What a generator says of its own speed."""

import pytest

from ductile.generator.engine.step_profiler import MOST_POINTS, StepLoad, StepProfiler
from tests.generator.conftest import Family, request


def decode(num_sequences: int, context_tokens: int = 0) -> StepLoad:
    return StepLoad(num_sequences, num_sequences, context_tokens, 0, num_sequences)


def test_steps_of_a_size_become_one_point_and_are_drained_once() -> None:
    profiler = StepProfiler()
    for load, seconds in ((decode(4, 40), 1.0), (decode(2, 30), 0.5), (decode(4, 60), 3.0)):
        profiler.record(load, seconds)
    assert profiler.drain() == (((2.0, 30.0, 0.5), (4.0, 50.0, 2.0)), (0, 0.0))
    assert profiler.drain() == ((), (0, 0.0))


def test_what_computes_prompts_is_counted_apart_and_what_copies_caches_nowhere() -> None:
    profiler = StepProfiler()
    profiler.record(StepLoad(3, 100, 500, 0), 1.5)
    profiler.record(StepLoad(1, 20, 20, 0), 0.5)
    profiler.record(StepLoad(3, 3, 500, 1, 3), 9.0)
    assert profiler.drain() == ((), (120, 2.0))


def test_a_prompt_among_decoding_sequences_costs_what_the_step_took_longer() -> None:
    profiler = StepProfiler()
    profiler.record(decode(60), 0.5)
    profiler.record(StepLoad(61, 90, 0, 0, 60), 0.75)
    assert profiler.drain()[1] == (30, 0.25)
    profiler.record(StepLoad(31, 60, 0, 0, 30), 0.75)
    assert profiler.drain()[1] == (30, 0.5), "half of them decode in half the time"
    profiler.record(StepLoad(61, 90, 0, 0, 60), 0.25)
    assert profiler.drain()[1] == (30, 0.0), "a hiccup of the step before is no speed"


def test_before_anything_only_decoded_a_prompt_costs_its_share_of_the_tokens() -> None:
    profiler = StepProfiler()
    profiler.record(StepLoad(4, 40, 0, 0, 3), 2.0)
    assert profiler.drain()[1] == (37, pytest.approx(1.85))


@pytest.mark.parametrize("num_sizes", [1, MOST_POINTS, MOST_POINTS + 1, 64])
def test_many_sizes_become_few_points_that_add_up(num_sizes: int) -> None:
    profiler = StepProfiler()
    for size in range(1, num_sizes + 1):
        profiler.record(decode(size, 10 * size), 1.0)
    decoded, _ = profiler.drain()
    assert len(decoded) == min(num_sizes, MOST_POINTS)
    assert list(decoded) == sorted(decoded)
    if num_sizes % len(decoded) == 0:  # as many sizes in each
        assert sum(point[0] for point in decoded) / len(decoded) == pytest.approx((num_sizes + 1) / 2)
    assert all(context == pytest.approx(10 * size) and seconds == 1.0 for size, context, seconds in decoded)


def test_the_engine_says_what_its_last_step_computed(qwen3: Family) -> None:
    engine = qwen3.engine(max_num_batched_tokens=16)
    engine.step()
    assert engine.last_step is None
    engine.add(request("a", "x" * 20, 3))
    loads: list[StepLoad | None] = []
    while engine.has_work():
        engine.step()
        loads.append(engine.last_step)
    assert loads == [StepLoad(1, 16, 16, 0), StepLoad(1, 4, 20, 0), decode(1, 21), decode(1, 22)]
