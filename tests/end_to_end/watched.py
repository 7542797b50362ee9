"""`ductile` as users run it, of which more can be seen: `python -m tests.end_to_end.watched rl @ run.toml`.

Data-parallel ranks write down each sample that they have trained (`trained_in`), and where the run has several nodes
the orchestrator each command that a slot gets (`commands_in`). A slot is struck with STRIKE_SEED set,
or with RESIZE_STRIKE_SEED. With WATCHED_STATES set train slots also write down the state on both sides of each resize
(`moved_in`); with WATCHED_DRAWS set generators draw tokens whatever the model says, so that completions are the same in
runs that round differently. With WATCHED_FAULT set to "hangs" or "refuses", the first generator that receives version 1
does so.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ductile import cli
from ductile.cluster import joined, local, make_cluster
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.process import NODE_VARIABLE
from ductile.generator.engine import sampler
from ductile.generator.generate_role import GenerateRole
from ductile.messages.resizes import Commit, Freeze
from ductile.messages.workers import Command, ForwardBackward, Receive
from ductile.observe import read_jsonl
from ductile.records import RolloutGroup
from ductile.roles import RoleAssignment
from ductile.trainer.loss import LossInputs, LossOutputs
from ductile.trainer.state import named_gradient, named_state, parts_of
from ductile.trainer.train_role import TrainRole
from tests.end_to_end.strikes import Striker, strike_of_environment
from tests.tiny import IM_END, SPECIALS

FOLDER = "WATCHED_FOLDER"
STATES = "WATCHED_STATES"
DRAWS = "WATCHED_DRAWS"
FAULT = "WATCHED_FAULT"
COMMANDS = "commands.jsonl"
Side = Literal["before", "after"]


class WritesDown(TrainRole):
    def handle(self, command: Any) -> Any:
        if isinstance(command, Freeze) and STATES in os.environ:
            self._write_state(command.epoch, "before")  # nothing trains from here on until the change is done
        reply = super().handle(command)
        if isinstance(command, Commit) and STATES in os.environ:
            self._write_state(command.epoch, "after")
        if isinstance(command, ForwardBackward) and self._live.context.counts_samples:
            samples = [sample for micro_batch in command.micro_batches for sample in micro_batch.samples]
            # Processes of several nodes may have the same pid.
            me = "_of_".join(filter(None, [str(os.getpid()), os.environ.get(NODE_VARIABLE)]))
            with (Path(os.environ[FOLDER]) / f"trained_{me}.jsonl").open("a") as file:
                for sample in samples:
                    row = {
                        "tokens": sample.token_ids,
                        "prompt": sample.loss_mask.index(True),
                        "logprobs": sample.rollout_logprobs,
                        "step": self._live.step + 1,
                        "time": time.time(),
                    }
                    file.write(json.dumps(row, default=list) + "\n")
        return reply

    def _write_state(self, epoch: int, side: Side) -> None:
        """A slot that joins has none before, and one that leaves none after."""
        if self._instance is None:
            return
        change = self._change(epoch).order
        layout = change.before if side == "before" else change.after
        state = {
            "slots": layout.slots,
            "dp_replicate": layout.dims.dp_replicate,
            "parts": parts_of(named_state(self._live) | named_gradient(self._live)),
        }
        torch.save(state, state_file(Path(os.environ[FOLDER]), epoch, side, self._assignment.slot))


class DrawsBlindly(GenerateRole):
    """Tokens follow from the request's seed and their position alone; their log-probs are the model's."""

    def __init__(self, settings: dict[str, Any], place: RoleAssignment) -> None:
        super().__init__(settings, place)
        sampler.inverse_cdf = token_of_number


class FailsOnce(GenerateRole):
    def handle(self, command: Any) -> Any:
        if isinstance(command, Receive) and command.manifest.version == 1 and self._is_first():
            if os.environ[FAULT] == "hangs":
                time.sleep(3600)
            raise RuntimeError("no room for new weights")
        return super().handle(command)

    def _is_first(self) -> bool:
        try:
            (Path(os.environ[FOLDER]) / "failed_once").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def token_of_number(logprobs: Tensor, numbers: np.ndarray) -> Tensor:
    """One in sixteen ends the completion, so that completions differ in length; otherwise any character."""
    others = (numbers * 16 - 1) / 15
    num_characters = logprobs.shape[1] - len(SPECIALS)
    tokens = np.where(others < 0, IM_END, len(SPECIALS) + np.floor(others * num_characters))
    return torch.from_numpy(tokens.astype(np.int64)).to(logprobs.device)


def rewards_alone(rewards: list[float], group: RolloutGroup) -> list[float]:
    """An advantage that is never negative. With `reinforce` the loss is then a sum in which nothing cancels: what is
    left of terms that do would say nothing to a tolerance that is relative to it."""
    return rewards


def reinforce(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(-inputs.advantages * inputs.logprobs)


class WatchedCluster(local.LocalCluster):
    async def start(self) -> None:
        await super().start()
        if strike := strike_of_environment():
            Striker(strike, self, Path(os.environ[FOLDER]) / "strike.json")


class WatchedNodes(joined.JoinedCluster):
    async def start(self) -> None:
        await super().start()
        self._commands = (Path(os.environ[FOLDER]) / COMMANDS).open("a", buffering=1)
        self.mailbox.watch(self._write_down)

    async def begin_again(self, slots: Sequence[int]) -> None:
        await super().begin_again(slots)
        self.mailbox.watch(self._write_down)

    def _write_down(self, slot: int, running: type[Command] | None) -> None:
        if running is not None:
            self._commands.write(json.dumps({"slot": slot, "command": running.__name__}) + "\n")


@dataclass(frozen=True, slots=True)
class Trained:
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    logprobs: tuple[float, ...]
    step: int
    """The first is 1."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.num_prompt_tokens]

    @property
    def num_completion_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


