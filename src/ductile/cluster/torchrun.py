"""A command whose processes torchrun has started: `torchrun --nproc-per-node 2 -m ductile sft @ sft.toml`.

Each rank is a node of one slot, and slot n is rank n's: rank 0 runs the command itself, and every other rank the agent
of its node (`ductile.cluster.agent`), which finds the run in its folder as `ductile join` does. The environment says
once who is there. Nothing is asked of torchrun afterwards, and it restarts nothing.
"""

import io
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ductile.cluster.invitation import json_file
from ductile.cluster.join import CannotJoin, join_run
from ductile.config.checks.asked_placement import placement_of
from ductile.config.reading.command_line import print_error
from ductile.config.schema.run import CommandConfig, SFTConfig, TrainerRunConfig
from ductile.transport.network import interfaces, is_loopback
from ductile.transport.sockets import LOOPBACK

REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Variables that torchrun gives to each process, and no other program all three of them."""
PREFIX = "TORCHELASTIC_"
OTHERS = (
    "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT",
)  # fmt: skip
NOT_STARTED = 2
WAIT_S = 3600.0
"""How long a rank waits for rank 0 to read its data. When rank 0 fails, torchrun ends the others at once."""


class BadLaunch(Exception):
    """A command cannot be launched in this way. The text is a sentence without its full stop."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What torchrun's environment says of this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: str
    """Name or address of the machine that has rank 0."""
    run_id: str
    attempt: int

    @staticmethod
    def of(environment: Mapping[str, str]) -> "Rank | None":
        """Return what the environment says; None where torchrun has not started this process, or it alone."""
        if not all(environment.get(name, "").isdecimal() for name in REQUIRED):
            return None
        world_size = int(environment["WORLD_SIZE"])
        if world_size <= 1:
            return None
        local_world_size, attempt = (
            environment.get("LOCAL_WORLD_SIZE", ""),
            environment.get(f"{PREFIX}RESTART_COUNT", ""),
        )
        return Rank(
            int(environment["RANK"]),
            world_size,
            int(environment["LOCAL_RANK"]),
            int(local_world_size) if local_world_size.isdecimal() else 1,
            environment.get("MASTER_ADDR", ""),
            environment.get(f"{PREFIX}RUN_ID", "none").replace("/", "_") or "none",
            int(attempt) if attempt.isdecimal() else 0,
        )

    @property
    def is_on_one_machine(self) -> bool:
        return self.local_world_size == self.world_size

    def words(self, config: CommandConfig) -> list[str]:
        """Return what follows for the command line: a slot for each rank. config: as it is without these words. Raises
        BadLaunch."""
        if not isinstance(config, SFTConfig | TrainerRunConfig):
            raise BadLaunch(
                "torchrun launches `ductile sft` and `ductile trainer`, which train on every rank. Run this command "
                "without torchrun: it starts its processes itself, and `ductile join` brings other machines "
                "(docs/cluster.md)"
            )
        if config.bench is not None:
            raise BadLaunch(
                "a benchmark has a folder of its own, where other ranks do not find it: run it without torchrun"
            )
        if config.ray is not None:
            raise BadLaunch(
                "[ray] has Ray start the nodes of the run: leave it out, or run the command without torchrun"
            )
        if isinstance(config, SFTConfig) and config.slurm is not None:
            raise BadLaunch(
                "[slurm] has the command run as a job, which starts its processes itself: leave it out, or run the "
                "command without torchrun"
            )
        if config.deployment.type == "multi_node":
            raise BadLaunch(
                'deployment.type is "multi_node", whose nodes join by themselves, and here every rank is a node: leave '
                "it out"
            )
        size, cluster, deployment = self.world_size, config.cluster, config.deployment
        if "num_nodes" in cluster.model_fields_set and cluster.num_nodes not in (1, size):
            raise BadLaunch(
                f"cluster.num_nodes is {cluster.num_nodes}, and torchrun has started {size} ranks, each of which is a "
                "node: leave it out"
            )
        words = ["--cluster.num-nodes", f"{size}", "--deployment.gpus-per-node", "1"]
        if isinstance(config, SFTConfig):  # with one rank torchrun ends all others: none are left to go back on
            words += ["--cluster.max-restarts", "0"]
        if cluster.interface is None and (interface := self.interface()):
            words += ["--cluster.interface", interface]
        if cluster.component_placement is not None or "num_gpus" in deployment.model_fields_set:
            if (num_slots := placement_of(config).num_slots) != size:
                key = "deployment.num_gpus" if cluster.component_placement is None else "cluster.component_placement"
                raise BadLaunch(
                    f"{key} asks for {num_slots} slots, and torchrun has started {size} ranks (WORLD_SIZE), one for "
                    "each slot: leave the key out, or start as many"
                )
            return words
        return [*words, "--deployment.num-gpus", f"{size}"]

    def interface(self) -> str:
        """Return the address of this machine, which has rank 0, at which the other ranks find it; "" for the one that
        leads to other machines."""
        if self.is_on_one_machine:
            return LOOPBACK
        try:
            address = socket.gethostbyname(self.master)
        except OSError:
            return ""
        own = {address for _, address in interfaces()}
        return address if address in own and not is_loopback(address) else ""

    def logs(self, output_dir: str) -> Path:
        """Return the folder of what this rank says."""
        return Path(output_dir) / "logs/trainer/torchrun" / self.run_id / f"attempt_{self.attempt}" / f"{self.rank}"


def leave(environment: MutableMapping[str, str], rank: Rank, num_gpus: int) -> None:
    """Take torchrun's variables out of the environment, which slots inherit, and leave them the one GPU that is this
    rank's."""
    for name in [name for name in environment if name in (*REQUIRED, *OTHERS) or name.startswith(PREFIX)]:
        del environment[name]
    if num_gpus:
        shown = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
        devices = shown.split(",")
        environment["CUDA_VISIBLE_DEVICES"] = devices[rank.local_rank] if rank.local_rank < len(devices) else ""


def follow(rank: Rank, output_dir: str) -> int:
    """Be a node of rank 0's run until it is over; returns the exit status."""
    try:
        return join_run(output_dir, WAIT_S, rank.rank, ends_with_run=True)
    except CannotJoin as error:
        print_error("join", error)
        return NOT_STARTED


def keep_logs(rank: Rank, output_dir: str) -> None:
    """Write what this rank says to `stdout.log` and `stderr.log`, too, in a folder of its own below the run's `logs`,
    which has a link to the log of its slot."""
    folder = rank.logs(output_dir)

    def opened(name: str) -> TextIO | None:
        """The run has begun: before, the folder may be another run's."""
        if not json_file(Path(output_dir)).exists():
            return None
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / "slot.log"
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(Path(output_dir) / "logs" / f"slot_{rank.rank}.log", folder))
        return (folder / f"{name}.log").open("a", buffering=1, errors="backslashreplace")

    sys.stdout = Kept(sys.stdout, lambda: opened("stdout"))
    sys.stderr = Kept(sys.stderr, lambda: opened("stderr"))


class Kept(io.TextIOBase):
    """A stream whose text is written to a file, too, as soon as there may be one."""

    def __init__(self, stream: TextIO, open_file: Callable[[], TextIO | None]) -> None:
        self._stream, self._open_file = stream, open_file
        self._file: TextIO | None = None
        self._early: list[str] = []

    def write(self, text: str) -> int:
        self._early.append(text)
        try:
            self._file = self._file or self._open_file()
            if self._file is not None:
                self._file.write("".join(self._early))
                self._early.clear()
        except (OSError, ValueError):  # the console is worth more than its copy
            self._early.clear()
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding
