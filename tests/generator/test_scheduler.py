"""The scheduler alone: no model, a made-up token for each sequence that reaches its end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.generator.engine.kv_cache import BlockPool
from ductile.generator.engine.scheduler import Chunk, Scheduler
from ductile.generator.engine.sequence import Sequence
from ductile.records import GenerateRequest, Sampling
from tests.nightly import examples


def sequence(arrival: int, prompt: list[int], max_tokens: int, priority: int = 0) -> Sequence:
    asked = GenerateRequest(str(arrival), tuple(prompt), Sampling(max_tokens=max_tokens), priority=priority)
    return Sequence(asked, (-priority, arrival), 0, len(prompt) + max_tokens, ())


def step(scheduler: Scheduler) -> list[Chunk]:
    """Schedule, check the plan, and pretend that it ran."""
    before = {id(s): s.num_computed for s in scheduler.running}
    chunks = scheduler.schedule()
    assert sum(chunk.count for chunk in chunks) <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
    for chunk in chunks:
        assert chunk.count > 0
        assert chunk.sequence in scheduler.running
        assert chunk.start == before.get(id(chunk.sequence), chunk.start)
        assert chunk.end <= len(chunk.sequence.blocks) * scheduler.pool.block_size
    for chunk in chunks:
        if chunk.reaches_the_end:
            chunk.sequence.append(1, 0.0, 0)
            if len(chunk.sequence.tokens) >= chunk.sequence.max_len:
                scheduler.remove(chunk.sequence)
    return chunks


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@settings(max_examples=examples(200), deadline=None)
@given(
    requests=st.lists(st.tuples(PROMPTS, st.integers(1, 10), st.integers(0, 1)), min_size=1, max_size=8),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 10),
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(1, 20),
    share=st.booleans(),
    changes=st.sets(st.integers(0, 20)),
)
def test_every_sequence_ends_and_every_block_comes_back(
    requests: list[tuple[list[int], int, int]],
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    budget: int,
    share: bool,
    changes: set[int],
) -> None:
    smallest = max(-(-(len(prompt) + max_tokens) // block_size) for prompt, max_tokens, _ in requests)
    pool = BlockPool(smallest + spare_blocks, block_size)
    scheduler = Scheduler(pool, max_num_seqs, budget, share)
    sequences = [sequence(i, prompt, n, priority) for i, (prompt, n, priority) in enumerate(requests)]
    for one in sequences:
        scheduler.add(one)
    num_steps = 0
    while scheduler.running or scheduler.waiting:
        if num_steps in changes:
            scheduler.weights_changed(keep_cache=num_steps % 2 == 0)
        assert step(scheduler), "nothing was scheduled though something waits"
        num_steps += 1
        assert num_steps < 5_000
        holders = [block for one in scheduler.running for block in one.blocks]
        assert len(set(holders)) == pool.num_blocks - pool.num_free
        if not share:
            assert len(set(holders)) == len(holders)
    assert [len(one.tokens) for one in sequences] == [one.max_len for one in sequences]
    assert pool.num_free == pool.num_blocks


def test_decodes_go_before_prefills() -> None:
    scheduler = Scheduler(BlockPool(100, 4), max_num_seqs=4, max_num_batched_tokens=8)
    early = sequence(0, [5] * 3, 10)
    scheduler.add(early)
    step(scheduler)
    late = sequence(1, [6] * 20, 10)
    scheduler.add(late)
    plans = [[(chunk.sequence, chunk.start, chunk.count) for chunk in step(scheduler)] for _ in range(3)]
    assert plans == [
        [(early, 3, 1), (late, 0, 7)],
        [(early, 4, 1), (late, 7, 7)],
        [(early, 5, 1), (late, 14, 6)],
    ]


def test_the_last_in_order_gives_way_when_blocks_run_out() -> None:
    scheduler = Scheduler(BlockPool(4, 2), max_num_seqs=4, max_num_batched_tokens=16, share_prefixes=False)
    first, second = sequence(0, [1, 1, 1], 5), sequence(1, [2, 2, 2], 5)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    step(scheduler)  # both fill their second block
    assert [chunk.sequence for chunk in step(scheduler)] == [first]
    assert scheduler.waiting == [second]
    assert second.blocks == []
    assert list(second.tokens) == [2, 2, 2, 1, 1], "what it generated is kept"
    assert scheduler.num_preempted == 1
