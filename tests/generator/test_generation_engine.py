"""What every `GenerationEngine` does, on the tiny model: one suite for ductile's own and for those that come."""

from collections.abc import Callable

import pytest
import torch

from ductile.generator.engine.generation_engine import GenerationEngine, KVMigration
from ductile.generator.engine.limits import RequestRefused
from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model
from ductile.model.transformer import Transformer
from ductile.records import GenerateRequest, Generation
from tests.generator.conftest import Family, request
from tests.generator.tape import Tape

ENGINES: dict[str, Callable[[Family], GenerationEngine]] = {
    "ductile": lambda family: family.engine(),
    "ductile, by recorded steps": lambda family: family.engine(recorder=Tape()),
}
NUM_TOKENS = 12
PROMPTS = ("hello", "a", "what is 1 + 2?", "x" * 33)


@pytest.fixture(params=sorted(ENGINES))
def make(request: pytest.FixtureRequest, qwen3: Family) -> Callable[[], GenerationEngine]:
    return lambda: ENGINES[request.param](qwen3)


@pytest.fixture(scope="module")
def model(qwen3: Family) -> Transformer:
    return load_model(qwen3.folder)


def requests(**sampling: object) -> list[GenerateRequest]:
    return [request(str(number), prompt, NUM_TOKENS, **sampling) for number, prompt in enumerate(PROMPTS)]


def finished(engine: GenerationEngine, until: int | None = None) -> dict[str, Generation]:
    """Step until nothing is left to do, or `until` steps are done."""
    done: dict[str, Generation] = {}
    for step in range(10_000):
        if not engine.has_work() or step == until:
            return done
        for generation in engine.step():
            assert generation.id not in done, "a request ends once"
            done[generation.id] = generation
    raise AssertionError(f"after 10,000 steps {engine} still has work")


def logprobs_of(model: Transformer, asked: GenerateRequest, generation: Generation) -> torch.Tensor:
    """[tokens, vocabulary]: the model's own log-probs at each generated token."""
    sequence = [*asked.prompt, *generation.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor(sequence), torch.arange(len(sequence)), PackedAttention([len(sequence)]))
    return logits[len(asked.prompt) - 1 : -1].log_softmax(-1)


def changed(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() * 0.5 for name, tensor in model.named_parameters()}


def test_each_request_ends_once_with_the_tokens_and_logprobs_of_the_model(make, model: Transformer) -> None:
    engine = make()
    for one in requests():
        engine.add(one)
    done = finished(engine)
    assert set(done) == {one.id for one in requests()}
    for one in requests():
        generation, expected = done[one.id], logprobs_of(model, one, done[one.id])
        assert list(generation.token_ids) == expected.argmax(-1).tolist()
        assert len(generation.token_ids) == NUM_TOKENS
        assert generation.finish_reason == "length"
        torch.testing.assert_close(torch.tensor(list(generation.logprobs)), expected.max(-1).values, rtol=0, atol=1e-4)
        assert set(generation.versions) == {engine.version}


def test_sampled_logprobs_are_those_of_the_whole_distribution_at_the_temperature(make, model: Transformer) -> None:
    engine = make()
    (asked, *_) = requests(temperature=0.7, top_k=5, seed=1)
    engine.add(asked)
    generation = finished(engine)[asked.id]
    logits = logprobs_of(model, asked, generation)
    expected = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(list(generation.token_ids))[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(list(generation.logprobs)), expected, rtol=0, atol=1e-4)


def test_an_aborted_request_ends_with_what_it_has_and_the_others_go_on(make) -> None:
    engine = make()
    for one in requests():
        engine.add(one)
    assert finished(engine, until=4) == {}
    engine.abort(["1", "nobody"])
    done = finished(engine)
    assert done["1"].finish_reason == "abort"
    assert 0 < len(done["1"].token_ids) < NUM_TOKENS
    assert all(len(done[name].token_ids) == NUM_TOKENS for name in "023")
    assert engine.num_generated() == {}


def test_what_cannot_be_is_refused_and_disturbs_nothing(make) -> None:
    engine = make()
    (first, *_) = requests()
    engine.add(first)
    for wrong in (first, request("long", "x" * 300), request("strange", [10_000])):
        with pytest.raises(RequestRefused):
            engine.add(wrong)
        with pytest.raises(RequestRefused):
            engine.check(wrong)
    assert set(finished(engine)) == {first.id}


def test_new_weights_are_sampled_from_at_once_and_requests_go_on(make, model: Transformer) -> None:
    engine = make()
    for one in requests():
        engine.add(one)
    finished(engine, until=5)
    before = engine.num_generated()
    engine.load_weights(changed(model), 3)
    assert engine.version == 3
    for name, tensor in engine.weights():
        torch.testing.assert_close(tensor, changed(model)[name])
    done = finished(engine)
    for name, generation in done.items():
        assert list(generation.versions) == [0] * before[name] + [3] * (NUM_TOKENS - before[name])


def test_weights_that_do_not_fit_change_nothing(make, model: Transformer) -> None:
    engine = make()
    name, *_ = changed(model)
    for wrong in ({}, {**changed(model), name: torch.zeros(1)}, {**changed(model), "more": torch.zeros(1)}):
        with pytest.raises(ValueError, match="version 3"):
            engine.load_weights(wrong, 3)
        assert engine.version == 0
    kept = dict(engine.weights())
    assert all(torch.equal(kept[key], tensor) for key, tensor in model.named_parameters())


def test_a_request_that_migrates_says_what_it_would_have_said(make) -> None:
    whole, source, target = make(), make(), make()
    if not isinstance(source, KVMigration):
        pytest.skip("this engine's requests begin again elsewhere")
    for engine in (whole, source):
        for one in requests():
            engine.add(one)
    finished(source, until=5)
    moved, caches = source.migrate_out([one.id for one in requests()], ["0", "1"])
    assert not source.has_work()
    assert set(caches) == {"0", "1"}
    for one in moved:
        target.add(one, caches.get(one.id))
    expected, found = finished(whole), finished(target)
    assert {name: done.token_ids for name, done in found.items()} == {
        name: done.token_ids for name, done in expected.items()
    }
