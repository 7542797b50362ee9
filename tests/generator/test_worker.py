"""The generate role by its commands and events, with weights from a real publisher."""

import io
import os
import resource
import shutil
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ductile.config.schema.inference import InferenceConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.generator.engine.limits import RequestRefused
from ductile.generator.generate_role import GenerateRole
from ductile.messages.workers import (
    Abort,
    Done,
    EndOffer,
    EngineStats,
    Finished,
    Forget,
    Generate,
    MigratedOut,
    MigrateOut,
    OfferWeights,
    Published,
    Receive,
    Withdraw,
)
from ductile.model.checkpoint import load_model
from ductile.records import GenerateRequest, Generation
from ductile.roles import Refused, RoleAssignment
from ductile.tasks.tokenizer import Tokenizer
from ductile.weights.shared_memory import SharedMemory, WeightsUnavailable
from tests.generator.conftest import Family, request, run
from tests.ranks import run_alone
from tests.tiny import make_model_folder

PLACE = RoleAssignment(slot=3, layout=ParallelLayout.of((3,)), epoch=1, device="cpu")


def role(family: Family, place: RoleAssignment = PLACE, **config: Any) -> GenerateRole:
    settings = {"model": {"name": str(family.folder), "max_model_len": 64}} | config
    return GenerateRole(InferenceConfig.model_validate(settings).model_dump(), place)


