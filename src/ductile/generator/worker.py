"""The generate role of a slot: an engine, fed by commands, that reports by events."""

import time
from typing import Any, Literal

import torch

from ductile.config.inference import InferenceConfig
from ductile.generator.engine import Engine
from ductile.model.checkpoint import load_model
from ductile.roles import Place, Refused
from ductile.tasks.tokenizer import Tokenizer
from ductile.weights.subscriber import receive
from ductile.wire.messages import Abort, Done, EngineStats, Finished, Generate, Receive

STATS_EVERY_S = 1.0


class GenerateRole:
    """`ductile.roles.SlotRole`. `settings` is a dumped `InferenceConfig`."""

    def __init__(self, settings: dict[str, Any], place: Place) -> None:
        self._place = place
        self._engine = load_engine(InferenceConfig.model_validate(settings), place.device)
        self._stats_due = time.monotonic()

    def handle(self, command: Any) -> Done:
        """All of a `Generate`'s requests are taken, or none: it raises `RequestRefused` before the first."""
        match command:
            case Generate(requests=requests):
                self._engine.check(*requests)
                for request in requests:
                    self._engine.add(request)
            case Abort(ids=ids):
                self._engine.abort(ids)
            case Receive(manifest=manifest):
                self._engine.load_weights(receive(manifest), manifest.version)
            case _:
                raise Refused(f"slot {self._place.slot} generates; it cannot execute {type(command).__name__}")
        return Done()

    def has_work(self) -> bool:
        return self._engine.has_work()

    def step(self) -> list[Finished | EngineStats]:
        events: list[Finished | EngineStats] = []
        generations = self._engine.step()
        if generations:
            events.append(Finished(tuple(generations)))
        now = time.monotonic()
        if now >= self._stats_due or not self._engine.has_work():
            events.append(self._engine.stats())
            self._stats_due = now + STATS_EVERY_S
        return events

    def close(self) -> None:
        del self._engine
        if self._place.device.startswith("cuda"):
            torch.cuda.empty_cache()


def load_engine(config: InferenceConfig, device: str, tokenizer: Tokenizer | None = None) -> Engine:
    """The engine over the folder that `model.name` says. Raises `ModelFolderError`, `TokenizerError`, `ValueError`."""
    if config.model.name is None:
        raise ValueError("model.name is not set; it must be a Hugging Face model folder")
    tokenizer = tokenizer or Tokenizer.from_folder(config.model.name, config.model.chat_template)
    dtype = resolve_dtype(config.model.dtype, device)
    model = load_model(config.model.name, dtype=dtype, device=device)
    return Engine(model, config, tokenizer.eos_token_ids, tokenizer.decode, device)


def resolve_dtype(name: Literal["auto", "float32", "bfloat16"], device: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
