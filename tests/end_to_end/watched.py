"""`ductile` as users run it, of which more can be seen: `python -m tests.end_to_end.watched rl @ run.toml`.

Train slots write down each sample that they have trained (`trained_in`), and a slot is struck with STRIKE_SEED set.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ductile import cli
from ductile.launch import local, run
from ductile.observe import read_jsonl
from ductile.trainer.worker import TrainRole
from ductile.wire.messages import ForwardBackward
from tests.end_to_end.strikes import Striker, strike_of_environment

FOLDER = "WATCHED_FOLDER"


class WritesDown(TrainRole):
    def handle(self, command: Any) -> Any:
        reply = super().handle(command)
        if isinstance(command, ForwardBackward):
            samples = [sample for micro_batch in command.micro_batches for sample in micro_batch.samples]
            with (Path(os.environ[FOLDER]) / f"trained_{os.getpid()}.jsonl").open("a") as file:
                for sample in samples:
                    row = {"tokens": sample.token_ids, "prompt": sample.mask.index(True), "logprobs": sample.logprobs}
                    file.write(json.dumps(row) + "\n")
        return reply


class WatchedCluster(local.LocalCluster):
    async def start(self) -> None:
        await super().start()
        if strike := strike_of_environment():
            Striker(strike, self, Path(os.environ[FOLDER]) / "strike.json")


@dataclass(frozen=True, slots=True)
class Trained:
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    logprobs: tuple[float, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.num_prompt_tokens]

    @property
    def num_answer_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


def trained_in(folder: Path) -> Sequence[Trained]:
    """By any slot, in no order."""
    rows = [row for path in sorted(folder.glob("trained_*.jsonl")) for row in read_jsonl(path)]
    return [Trained(tuple(row["tokens"]), row["prompt"], tuple(row["logprobs"])) for row in rows]


if __name__ == "__main__":
    local.ROLES["train"] = "tests.end_to_end.watched:WritesDown"
    run.LocalCluster = WatchedCluster
    raise SystemExit(cli.main())
