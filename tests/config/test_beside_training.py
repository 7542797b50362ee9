"""What else lives on a train slot, as the config says it, and that the memory of the slot counts it."""

import json
from pathlib import Path

import pytest

from ductile.config.checks import device_kind
from ductile.config.checks.beside_training import generator_bytes, scorer_bytes
from ductile.config.checks.trainer_layout import memory_options
from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig
from ductile.core.cache_size import token_bytes
from ductile.core.layout.model.spec import spec_from_hf
from tests.config.stories import MODEL, furnish

GIB = 2**30
LONG = MODEL | {"num_hidden_layers": 64, "max_position_embeddings": 40_960}
SPEC = spec_from_hf(LONG)
WEIGHTS = 2 * SPEC.num_parameters
TOKEN = token_bytes(SPEC, 2)

SHARED = {"actor,rollout": "0-3"}
APART = {"actor": "0-3", "rollout": "4-7"}


@pytest.fixture(autouse=True)
def _furnished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    (tmp_path / "model" / "config.json").write_text(json.dumps(LONG))


def config_of(placement: dict[str, str], *words: str) -> RLConfig:
    """A run on GPUs of 80 GiB."""
    cluster = ["--cluster.device", "cuda", "--cluster.device-memory-gib", "80"]
    placed = ["--cluster.component-placement", json.dumps(placement)]
    return parse(RLConfig, ["@", "good.toml", *cluster, *placed, *words], across=False).config


@pytest.mark.parametrize(
    ("placement", "words", "num_bytes"),
    [
        (APART, "", 0),
        (APART, "--cluster.auto-scheduler", 0),
        (APART, "--cluster.share-devices", 0),
        (SHARED, "", int(0.4 * 80 * GIB)),
        (SHARED, "--inference.gpu-memory-utilization 0.25", 20 * GIB),
        (APART, "--cluster.auto-scheduler --cluster.share-devices", int(0.4 * 80 * GIB)),
        (SHARED, "--inference.num-blocks 4000", WEIGHTS + 4000 * 16 * TOKEN),
        (SHARED, f"--inference.cache-memory-gib {1000 * 16 * TOKEN / GIB}", WEIGHTS + 1000 * 16 * TOKEN),
        (SHARED, "--inference.cache-memory-gib 30", WEIGHTS + 64 * 2048 * TOKEN),  # as much as all sequences take
    ],
)
def test_generators_on_train_slots(placement: dict[str, str], words: str, num_bytes: int) -> None:
    config = config_of(placement, *words.split())
    assert generator_bytes(config, "cuda") == num_bytes
    assert memory_options(config).generator_bytes == num_bytes


@pytest.mark.parametrize(
    ("placement", "words", "num_bytes"),
    [
        (APART, "", 0),
        (APART | {"inference": "8"}, "", 0),
        ({"actor,inference": "0-3", "rollout": "4-7"}, "", WEIGHTS),
        ({"actor,inference": "0-3", "rollout": "4-7"}, "--scorer.tp 2", WEIGHTS // 2),
        ({"actor,inference": "0-3", "rollout": "4-7"}, "--trainer.loss.kl-coef 0.1", 2 * WEIGHTS),
    ],
)
def test_scorers_on_train_slots(placement: dict[str, str], words: str, num_bytes: int) -> None:
    config = config_of(placement, *words.split())
    assert scorer_bytes(config, "cuda") == num_bytes
    assert memory_options(config).scorer_bytes == num_bytes


@pytest.mark.parametrize(("has_driver", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_the_device_that_the_machine_has(
    has_driver: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_kind, "DRIVER", tmp_path if has_driver else tmp_path / "none")
    options = memory_options(parse(RLConfig, ["@", "good.toml"], across=False).config)
    assert options.device == device
    assert options == memory_options(
        parse(RLConfig, ["@", "good.toml", "--cluster.device", device], across=False).config
    )
    assert (options.context_bytes > 0) == has_driver
