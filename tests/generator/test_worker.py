"""The generate role by its commands and events, with weights from a real publisher."""

from pathlib import Path
from typing import Any

import pytest

from ductile.config.inference import InferenceConfig
from ductile.generator.limits import RequestRefused
from ductile.generator.worker import GenerateRole
from ductile.model.checkpoint import load_model
from ductile.records import GenerateRequest, Generation
from ductile.roles import Place, Refused
from ductile.weights.publisher import Publisher
from ductile.wire.messages import Abort, Done, EngineStats, Finished, Generate, Receive, Withdraw
from tests.generator.conftest import Family, request, run
from tests.tiny import make_model_folder

PLACE = Place(slot=3, members=(3,), epoch=1, device="cpu")


def role(family: Family, **config: Any) -> GenerateRole:
    settings = {"model": {"name": str(family.folder), "max_model_len": 64}} | config
    return GenerateRole(InferenceConfig.model_validate(settings).model_dump(), PLACE)


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
    publisher = Publisher()
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


def test_other_commands_are_refused(qwen3: Family) -> None:
    with pytest.raises(Refused, match="slot 3 generates; it cannot execute Withdraw"):
        role(qwen3).handle(Withdraw(1))


def test_a_role_needs_a_model() -> None:
    with pytest.raises(ValueError, match=r"model\.name is not set"):
        GenerateRole(InferenceConfig().model_dump(), PLACE)
