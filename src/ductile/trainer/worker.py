"""The train role of one slot: commands in, replies out."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ductile.config.trainer import TrainerConfig
from ductile.fabric.groups import Groups
from ductile.model.checkpoint import save_model
from ductile.parallel.ranks import Ranks
from ductile.records import Formation, StepReport
from ductile.roles import Place
from ductile.trainer import checkpoint
from ductile.trainer.trainer import Trainer
from ductile.weights.publisher import Publisher
from ductile.wire.messages import (
    Done,
    ExportModel,
    ForwardBackward,
    ForwardBackwardDone,
    LoadState,
    OptimStep,
    Publish,
    Published,
    SaveState,
    Stepped,
    Withdraw,
)

T = TypeVar("T")
Tensors = Iterator[tuple[str, Tensor]]


class TrainRole:
    """Follows `ductile.roles.SlotRole`. Every command but `Withdraw` goes to all members; they work in step.

    When one of them fails in the middle of a collective, it abandons its groups, so that the others get an error
    within milliseconds instead of waiting for the timeout. The role is lost then: `Drop` it and hold it anew.
    """

    def __init__(self, settings: Mapping[str, Any], place: Place) -> None:
        """`settings` is a dumped `TrainerConfig`. Collective over `place.members`."""
        config = TrainerConfig.model_validate(settings)
        self._source = config.model.name or ""
        self._publisher = Publisher()
        self._is_first = place.slot == place.members[0]
        self._groups = Groups.at(place, config.dist_timeout_seconds)
        self._trainer: Trainer | None = None
        with self._together():
            self._trainer = Trainer(
                config, Ranks(self._groups, Formation(place.members, config.model.dp_replicate)), place.device
            )

    def handle(self, command: Any) -> Any:
        match command:
            case ForwardBackward(micro_batches=micro_batches):
                start = perf_counter()
                with self._together():
                    num_tokens = self._live.forward_backward(micro_batches)
                return ForwardBackwardDone(num_tokens, perf_counter() - start)
            case OptimStep(divisor=divisor):
                return Stepped(self._optim_step(divisor))
            case Publish(version=version):
                return Published(self._first_only(lambda tensors: self._publisher.publish(version, tensors)))
            case Withdraw(version=version):
                self._publisher.withdraw(version)
            case SaveState(path=path):
                with self._together():
                    checkpoint.save_state(self._live, path)
            case LoadState(path=path):
                with self._together():
                    checkpoint.load_state(self._live, path)
            case ExportModel(path=path):
                self._export(path)
            case _:
                raise ValueError(f"a train slot does not know the command {type(command).__name__}")
        return Done()

    def has_work(self) -> bool:
        return False

    def step(self) -> list[Any]:
        return []

    def close(self) -> None:
        self._trainer = None
        self._publisher.close()
        self._groups.destroy()

    def _optim_step(self, divisor: float) -> StepReport:
        with self._together():
            return self._live.optim_step(divisor)

    def _export(self, path: str) -> None:
        spec, dtype = self._live.spec, self._live.precision.parameters
        source = self._source
        self._first_only(lambda tensors: save_model(path, spec, _InOrder(tensors), source, dtype), dtype)

    def _first_only(self, use: Callable[[Tensors], T], dtype: torch.dtype | None = None) -> T | None:
        """The first member does something with the full tensors; the others help to gather them.

        When `use` fails half way, the first member still gathers the rest: the others are spared its failure.
        """
        tensors = self._gather(dtype)
        try:
            return use(tensors) if self._is_first else None
        finally:
            for _ in tensors:
                pass

    def _gather(self, dtype: torch.dtype | None) -> Tensors:
        with self._together():
            yield from self._live.full_tensors(dtype)

    @property
    def _live(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("the train role was lost in an earlier failure; drop it and hold it anew")
        return self._trainer

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what members do in step: a failure here ends the groups."""
        try:
            yield
        except Exception as error:
            self._trainer = None
            self._groups.abandon(error)
            raise


class _InOrder(Mapping[str, Tensor]):
    """Named tensors that come one at a time, for a reader that asks for each once, in their order."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        found, tensor = next(self._tensors)
        if found != name:
            raise KeyError(f"{name} was asked for where {found} is next")
        return tensor

    def __iter__(self) -> Iterator[str]:
        raise TypeError("these tensors are read by name, in order")

    def __len__(self) -> int:
        raise TypeError("these tensors are read by name, in order")
