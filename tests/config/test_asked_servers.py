"""The servers that a config of `ductile rl` names, and what it cannot say of them."""

from pathlib import Path

import pytest

from ductile.config.checks.asked_servers import asked_servers, servers_in_words
from ductile.config.reading.dump import write_resolved
from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig
from tests.config.stories import furnish


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "urls", "own"),
    [
        ("", (), ()),
        ("--orchestrator.client.base-url http://localhost:8001/v1", ("http://localhost:8001",), ()),
        ("--orchestrator.client.base-url http://10.0.0.7:8000/v1/", ("http://10.0.0.7:8000",), ()),
        ("--orchestrator.client.base-url http://127.0.0.1:8000", (), ("http://127.0.0.1:8000",)),
        (
            "--orchestrator.client.base-url http://127.0.0.1:8000 --deployment.num-infer-gpus 0",
            ("http://127.0.0.1:8000",),
            (),
        ),
        ("--orchestrator.client.base-url http://h:1 http://h:2", ("http://h:1", "http://h:2"), ()),
    ],
)
def test_which_addresses_are_servers_of_their_own(here: Path, flags: str, urls: object, own: object) -> None:
    config = parse(RLConfig, ["@", "good.toml", *flags.split()]).config
    assert asked_servers(config) == (urls, own)


def test_a_run_without_generate_slots_reads_its_resolved_config_again(here: Path) -> None:
    flags = "--orchestrator.client.base-url http://h:1/v1 --deployment.num-infer-gpus 0"
    config = parse(RLConfig, ["@", "good.toml", *flags.split()]).config
    assert config.inference.parallel.dp is None
    resolved = write_resolved(config, here / "runs" / "rl", "rl")
    assert parse(RLConfig, ["@", str(resolved)]).config == config


def test_check_says_which_servers_there_are_and_how_weights_go_to_them(here: Path) -> None:
    flags = "--inference.registry.type file --inference.registry.folder leases --trainer.weight-broadcast.type nccl"
    flags += " --orchestrator.client.base-url http://h:1"
    found, how, unasked = servers_in_words(parse(RLConfig, ["@", "good.toml", *flags.split()]).config)[1:]
    assert found == "those that are found while the run goes on in leases (inference.registry)"
    assert how == (
        "they generate, beside the generate slots; each version of the weights goes to them by connections to the "
        "ranks, made for each version"
    )
    assert unasked.startswith("not asked by this check: whether they are there, have this model")
    assert servers_in_words(parse(RLConfig, ["@", "good.toml"]).config) == []