def joiner(family: Family, folder: Path) -> GenerateRole:
    """Holds a role over a folder that has no weights."""
    shutil.copytree(family.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return role(Family(folder, family.tokenizer), replace(PLACE, joining=True))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def free_descriptors() -> int:
    """How many more files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sum(int(fd) < soft for fd in os.listdir("/proc/self/fd"))
    return soft - used + 1  # one of the used is the listing itself


def finish(role: GenerateRole) -> tuple[dict[str, Generation], EngineStats]:
    done: dict[str, Generation] = {}
    stats: EngineStats | None = None
    while role.has_work():
        for event in role.step():
            match event:
                case Finished(generations=generations):
                    done |= {generation.id: generation for generation in generations}
                case EngineStats():
                    stats = event
    assert stats is not None
    return done, stats


def test_requests_come_back_as_events(qwen3: Family) -> None:
    asked = [request(str(i), "hello", 4 + i) for i in range(3)]
    held = role(qwen3)
    assert not held.has_work()
    assert held.handle(Generate(tuple(asked))) == Done()
    done, stats = finish(held)
    assert done == run(qwen3.engine(), asked)
    assert (stats.num_running, stats.num_waiting, stats.num_tokens) == (0, 0, 15)
    held.close()


def test_abort_reports_what_there_is(qwen3: Family) -> None:
    held = role(qwen3)
    held.handle(Generate((request("a", "hello", 40), request("b", "hello", 40))))
    held.step()
    held.handle(Abort(("a",)))
    held.handle(Abort())
    done, _ = finish(held)
    assert {id: (len(one.token_ids), one.finish_reason) for id, one in done.items()} == {
        "a": (1, "abort"),
        "b": (1, "abort"),
    }


def test_published_weights_are_what_is_sampled_from(qwen3: Family, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", "qwen3", seed=1)
    publisher = SharedMemory()
    try:
        manifest = publisher.publish(6, load_model(other).state_dict().items())
        held = role(qwen3)
        assert held.handle(Receive("generate", manifest)) == Done()
        held.handle(Generate((request("r", "hello", 8),)))
        done, stats = finish(held)
    finally:
        publisher.close()
    expected = run(Family(other, qwen3.tokenizer).engine(), [request("r", "hello", 8)])["r"]
    assert done["r"].token_ids == expected.token_ids
    assert done["r"].versions == (6,) * 8
    assert stats.version == 6


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([request("good", "x"), request("bad", [])], "request bad: the prompt has no tokens"),
        ([request("twin", "x"), request("twin", "y")], "request twin: a request of this id is in flight already"),
    ],
)
def test_of_a_command_all_requests_are_taken_or_none(
    qwen3: Family, requests: list[GenerateRequest], message: str
) -> None:
    held = role(qwen3)
    with pytest.raises(RequestRefused, match=message):
        held.handle(Generate(tuple(requests)))
    assert not held.has_work()


def test_broken_weights_end_the_generator(qwen3: Family) -> None:
    held = role(qwen3)
    with torch.no_grad():
        next(held._engine.model.parameters()).fill_(torch.nan)
    held.handle(Generate((request("r", "x"),)))
    with pytest.raises(FloatingPointError, match="request r: weights of version 0 give logits that are not finite"):
        held.step()


def test_other_commands_are_refused(qwen3: Family) -> None:
    with pytest.raises(Refused, match="slot 3 generates; it cannot execute Withdraw"):
        role(qwen3).handle(Withdraw(1))


def test_a_role_needs_a_model() -> None:
    with pytest.raises(ValueError, match=r"model\.name is not set"):
        GenerateRole(InferenceConfig().model_dump(), PLACE)


def test_a_handed_off_request_ends_elsewhere_as_if_it_had_stayed(qwen3: Family) -> None:
    asked = tuple(request(str(i), "hello " * 3, 20, temperature=1.0) for i in range(3))
    expected = run(qwen3.engine(), list(asked))
    source, target = role(qwen3), role(qwen3)
    source.handle(Generate(asked))
    for _ in range(5):
        source.step()
    reply = source.handle(MigrateOut(("0", "2", "nobody"), with_cache=("0",)))
    assert isinstance(reply, MigratedOut)
    assert [(one.id, len(one.generated)) for one in reply.requests] == [("0", 5), ("2", 5)]
    assert reply.caches.keys() == {"0"}
    assert target.handle(Generate(reply.requests, reply.caches)) == Done()
    assert source.handle(Forget(("0",))) == Done()
    done = finish(target)[0] | finish(source)[0]
    assert {id: one.token_ids for id, one in done.items()} == {id: one.token_ids for id, one in expected.items()}


def test_a_cache_that_is_gone_is_said_and_computed_again(qwen3: Family, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = role(qwen3), role(qwen3)
    source.handle(Generate((request("a", "hello", 20),)))
    source.step()
    reply = source.handle(MigrateOut(("a",), ("a",)))
    source.close()
    target.handle(Generate(reply.requests, reply.caches))
    done, _ = finish(target)
    assert done["a"].token_ids == run(qwen3.engine(), [request("a", "hello", 20)])["a"].token_ids
    assert "the context of request a is computed again: the cache is gone: /proc/" in capsys.readouterr().err


def migrate_with_two_files_left(folder: Path) -> tuple[tuple[str, ...], set[str], dict[str, Any], str]:
    """In a process of its own, as others than the test would open files here. Returns the requests that left, those
    whose caches went along, the tokens that the target generated, and what was said."""
    family, said = Family(folder, Tokenizer.from_folder(folder)), io.StringIO()
    source, target = role(family), role(family)
    source.handle(Generate(tuple(request(str(i), "hello", 20) for i in range(4))))
    source.step()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    free = [os.open("/dev/null", os.O_RDONLY) for _ in range(free_descriptors() - 2)]
    with redirect_stderr(said):
        reply = source.handle(MigrateOut(("0", "1", "2", "3"), ("0", "1", "2", "3")))
        target.handle(Generate(reply.requests, reply.caches))
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    tokens = {id: one.token_ids for id, one in finish(target)[0].items()}
    source.close()
    return tuple(one.id for one in reply.requests), set(reply.caches), tokens, said.getvalue()


def test_without_room_for_caches_requests_go_alone(qwen3: Family) -> None:
    moved, with_cache, tokens, log = run_alone(migrate_with_two_files_left, qwen3.folder)
    assert moved == ("0", "1", "2", "3")
    assert with_cache == {"0", "1"}
    asked = [request(str(i), "hello", 20) for i in range(4)]
    assert tokens == {id: one.token_ids for id, one in run(qwen3.engine(), asked).items()}
    assert "request 2 goes without its cache: [Errno 24] Too many open files" in log
    assert "the context of request 0 is computed again: the cache cannot be read: /proc/" in log


def test_a_generator_that_gave_everything_away_says_so(qwen3: Family) -> None:
    held = role(qwen3)
    held.handle(Generate((request("a", "hello", 20),)))
    held.step()
    held.handle(MigrateOut(("a",)))
    done, stats = finish(held)
    assert not done
    assert (stats.num_running, stats.num_tokens, stats.generated) == (0, 1, {})


def test_statistics_say_how_far_each_request_is_and_how_long_steps_took(qwen3: Family) -> None:
    held = role(qwen3)
    held.handle(Generate((request("a", "hello", 3), request("b", "hello", 9))))
    (first,) = [event for event in held.step() if isinstance(event, EngineStats)]
    assert first.generated == {"a": 1, "b": 1}
    assert first.decoded == ()
    assert first.prefilled[0] == 10
    assert first.prefilled[1] > 0
    _, last = finish(held)
    assert last.generated == {}
    assert last.prefilled == (0, 0.0)
    # Two steps with contexts of 6 + 6 and 7 + 7 tokens, then six of "b" alone, with 8 to 13.
    assert [point[:2] for point in last.decoded] == [(1.0, 10.5), (2.0, 13.0)]
    assert all(seconds > 0 for _, _, seconds in last.decoded)


def test_a_joiner_reads_no_weights_and_does_nothing_without_them(qwen3: Family, tmp_path: Path) -> None:
    joining = joiner(qwen3, tmp_path / "model")
    for command in (Generate((request("a", "hello"),)), OfferWeights("generate")):
        with pytest.raises(
            Refused, match=r"slot 3 joins .* cannot execute (Generate|OfferWeights) before the first Receive"
        ):
            joining.handle(command)
    assert not joining.has_work()
    assert joining.handle(MigrateOut(("a",))) == MigratedOut(())
    joining.close()


def test_a_joiner_with_offered_weights_is_like_its_source(qwen3: Family, tmp_path: Path) -> None:
    """Bit for bit, and under the source's version; and it can offer them to the next."""
    publisher = SharedMemory()
    other = make_model_folder(tmp_path / "other", "qwen3", seed=1)
    first = role(qwen3)
    first.handle(Receive("generate", publisher.publish(7, load_model(other).named_parameters())))
    publisher.close()
    joiners = [joiner(qwen3, tmp_path / str(number)) for number in range(2)]
    for source, target in ((first, joiners[0]), (joiners[0], joiners[1])):
        offered = source.handle(OfferWeights("generate"))
        assert isinstance(offered, Published)
        assert offered.manifest is not None
        assert offered.manifest.version == 7
        assert target.handle(Receive("generate", offered.manifest)) == Done()
        assert source.handle(EndOffer("generate")) == Done()
        with pytest.raises(WeightsUnavailable, match="version 7 is gone"):
            SharedMemory().receive(offered.manifest)
    found = SharedMemory().receive(joiners[1].handle(OfferWeights("generate")).manifest)
    for name, tensor in load_model(other).named_parameters():
        assert torch.equal(found[name], tensor)
    joiners[1].handle(Generate((request("r", "hello", 8),)))
    done, stats = finish(joiners[1])
    assert (
        done["r"].token_ids == run(Family(other, qwen3.tokenizer).engine(), [request("r", "hello", 8)])["r"].token_ids
    )
    assert done["r"].versions == (7,) * 8
    assert stats.version == 7


def test_closing_frees_what_was_offered_and_kept_for_others(qwen3: Family) -> None:
    held = role(qwen3)
    before = open_files()
    held.handle(Generate(tuple(request(str(i), "hello", 20) for i in range(3))))
    held.step()
    held.handle(MigrateOut(("0", "1", "2"), ("0", "1", "2")))
    held.handle(OfferWeights("generate"))
    assert open_files() == before + 4
    held.close()
    assert open_files() == before
