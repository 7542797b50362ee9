"""Lengths follow config.json where nobody wrote them."""

import json
import re
from pathlib import Path

import pytest

from ductile import host
from ductile.config.reading.errors import ConfigError
from ductile.config.reading.parse import parse
from ductile.config.schema.inference import InferenceConfig, shared_block_tokens
from ductile.config.schema.run import InferenceRunConfig, RLConfig
from tests.config.stories import MODEL, furnish


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)


def write_model(max_position: int) -> None:
    Path("model/config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": max_position}))


@pytest.mark.parametrize(
    ("max_position", "given", "max_model_len", "seq_len"),
    [
        (256, "", 256, 2048),  # a micro-batch packs several completions
        (40960, "", 2048, 2048),  # as many tokens as that model allows would be no default for training
        (4096, "--inference.model.max-model-len 4096", 4096, 4096),
        (4096, "--trainer.model.seq-len 512", 512, 512),
        (256, "--seq-len 200", 200, 200),
        (4096, "--inference.model.max-model-len 300 --trainer.model.seq-len 400", 300, 400),
    ],
)
def test_of_rl(max_position: int, given: str, max_model_len: int, seq_len: int) -> None:
    write_model(max_position)
    config = parse(RLConfig, ["@", "good.toml", *given.split()]).config
    assert (config.inference.model.max_model_len, config.trainer.model.seq_len) == (max_model_len, seq_len)


@pytest.mark.parametrize(
    ("given", "max_tokens", "evaluated"),
    [
        ("--seq-len 128", 64, 64),  # 128, the default, would leave no room for a prompt
        ("--seq-len 2", 1, 1),
        ("--seq-len 200", 128, 128),
        ("--seq-len 128 --orchestrator.sampling.max-tokens 100", 100, 100),
        ("--seq-len 128 --orchestrator.eval.sampling.max-tokens 30", 64, 30),
    ],
)
def test_completions_follow_what_a_sequence_may_have(given: str, max_tokens: int, evaluated: int) -> None:
    write_model(4096)
    table = re.sub(r"max_tokens = \d+", "", Path("good.toml").read_text())
    Path("good.toml").write_text(table)
    parsed = parse(RLConfig, ["@", "good.toml", *given.split()])
    orchestrator = parsed.config.orchestrator
    assert (orchestrator.sampling.max_tokens, orchestrator.eval.sampling.max_tokens) == (max_tokens, evaluated)
    told = f"orchestrator.sampling.max_tokens = {max_tokens}: half of inference.model.max_model_len"
    assert (told in parsed.derived) == (max_tokens in (1, 64))


@pytest.mark.parametrize(
    ("max_position", "given", "max_model_len"),
    [
        (256, "", 256),
        (40960, "", 40960),
        (40960, "--model.max-model-len 100", 100),
        (40960, "--num-blocks 10", 160),
        (40960, "--cache-memory-gib 0.001", 4192),  # 256 bytes a token
    ],
)
def test_of_a_server(max_position: int, given: str, max_model_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ductile inference --model.name runs/quickstart/model --server.port 8000`, as the docs have it."""
    monkeypatch.setattr(host, "memory_bytes", lambda: 2**36)
    write_model(max_position)
    words = ["--model.name", "model", "--cluster.device", "cpu", *given.split()]
    assert parse(InferenceRunConfig, words).config.model.max_model_len == max_model_len


def test_what_follows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(256)
    said = parse(RLConfig, ["@", "good.toml"]).derived
    assert "inference.model.max_model_len = 256: the model's max_position_embeddings" in said
    monkeypatch.setattr(host, "memory_bytes", lambda: 2**20 - 1)
    parsed = parse(InferenceRunConfig, ["--model.name", "model", "--cluster.device", "cpu"])
    why = "what the KV cache holds; the model's max_position_embeddings are 256"
    assert f"model.max_model_len = 240: {why}" in parsed.derived


def test_a_length_that_is_the_default_anyhow_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: 2**36)
    write_model(2048)
    assert parse(InferenceRunConfig, ["--model.name", "model", "--cluster.device", "cpu"]).derived == ()


@pytest.mark.parametrize(
    ("memory_gib", "why"), [(16, "a sixteenth of this machine's memory"), (1024, "the default of 4 GiB")]
)
def test_a_cache_that_is_too_small_says_what_decided_its_size(
    memory_gib: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: memory_gib * 2**30)
    write_model(2**26)
    words = ["--model.name", "model", "--cluster.device", "cpu", "--model.max-model-len", str(2**25)]
    with pytest.raises(ConfigError, match=rf"must be at most \d+: the KV cache has {why}, which holds no more tokens"):
        parse(InferenceRunConfig, words)


@pytest.mark.parametrize(
    ("placement", "given", "share"),
    [
        ("", "", 0.9),
        ("", "--cluster.auto-scheduler", 0.4),
        ('{"actor,rollout": "all"}', "", 0.4),
        ('{"actor": 0, "rollout": "1-2", "inference": 2}', "", 0.4),
        ("", "--inference.gpu-memory-utilization 0.5", 0.5),
        ("", "--cluster.slots-per-device 2", 0.45),
        ("", "--cluster.slots-per-device 4 --cluster.auto-scheduler", 0.1),
        ("", "--cluster.slots-per-device 2 --inference.gpu-memory-utilization 0.7", 0.7),  # one of the two generates
        ("", "--cluster.device cpu", None),
        ("", "--inference.cache-memory-gib 2", None),  # it decides, and a share beside it would say nothing
        ("", "--inference.num-blocks 200", None),
    ],
)
def test_the_share_of_a_gpu_leaves_room_for_other_roles(placement: str, given: str, share: float | None) -> None:
    where = ["--cluster.component-placement", placement] if placement else []
    config = parse(RLConfig, ["@", "good.toml", *where, *given.split()]).config
    assert config.inference.gpu_memory_utilization == share


def test_siblings_share_whole_blocks_unless_nothing_is_shared() -> None:
    assert shared_block_tokens(InferenceConfig()) == 16
    assert shared_block_tokens(InferenceConfig(block_size=32)) == 32
    assert shared_block_tokens(InferenceConfig(block_size=32, enable_prefix_caching=False)) == 0
