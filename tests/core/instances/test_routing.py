from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.instances.instances import InstanceId
from ductile.core.instances.routing import GeneratorLoad, Route, Suspicion, predicted_tokens, route


def test_the_fewest_remaining_tokens_wins_not_the_fewest_sequences():
    chosen = route("g", [GeneratorLoad("1", 900), GeneratorLoad("2", 100)], 64, 16)
    assert chosen.instance == "2"
    assert chosen.reason == "2 has the fewest tokens left: 100"


def test_siblings_go_where_their_prompt_is_cached():
    chosen = route("g", [GeneratorLoad("1", 0), GeneratorLoad("2", 200, frozenset({"g"}))], 64, 16)
    assert chosen.instance == "2"
    assert "cached" in chosen.reason


def test_a_cached_prompt_is_not_worth_any_imbalance():
    assert route("g", [GeneratorLoad("1", 0), GeneratorLoad("2", 300, frozenset({"g"}))], 64, 16).instance == "1"


@pytest.mark.parametrize(
    ("prompt_tokens", "block_tokens", "instance"),
    [(16, 16, "2"), (15, 16, "1"), (15, 8, "2"), (63, 64, "1"), (64, 64, "2"), (1, 1, "2"), (500, 0, "1")],
)
def test_siblings_share_whole_blocks_of_a_cache_that_shares(prompt_tokens, block_tokens, instance):
    loads = [GeneratorLoad("1", 0), GeneratorLoad("2", 64, frozenset({"g"}))]
    assert route("g", loads, prompt_tokens, block_tokens).instance == instance


def test_a_request_without_a_group_has_no_siblings():
    assert route("", [GeneratorLoad("1", 10, frozenset({""})), GeneratorLoad("2", 0)], 64, 16).instance == "2"


def test_no_generator_is_an_error():
    with pytest.raises(ValueError, match="no generator"):
        route("g", [], 64, 16)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.integers(1, 300))
def test_routing_one_by_one_keeps_generators_within_one_sequence_of_each_other(start, length):
    """The dumb twin: whatever the loads were, they meet, and then differ by at most one sequence."""
    loads = dict(enumerate(start))
    for _ in range(200):
        before = [GeneratorLoad(name, tokens) for name, tokens in loads.items()]
        loads[route("", before, 64, 16).instance] += length
    untouched = [tokens for slot, tokens in loads.items() if tokens == start[slot]]
    touched = [tokens for slot, tokens in loads.items() if tokens != start[slot]]
    assert max(touched) - min(touched) <= length
    assert all(tokens >= max(touched) - length for tokens in untouched)


def test_predicted_tokens():
    assert predicted_tokens(128, 0, None) == 128
    assert predicted_tokens(128, 0, 40.0) == 40
    assert predicted_tokens(128, 30, 40.0) == 10
    assert predicted_tokens(128, 100, 40.0) == 14
    assert predicted_tokens(16, 0, 40.0) == 16
    assert predicted_tokens(16, 20, 40.0) == 0


def test_a_suspect_gets_only_what_no_other_can_take() -> None:
    idle = GeneratorLoad(InstanceId("a"), 0, frozenset({"g"}), suspicion=Suspicion("it missed a probe"))
    busy = GeneratorLoad(InstanceId("b"), 1000)
    chosen = route("g", [idle, busy], 64, 16)
    assert chosen == Route(InstanceId("b"), "b has the fewest tokens left: 1000; a is suspect: it missed a probe")
    assert route("g", [idle, replace(busy, suspicion=Suspicion("it is late"))], 64, 16).instance == "a"


def test_one_on_trial_gets_one_sequence_at_a_time_whatever_the_others_have() -> None:
    silent = GeneratorLoad(InstanceId("a"), 0, suspicion=Suspicion("it missed a probe"))
    tried = GeneratorLoad(InstanceId("b"), 0, suspicion=Suspicion("HTTP 500", on_trial=True))
    well = GeneratorLoad(InstanceId("c"), 0, frozenset({"g"}))
    chosen = route("g", [silent, tried, well], 64, 16)
    assert (chosen.instance, chosen.reason.partition(";")[0]) == ("b", "b is tried with one sequence")
    busy = replace(tried, remaining_tokens=900, num_sequences=1)
    assert route("g", [silent, busy, well], 64, 16).instance == "c"
    assert route("g", [silent, busy], 64, 16).instance == "b", "it answers, and the other one does not"
