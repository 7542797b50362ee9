"""A train role that writes down what it does, and fails or waits at a point of a test's choice.

`ROLES` makes the slots of a rig have it. Each rank writes its commands and collectives to `<folder>/rank-<slot>.log`,
a line each, in the order in which it began them: invariant I5 is that the ranks' lines are the same.

    arm(folder, slot, "BeginUpdate", "raise")      also "exit" and "hold" (until the file is taken away)
"""

import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed

from ductile.roles import RoleAssignment
from ductile.slot import link
from ductile.trainer.train_role import TrainRole

link.HEARTBEAT_INTERVAL_S = 0.1

FOLDER = "DUCTILE_TEST_RANKS"
ROLES = {"train": "tests.fleet.live.ranks:LoggedTrainer"}
HOLD_S = 30.0

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "monitored_barrier",
    "reduce_scatter_tensor",
)


def arm(folder: Path, slot: int, command: str, what: str) -> None:
    (folder / f"{slot}.{command}").write_text(what)


def disarm(folder: Path) -> None:
    for file in folder.glob("*.*"):
        if file.suffix != ".log":
            file.unlink(missing_ok=True)


def reached(folder: Path, slot: int, command: str) -> bool:
    return (folder / f"{slot}.{command}.reached").exists()


def trace(folder: Path, slot: int) -> list[str]:
    file = folder / f"rank-{slot}.log"
    return file.read_text().splitlines() if file.exists() else []


class LoggedTrainer(TrainRole):
    def __init__(self, settings: dict[str, Any], place: RoleAssignment) -> None:
        self._number, self._points = place.slot, Path(os.environ[FOLDER])
        self._log = (self._points / f"rank-{place.slot}.log").open("a", buffering=1)
        _log_collectives(self._write)
        super().__init__(settings, place)

    def handle(self, command: Any) -> Any:
        name = type(command).__name__
        self._write(name)
        began_s = time.monotonic()
        try:
            self._fail_if_armed(name)
            return super().handle(command)
        finally:
            self._write(f"took {name} {time.monotonic() - began_s:.3f}")

    def _write(self, what: str) -> None:
        self._log.write(f"{what}\n")

    def _fail_if_armed(self, name: str) -> None:
        point = self._points / f"{self._number}.{name}"
        if not point.exists():
            return
        what = point.read_text()
        point.with_name(f"{point.name}.reached").touch()
        if what == "raise":
            point.unlink()
            raise RuntimeError(f"a test has {name} fail on slot {self._number}")
        if what == "exit":
            os._exit(1)
        ends_s = time.monotonic() + HOLD_S
        while point.exists() and time.monotonic() < ends_s:
            time.sleep(0.005)


PLAIN = {name: getattr(torch.distributed, name) for name in COLLECTIVES}
"""As they are without this module: a slot that gets the role again logs each collective once."""


def _log_collectives(write: Callable[[str], None]) -> None:
    for name, collective in PLAIN.items():
        setattr(torch.distributed, name, _logged(name, collective, write))


def _logged(name: str, collective: Callable[..., Any], write: Callable[[str], None]) -> Callable[..., Any]:
    @wraps(collective)
    def logged(*args: Any, **kwargs: Any) -> Any:
        write(f"  {name}")
        return collective(*args, **kwargs)

    return logged
