"""Requests that leave one generator and go on in another: nothing is lost, doubled or different for it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from ductile.config.schema.inference import InferenceConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.kv_transfer import KVTransferBuffer, KVUnavailable, RequestKV
from ductile.generator.engine.sampler import sample, stream_key
from ductile.generator.generate_role import GenerateRole
from ductile.messages.workers import Abort, Done, Finished, Forget, Generate, MigratedOut, MigrateOut, Receive
from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model
from ductile.model.transformer import Transformer
from ductile.records import GenerateRequest, Generation, KVHandle, Manifest
from ductile.roles import RoleAssignment
from ductile.weights.shared_memory import SharedMemory
from tests.generator.conftest import Family, request, run
from tests.tiny import IM_END, make_model_folder


def move(source: Engine, target: Engine, ids: Sequence[str], with_cache: bool) -> list[GenerateRequest]:
    """Between two engines, with a transfer buffer in between as between processes."""
    buffer = KVTransferBuffer()
    requests, caches = source.migrate_out(ids, ids if with_cache else ())
    for one in requests:
        cache = caches.get(one.id)
        target.add(one, target.fetch(buffer.put(one.id, cache), one) if cache else None)
    buffer.close()  # the receiver has what it needs
    return requests


def drain(engine: Engine) -> dict[str, Generation]:
    return run(engine, [])


@pytest.mark.parametrize("with_cache", [False, True])
@pytest.mark.parametrize(
    ("state", "config", "num_steps"),
    [
        ("waiting", {"max_num_seqs": 1}, 1),
        ("in the middle of its prompt", {"max_num_batched_tokens": 16}, 2),
        ("decoding", {}, 6),
        ("one token before its limit", {}, 15),
    ],
)
def test_every_state_goes_on_elsewhere(
    qwen3: Family, with_cache: bool, state: str, config: dict[str, Any], num_steps: int
) -> None:
    asked = [request("a", "first " * 8, 16), request("b", "second " * 8, 16, temperature=1.0)]
    whole = run(qwen3.engine(), asked)
    source, target = qwen3.engine(**config), qwen3.engine(block_size=7)
    for one in asked:
        source.add(one)
    for _ in range(num_steps):
        assert not source.step()
    had = source.num_generated()
    requests = move(source, target, ["a", "b"], with_cache)
    assert {one.id: len(one.generated) for one in requests} == had
    assert not source.has_work()
    assert source.pool.num_free == source.pool.num_blocks
    done = drain(target)
    for one in asked:
        assert done[one.id].token_ids == whole[one.id].token_ids
        assert done[one.id].logprobs == pytest.approx(whole[one.id].logprobs, abs=1e-4)
        assert done[one.id].finish_reason == "length"


def test_what_was_preempted_goes_on_elsewhere(qwen3: Family) -> None:
    asked = [request(str(i), f"prompt {i}", 40) for i in range(6)]
    whole = run(qwen3.engine(), asked)
    source, target = qwen3.engine(block_size=4, num_blocks=16), qwen3.engine()
    for one in asked:
        source.add(one)
    done: dict[str, Generation] = {}
    while not (lost := [s.request.id for s in source.scheduler.waiting if s.num_generated]):
        done |= {generation.id: generation for generation in source.step()}
    requests, caches = source.migrate_out(lost, lost)
    assert requests
    assert not caches  # they lost their blocks
    for one in requests:
        target.add(one)
    done |= drain(target) | drain(source)
    assert {id: one.token_ids for id, one in done.items()} == {id: one.token_ids for id, one in whole.items()}


def test_a_request_keeps_all_it_had(qwen3: Family) -> None:
    asked = replace(request("a", "hello", 16, "group", temperature=0.7, stop=("never said",)), priority=3)
    engine = qwen3.engine(version=9)
    engine.add(asked)
    for _ in range(5):
        engine.step()
    said = engine.peek("a")
    assert said is not None
    (handed,), _ = engine.migrate_out(["a"])
    assert handed == replace(asked, generated=tuple(said[0]), logprobs=tuple(said[1]), versions=(9,) * 5)


def test_who_is_not_there_is_left_out(qwen3: Family) -> None:
    engine = qwen3.engine()
    done = GenerateRequest("done", (9,), request("x", "x", 9, ignore_eos=False).sampling, "", (IM_END,), (-1.0,), (0,))
    for one in (request("a", "hello"), request("aborted", "hello"), done):
        engine.add(one)
    engine.abort(["aborted"])
    requests, _ = engine.migrate_out(["nobody", "a", "a", "done", "aborted"])
    assert [one.id for one in requests] == ["a"]
    assert {generation.id for generation in engine.step()} == {"done", "aborted"}
    assert not engine.has_work()


def test_with_its_cache_only_what_is_missing_is_computed(qwen3: Family) -> None:
    source, target = qwen3.engine(), qwen3.engine()
    source.add(request("a", "x" * 40, 20))
    for _ in range(4):
        source.step()
    move(source, target, ["a"], with_cache=True)
    target.step()
    assert target.last_step is not None
    assert (target.last_step.num_tokens, target.last_step.num_kv_imports) == (1, 1)
    target.add(request("b", "x" * 40, 2))
    target.step()
    # The second computes its last 8 tokens: full blocks that came with the first are shared like any other.
    assert target.last_step.num_tokens == 1 + 8


def test_blocks_that_are_here_already_are_not_written_again(qwen3: Family) -> None:
    prompt = "a prompt that is long enough to fill a few blocks of the cache"
    source, target = qwen3.engine(), qwen3.engine()
    source.add(request("a", prompt, 20))
    for _ in range(4):
        source.step()
    target.add(request("b", prompt, 20))
    target.step()
    move(source, target, ["a"], with_cache=True)
    target.scheduler.schedule()
    assert [(kv_import.start, kv_import.end) for kv_import in target.scheduler.kv_imports] == [(48, len(prompt) + 3)]


@pytest.mark.parametrize("sharing", [False, True])
def test_a_cache_travels_on_while_its_request_waits(qwen3: Family, sharing: bool) -> None:
    """Through a generator that never had room for it; its blocks are of another size there."""
    asked = request("a", "x" * 40, 20)
    whole = run(qwen3.engine(), [asked])["a"]
    first, busy, last = qwen3.engine(), qwen3.engine(max_num_seqs=1), qwen3.engine(enable_prefix_caching=sharing)
    busy.add(request("other", "hello", 30))
    first.add(asked)
    for _ in range(4):
        first.step()
    move(first, busy, ["a"], with_cache=True)
    busy.step()
    move(busy, last, ["a"], with_cache=True)
    last.step()
    assert last.last_step is not None
    assert last.last_step.num_tokens == 1
    assert drain(last)["a"].token_ids == whole.token_ids


def other_weights(tmp_path: Path) -> Transformer:
    return load_model(make_model_folder(tmp_path / "other", "qwen3", seed=1))


@pytest.mark.parametrize("when", ["before it leaves", "before it arrives", "while it waits"])
@pytest.mark.parametrize("keep_cache", [False, True])
def test_no_cache_mixes_versions(qwen3: Family, tmp_path: Path, when: str, keep_cache: bool) -> None:
    news = dict(other_weights(tmp_path).named_parameters())
    source, target = (qwen3.engine(keep_cache_on_update=keep_cache) for _ in range(2))
    source.add(request("a", "hello " * 4, 20))
    for _ in range(5):
        source.step()
    if when == "before it leaves":
        for engine in (source, target):
            engine.load_weights(news, 1)
    (handed,), caches = source.migrate_out(["a"], ["a"])
    assert ("a" in caches) is (when != "before it leaves")
    if when == "before it arrives":
        target.load_weights(news, 1)
        buffer = KVTransferBuffer()
        with pytest.raises(KVUnavailable, match="was computed under version 0, and 1 is live here"):
            target.fetch(buffer.put("a", caches["a"]), handed)
        buffer.close()
        caches.clear()
    target.add(handed, caches.get("a"))
    if when == "while it waits":
        target.load_weights(news, 1)
    target.step()
    assert target.last_step is not None
    assert target.last_step.num_tokens == len(handed.prompt) + 5
    done = drain(target)["a"]
    assert done.versions == (0,) * 5 + (1,) * 15
    assert_sampled([handed], {"a": done}, {0: load_model(qwen3.folder), 1: other_weights(tmp_path)})


def test_handles_that_cannot_be_used_say_why(qwen3: Family) -> None:
    source, target = qwen3.engine(), qwen3.engine()
    source.add(request("a", "hello", 20))
    source.step()
    (handed,), caches = source.migrate_out(["a"], ["a"])
    buffer = KVTransferBuffer()
    handle = buffer.put("a", caches["a"])
    for wrong, why in (
        (replace(handle, num_tokens=8), "has 8 tokens, and the request 6"),
        (replace(handle, num_tokens=4), r"has 1280 bytes, and 4 tokens take 1024 here: it is another model's"),
        (replace(handle, fingerprint=5), "is damaged"),
        (replace(handle, version=3), "was computed under version 3, and 0 is live here"),
    ):
        with pytest.raises(KVUnavailable, match=why):
            target.fetch(wrong, handed)
    assert target.fetch(handle, handed).num_tokens == 5
    buffer.forget(["a", "nobody"])
    with pytest.raises(KVUnavailable, match="is gone"):
        target.fetch(handle, handed)


def test_a_transfer_buffer_has_one_cache_a_request() -> None:
    buffer = KVTransferBuffer()
    old = buffer.put("a", RequestKV(torch.zeros(2, 1, 3, 1, 1), 0))
    new = buffer.put("a", RequestKV(torch.zeros(2, 1, 4, 1, 1), 0))
    assert len(buffer._segments) == 1
    assert (old.num_tokens, new.num_tokens, new.num_bytes) == (3, 4, 32)
    buffer.close()
    assert len(buffer._segments) == 0


def test_engines_of_one_seed_draw_the_same_numbers(qwen3: Family) -> None:
    """So that the orchestrator may send an unseeded request, or its rest, to any of them."""
    asked = [request(str(i), "hello", 30, temperature=1.0) for i in range(3)]
    first, second, other = (run(qwen3.engine(seed=seed), asked) for seed in (5, 5, 6))
    assert {id: one.token_ids for id, one in first.items()} == {id: one.token_ids for id, one in second.items()}
    assert all(first[id].token_ids != other[id].token_ids for id in first)


# -- Any handoffs at any moment --------------------------------------------------------------------------------------


@torch.no_grad()
def assert_sampled(
    asked: Sequence[GenerateRequest], done: dict[str, Generation], models: dict[int, Transformer]
) -> None:
    """The dumb twin: every token is what one forward pass over all before it says, under the version that it names."""
    for one in asked:
        said = done[one.id]
        assert len(said.token_ids) == len(said.logprobs) == len(said.versions)
        tokens = torch.tensor([*one.prompt, *said.token_ids])
        first, num = len(one.prompt) - 1, len(said.token_ids)
        expected: dict[int, tuple[list[int], list[float]]] = {}
        for version in set(said.versions):
            logits = models[version](tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)]))
            stream = stream_key(one.sampling.seed, 0, one.id)
            drawn = sample(logits[first : first + num], [one.sampling] * num, [stream] * num, list(range(num)))
            expected[version] = (drawn[0].tolist(), drawn[1].tolist())
        for position, version in enumerate(said.versions):
            assert said.token_ids[position] == expected[version][0][position], (one.id, position)
            assert said.logprobs[position] == pytest.approx(expected[version][1][position], abs=1e-3)


@dataclass
class Story:
    """Some generators, what is asked of them, and what became of it."""

    random: Random
    roles: list[GenerateRole]
    published: dict[int, Manifest]
    asked: dict[str, GenerateRequest] = field(default_factory=dict)
    at: dict[str, GenerateRole] = field(default_factory=dict)
    done: dict[str, Generation] = field(default_factory=dict)
    num_handed: int = 0
    num_half_finished: int = 0
    """Handed over when another completion of the same group had ended."""
    states: Counter[str] = field(default_factory=Counter)
    """Of what was handed over with its cache, if it had one."""

    def ask(self, requests: Sequence[GenerateRequest]) -> None:
        role = self.random.choice(self.roles)
        assert role.handle(Generate(tuple(requests))) == Done()
        for one in requests:
            self.asked[one.id], self.at[one.id] = one, role

    def step(self, role: GenerateRole) -> None:
        if role.has_work():
            for event in role.step():
                if isinstance(event, Finished):
                    for generation in event.generations:
                        assert generation.id not in self.done, "told twice"
                        assert self.at.pop(generation.id) is role, "told by somebody who does not have it"
                        self.done[generation.id] = generation

    def migrate_out(self) -> None:
        source, target = self.random.sample(self.roles, 2)
        there = [id for id, role in self.at.items() if role is source]
        ids = self.random.sample(there, self.random.randint(0, len(there)))
        with_cache = [id for id in ids if self.random.random() < 0.6]
        self.step(source)  # as a slot does
        reply = source.handle(MigrateOut(tuple(ids), tuple(with_cache)))
        assert isinstance(reply, MigratedOut)
        assert {one.id for one in reply.requests} == {id for id in ids if id in self.at}
        assert reply.caches.keys() <= set(with_cache)
        self.publish(self.random.choice([source, target, target]), chance=0.3)
        if self.random.random() < 0.1:  # too early, as if the source had died
            source.handle(Forget(tuple(ids)))
        target.handle(Generate(reply.requests, reply.caches))
        self.publish(self.random.choice([source, target, target]), chance=0.3)
        self.at |= {one.id: target for one in reply.requests}
        source.handle(Forget(tuple(ids)))
        self.num_handed += len(reply.requests)
        self.states.update(state(one, reply.caches.get(one.id)) for one in reply.requests if one.id in with_cache)
        begun = {self.asked[id].group for id in self.done}
        self.num_half_finished += sum(one.group in begun for one in reply.requests)

    def publish(self, role: GenerateRole, chance: float) -> None:
        if self.published and self.random.random() < chance:
            role.handle(Receive("generate", self.random.choice(list(self.published.values()))))


def state(handed: GenerateRequest, handle: KVHandle | None) -> str:
    """Of a request when its generator handed it off with all that it had computed."""
    if handle is None:
        return "computed nothing here, begun" if handed.generated else "computed nothing here"
    if handle.num_tokens < len(handed.prompt):
        return "in the prompt"
    if handle.num_tokens < len(handed.prompt) + len(handed.generated) - 1:
        return "computes its completion again"
    return "one token to go" if len(handed.generated) == handed.sampling.max_tokens - 1 else "decodes"


def engines(family: Family, random: Random) -> list[GenerateRole]:
    """Three that have little in common but the model."""
    made: list[GenerateRole] = []
    for slot in range(3):
        config = {
            "model": {"name": str(family.folder), "max_model_len": 96},
            "block_size": random.choice([4, 5, 8]),
            "num_blocks": random.choice([24, 30, 200]),
            "max_num_seqs": random.choice([2, 4, 16]),
            "max_num_batched_tokens": random.choice([16, 16, 512]),
            "enable_prefix_caching": random.random() < 0.7,
        }
        settings = InferenceConfig.model_validate(config).model_dump()
        made.append(GenerateRole(settings, RoleAssignment(slot, ParallelLayout.of((slot,)), 0, "cpu")))
    return made


def requests_of(random: Random, number: int) -> list[GenerateRequest]:
    prompt = [random.randrange(5, 100) for _ in range(random.choice([3, 20, 40, 60]))]
    max_tokens = random.choice([4, 12, 24])
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": random.randrange(99)}, {"temperature": 1.3}]
    sampling = random.choice(kinds)
    return [request(f"{number}-{i}", prompt, max_tokens, group=str(number), **sampling) for i in range(3)]


Versions = tuple[dict[int, Transformer], dict[int, Manifest]]


@pytest.fixture(scope="module")
def versions(qwen3: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    folder = make_model_folder(tmp_path_factory.mktemp("second") / "model", "qwen3", seed=1)
    models = {0: load_model(qwen3.folder), 1: load_model(folder)}
    publisher = SharedMemory()
    manifests = {version: publisher.publish(version, model.named_parameters()) for version, model in models.items()}
    yield models, manifests
    publisher.close()


def test_500_handoffs_at_any_moment_change_nothing(qwen3: Family, versions: Versions) -> None:
    """In every second of ten stories the generators also change between two versions as they like."""
    states: Counter[str] = Counter()
    num_handed = num_half_finished = 0
    for seed in range(10):
        story = tell(seed, qwen3, *versions)
        states += story.states
        num_handed += story.num_handed
        num_half_finished += story.num_half_finished
    assert num_handed >= 500
    assert 20 <= num_half_finished < num_handed
    assert sum(states.values()) > 250  # the others went without their cache
    for least, kind in (
        (20, "computed nothing here"),
        (20, "computed nothing here, begun"),
        (10, "in the prompt"),
        (1, "computes its completion again"),
        (50, "decodes"),
        (5, "one token to go"),
    ):
        assert states[kind] >= least, (kind, states)


def tell(
    seed: int, family: Family, models: dict[int, Transformer], manifests: dict[int, Manifest], num_migrations: int = 50
) -> Story:
    random, swaps, number = Random(seed), seed % 2 == 1, 0
    story = Story(random, engines(family, random), manifests if swaps else {})
    while story.num_handed < num_migrations or story.at:
        goes_on = story.num_handed < num_migrations
        if goes_on and len(story.at) < 6:
            story.ask(requests_of(random, number))
            number += 1
        for role in story.roles:
            if random.random() < 0.7:
                story.step(role)
        if goes_on and random.random() < 0.6:
            story.migrate_out()
    assert story.done.keys() == story.asked.keys()
    for role in story.roles:
        role.handle(Abort())
        assert not role.has_work() or not [event for event in role.step() if isinstance(event, Finished)]
        role.close()
    for id, one in story.asked.items():
        assert len(story.done[id].token_ids) == one.sampling.max_tokens, (seed, id)
        assert story.done[id].finish_reason == "length"
    assert_sampled(list(story.asked.values()), story.done, models)
    if not swaps:
        whole = run(family.engine(), list(story.asked.values()))
        for id, one in whole.items():
            assert story.done[id].token_ids == one.token_ids, (seed, id)
            assert story.done[id].versions == one.versions
    return story
