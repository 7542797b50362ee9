"""Buckets through stages: what overlaps, how much is under way, and what is left after an error."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.weights.pipeline import BucketPipeline, Stage

NAMES = ("fill", "transfer", "load")


def of_delays(delays: tuple[float, ...], num_slots: int) -> BucketPipeline[int]:
    stages = [Stage(name, lambda _item, _buffer, s=s: time.sleep(s)) for name, s in zip(NAMES, delays, strict=True)]
    return BucketPipeline(stages, num_slots)


@pytest.mark.parametrize("delays", [(0.02, 0.005, 0.005), (0.005, 0.02, 0.005), (0.005, 0.005, 0.02)])
def test_it_takes_as_long_as_its_slowest_stage(delays: tuple[float, ...]) -> None:
    """In what the trace says, so that a busy machine only stretches both: at most 15 % more, once in a few tries."""
    found: list[float] = []
    for _ in range(5):
        pipeline = of_delays(delays, num_slots=2)
        pipeline.run(range(20))
        times: dict[str, float] = defaultdict(float)
        for span in pipeline.trace:
            times[span.stage] += span.end - span.begin
        found.append((max(s.end for s in pipeline.trace) - min(s.begin for s in pipeline.trace)) / max(times.values()))
        if found[-1] <= 1.15:
            return
    pytest.fail(f"the pipeline takes {found} times its slowest stage")


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_order_and_number_of_buckets_under_way(num_items: int, num_slots: int, milliseconds: list[int]) -> None:
    begun: list[tuple[str, int]] = []
    used: set[int] = set()
    under_way, most = set[int](), 0

    def work(name: str, item: int, buffer: int) -> None:
        nonlocal most
        begun.append((name, item))
        used.add(buffer)
        if name == "fill":
            assert buffer not in under_way, "a buffer is filled while its bucket is under way"
            under_way.add(buffer)
            most = max(most, len(under_way))
        time.sleep(milliseconds[item % len(milliseconds)] / 4000)
        if name == "load":
            under_way.remove(buffer)

    def stage(name: str) -> Stage[int]:
        return Stage(name, lambda item, buffer: work(name, item, buffer))

    pipeline = BucketPipeline([stage(name) for name in NAMES], num_slots)
    pipeline.run(range(num_items))
    for name in NAMES:
        assert [item for each, item in begun if each == name] == list(range(num_items))
    assert most <= num_slots + 1
    assert used <= set(range(pipeline.num_buffers))
    assert not under_way


def test_with_one_slot_a_bucket_is_waited_for_when_the_next_one_has_been_sent() -> None:
    events: list[str] = []
    sent = [threading.Event() for _ in range(3)]

    def load(item: int, _buffer: int) -> None:
        if item < 2:
            assert sent[item + 1].wait(60)
        events.append(f"acknowledged {item}")

    def transfer(item: int, _buffer: int) -> None:
        events.append(f"sent {item}")
        sent[item].set()

    def fill(item: int, _buffer: int) -> None:
        events.append(f"filled {item}")

    BucketPipeline([Stage("fill", fill), Stage("transfer", transfer), Stage("load", load)], 1).run(range(3))
    assert events.index("sent 1") < events.index("acknowledged 0") < events.index("filled 2")


@pytest.mark.parametrize("stage", [*NAMES, "items"])
@pytest.mark.parametrize("at", [0, 3, 5])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_an_error_settles_what_was_begun_and_is_raised(stage: str, at: int, num_slots: int) -> None:
    sent, settled = list[int](), list[int]()

    def work(name: str, item: int) -> None:
        if name == "load":
            settled.append(item)
        if (name, item) == (stage, at):
            raise ValueError(f"{name} {item}")
        if name == "transfer":
            sent.append(item)
        time.sleep(0.001)

    def items() -> Iterator[int]:
        for item in range(6):
            if (stage, item) == ("items", at):
                raise ValueError(f"items {item}")
            yield item

    def made(name: str) -> Stage[int]:
        return Stage(name, lambda item, _buffer: work(name, item), finishes=name == "load")

    before = threading.active_count()
    with pytest.raises(ValueError, match=f"{stage} {at}"):
        BucketPipeline([made(name) for name in NAMES], num_slots).run(items())
    assert settled == sent, "what was sent has been waited for, in order, and nothing else"
    assert threading.active_count() == before


def test_the_trace_says_when_each_stage_had_a_bucket() -> None:
    pipeline = BucketPipeline([Stage(name, lambda _item, _buffer: None) for name in NAMES], 1)
    before = time.monotonic()
    pipeline.run(["a", "b"])
    after = time.monotonic()
    assert Counter(span.stage for span in pipeline.trace) == dict.fromkeys(NAMES, 2)
    for name in NAMES:
        first, second = (span for span in pipeline.trace if span.stage == name)
        assert before <= first.begin <= first.end <= second.begin <= second.end <= after


@pytest.mark.parametrize("num_items", [1, 6])
def test_who_waits_looks_and_may_end_the_wait(num_items: int) -> None:
    """For a buffer, and for the last bucket."""
    let_go, loaded = threading.Event(), list[int]()

    def load(item: int, _buffer: int) -> None:
        assert let_go.wait(60)
        loaded.append(item)

    def look() -> None:
        let_go.set()
        raise ValueError("it has been ended")

    stages = [Stage("fill", lambda _item, _buffer: None), Stage("load", load, finishes=True)]
    with pytest.raises(ValueError, match="it has been ended"):
        BucketPipeline(stages, 2, look).run(range(num_items))
    assert loaded == list(range(min(num_items, 3))), "what was begun has been waited for"