def trained_in(folder: Path, went_back: Sequence[dict[str, Any]] = ()) -> Sequence[Trained]:
    """By any data-parallel rank, in no order. went_back: events of the run; what was trained since the checkpoint that
    a trainer goes back to does not count."""
    rows = [
        row
        for path in sorted(folder.glob("trained_*.jsonl"))
        for row in read_jsonl(path)
        if not any(row["time"] < event["time"] and row["step"] > event["step"] for event in went_back)
    ]
    return [Trained(tuple(row["tokens"]), row["prompt"], tuple(row["logprobs"]), row["step"]) for row in rows]


def commands_in(folder: Path) -> list[dict[str, Any]]:
    """Slot and class of each command so far, in their order. One that waits behind others comes when it is their
    turn."""
    return read_jsonl(folder / COMMANDS)


def state_file(folder: Path, epoch: int, side: Side, slot: int) -> Path:
    return folder / f"state_{epoch}_{side}_{slot}.pt"


@dataclass(frozen=True, slots=True)
class State:
    """Parameters, moments and gradient on one side of a resize."""

    layout: ParallelLayout
    copies: tuple[dict[str, bytes], ...]
    """The whole tensors of each copy."""


def moved_in(folder: Path, epoch: int, side: Side) -> State:
    paths = sorted(folder.glob(f"state_{epoch}_{side}_*.pt"))
    rows = {int(path.stem.rpartition("_")[2]): torch.load(path) for path in paths}
    first = next(iter(rows.values()))
    layout = ParallelLayout.of(first["slots"], dp_replicate=first["dp_replicate"])
    assert rows.keys() == set(layout.slots), f"epoch {epoch} {side}: {sorted(rows)} wrote, of {layout}"
    return State(layout, tuple(wholes([rows[slot]["parts"] for slot in layout.slots], layout.dims.dp_replicate)))


def wholes(parts: Sequence[dict[str, Tensor]], num_copies: int) -> Iterator[dict[str, bytes]]:
    """Rows are chunked over the ranks of one copy, so their flat parts one after the other are the flat whole."""
    size = len(parts) // num_copies
    for first in range(0, len(parts), size):
        copy = parts[first : first + size]
        yield {name: b"".join(part[name].numpy().tobytes() for part in copy) for name in parts[0]}


if __name__ == "__main__":
    if DRAWS in os.environ:
        local.ROLES["generate"] = "tests.end_to_end.watched:DrawsBlindly"
    if FAULT in os.environ:
        local.ROLES["generate"] = "tests.end_to_end.watched:FailsOnce"
    local.ROLES["train"] = "tests.end_to_end.watched:WritesDown"
    make_cluster.LocalCluster = WatchedCluster
    make_cluster.JoinedCluster = WatchedNodes
    raise SystemExit(cli.main())
