"""One tiny model of each family for the whole folder; engines over it are cheap to make."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ductile.config.schema.inference import InferenceConfig, InferenceModelConfig
from ductile.generator.engine.decode_runner import StepRecorder
from ductile.generator.engine.engine import Engine
from ductile.model.checkpoint import load_model
from ductile.records import GenerateRequest, Generation, Sampling
from ductile.tasks.tokenizer import Tokenizer
from tests.tiny import make_model_folder

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama-1-kv-head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
}


@dataclass(frozen=True)
class Family:
    folder: Path
    tokenizer: Tokenizer

    def engine(
        self, *, max_model_len: int = 256, version: int = 0, recorder: StepRecorder | None = None, **config: Any
    ) -> Engine:
        settings = InferenceConfig(model=InferenceModelConfig(max_model_len=max_model_len), **config)
        model = load_model(self.folder)
        eos, decode = self.tokenizer.eos_token_ids, self.tokenizer.decode
        return Engine(model, settings, eos, decode, version=version, recorder=recorder)


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    root = tmp_path_factory.mktemp("families")
    made: dict[str, Family] = {}
    for name, (family, overrides) in FAMILIES.items():
        folder = make_model_folder(root / name, family, **overrides)
        made[name] = Family(folder, Tokenizer.from_folder(folder))
    return made


@pytest.fixture(scope="session")
def qwen3(families: dict[str, Family]) -> Family:
    return families["qwen3"]


def request(
    id: str, prompt: list[int] | str, max_tokens: int = 16, group: str = "", **sampling: Any
) -> GenerateRequest:
    """`prompt` as text means its characters in the tiny vocabulary."""
    tokens = [ord(c) - 32 + 5 for c in prompt] if isinstance(prompt, str) else prompt
    settings = {"temperature": 0.0, "ignore_eos": True} | sampling
    return GenerateRequest(id, tuple(tokens), Sampling(max_tokens=max_tokens, **settings), group)


def run(
    engine: Engine, requests: list[GenerateRequest], between: Callable[[int], None] = lambda step: None
) -> dict[str, Generation]:
    """Step until all ended; `between(step)` is called before each step. Checks that no block is left held."""
    for one in requests:
        engine.add(one)
    done: dict[str, Generation] = {}
    for step in range(10_000):
        if not engine.has_work():
            break
        between(step)
        done |= {generation.id: generation for generation in engine.step()}
    assert not engine.has_work()
    assert engine.pool.num_free == engine.pool.num_blocks
    return done
