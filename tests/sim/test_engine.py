"""The engine jumps from event to event; its dumb twin decodes token by token."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.instances.instances import instance_on
from ductile.core.scheduling.costs.cost import DecodeSpeed
from ductile.records import GenerateRequest, Sampling
from ductile.sim.clock import now_s, run
from ductile.sim.simulated_engine import SimulatedEngine, SimulatedRequest
from tests.nightly import examples


def in_flight(name, num_tokens, prompt_tokens=10):
    completion = asyncio.get_running_loop().create_future()
    return SimulatedRequest(GenerateRequest(name, (1,), Sampling()), prompt_tokens, num_tokens, 0.0, completion)


def simulated(decode, max_num_seqs, arrivals):
    """Seconds at which each of `(at_s, tokens)` ends."""

    async def work():
        ends, all_done = {}, asyncio.Event()

        def on_done(instance, requests):
            ends.update({each.request.id: now_s() for each in requests})
            if len(ends) == len(arrivals):
                all_done.set()

        engine = SimulatedEngine(instance_on("generate", (0,)), decode, max_num_seqs, on_done)
        for number, (at_s, tokens) in enumerate(arrivals):
            await asyncio.sleep(at_s - now_s())
            engine.add(in_flight(str(number), tokens))
        await all_done.wait()
        return [ends[str(number)] for number in range(len(arrivals))]

    return run(work())


def token_by_token(decode, max_num_seqs, arrivals):
    """The twin: fixed steps of decoding, each with whoever runs at its start."""
    ends, waiting, running, t = {}, list(enumerate(arrivals)), {}, 0.0
    while len(ends) < len(arrivals):
        while waiting and len(running) < max_num_seqs and waiting[0][1][0] <= t + 1e-9:
            number, (_, tokens) = waiting.pop(0)
            running[number] = [tokens, 10.0]
        if not running:
            t = waiting[0][1][0]
            continue
        t += decode.seconds(len(running), sum(context for _, context in running.values()))
        for number, state in list(running.items()):
            state[0] -= 1
            state[1] += 1
            if state[0] <= 0:
                ends[number] = t
                del running[number]
    return [ends[number] for number in range(len(arrivals))]


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 12),
    max_num_seqs=st.integers(1, 6),
    per_context=st.sampled_from([0.0, 1e-4]),
)
def test_it_ends_where_decoding_token_by_token_ends(seed, count, max_num_seqs, per_context):
    draw = random.Random(seed)
    arrivals = [(0.0, draw.randint(1, 400)) for _ in range(count)]
    decode = DecodeSpeed(0.01, 0.003, per_context)
    ends = simulated(decode, max_num_seqs, arrivals)
    assert ends == pytest.approx(token_by_token(decode, max_num_seqs, arrivals), rel=0.02)


def test_who_is_taken_away_keeps_what_it_has_and_the_others_go_faster():
    async def work():
        done = []
        engine = SimulatedEngine(
            instance_on("generate", (0,)), DecodeSpeed(0.01, 0.01), 8, lambda instance, requests: done.extend(requests)
        )
        engine.add(in_flight("stays", 100))
        engine.add(in_flight("goes", 100))
        await asyncio.sleep(0.03 * 50)
        gone = engine.remove("goes")
        assert gone.generated == pytest.approx(50)
        await asyncio.sleep(0.02 * 50 + 1e-6)
        assert [each.request.id for each in done] == ["stays"]

    run(work())


def test_a_stall_stops_everybody_for_that_long():
    assert simulated(DecodeSpeed(0.01), 8, [(0.0, 100)])[0] == pytest.approx(1.0)

    async def work():
        done = asyncio.Event()
        engine = SimulatedEngine(
            instance_on("generate", (0,)), DecodeSpeed(0.01), 8, lambda instance, requests: done.set()
        )
        engine.add(in_flight("a", 100))
        await asyncio.sleep(0.5)
        engine.stall(2.0)
        await done.wait()
        return now_s()

    assert run(work()) == pytest.approx(3.0)
