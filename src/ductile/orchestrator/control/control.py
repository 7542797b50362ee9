"""Talking to a live run from outside.

    run = Run("runs/x")
    run.status().trainer.slots              (0, 1)
    run.resize(train=range(4)).sentence     "Trainer resized from slots 0-1 to slots 0-3 in 0.21 s: ..."
    run.resize(layout="pp=2,tp=2")          the same slots, each with another part of the state

A run listens on loopback (`ductile.orchestrator.control.endpoint`); `control.json` in its folder, which only its owner
can read, has the address and a random token. A conversation is one line of JSON each way. Nothing in it is executed.
"""

import json
import os
import socket
import time
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ductile.config.reading.command_line import pasteable
from ductile.core.layout.choice.layout_text import EXAMPLE
from ductile.events.ending import EndedAsAsked, EndedByDeath, EndedByFailure
from ductile.events.resizes import ResizeRolledBack, TrainerResized
from ductile.fabric.process import start_time
from ductile.messages.control import (
    VERSION,
    ControlRequest,
    Drained,
    DrainRequest,
    FleetRequest,
    FleetStatus,
    Resized,
    ResizeRequest,
    Response,
    RunFailed,
    RunStatus,
    Status,
    Unfit,
)
from ductile.observe import read_jsonl

FILE = "control.json"
MAX_REQUEST_BYTES = 1 << 20
MAX_RESPONSE_BYTES = 64 << 20
ENDINGS = {event.__struct_config__.tag for event in (EndedAsAsked, EndedByDeath, EndedByFailure)}
AFTER_THE_END = {event.__struct_config__.tag for event in (TrainerResized, ResizeRolledBack)}
"""Events that may follow an ending: those of a resize that the run did not wait for."""
STATUS_S = 10.0
RESIZE_S = FLEET_S = 600.0
DRAIN_S = 120.0
"""Seconds that a drain may take where nobody says how many."""
BACK_S = 600.0
REPLIES_S = 10.0
"""Seconds after a drain's deadline within which the run says what became of it."""


R = TypeVar("R", Resized, RunStatus, FleetStatus, Drained)


class OnAnotherMachine(Unfit):
    """A run listens on the machine of its orchestrator alone."""

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(what)
        self.folder = folder


class Run:
    """A live run, by its folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def resize(
        self, train: Iterable[int] | None = None, timeout_s: float = RESIZE_S, layout: str = "", **sizes: int
    ) -> Resized:
        """Change the trainer's slots, its layout or both, and wait for what comes of it; a rollback is a result, too.

        Args:
            train: the slots. None: as many as the layout has, preferring those that train.
            layout: sizes of all axes, such as "pp=2,dp_shard=2,tp=2". "": as `trainer.resize.layouts` has it for so
                many slots, else as `trainer.model` asks for it, as far as that fits.
            sizes: instead of a layout those of axes that change, as `ParallelDims` names them: `resize(range(4),
                dp_replicate=2)`.

        Raises Unfit, or RunFailed when the run ended meanwhile, is in another resize, or does not reply in time.
        """
        try:
            slots = None if train is None else list(train)
            words = {"type": "resize", "train": slots, "layout": layout, "sizes": sizes}
            ask = msgspec.convert(words, ResizeRequest)
        except (TypeError, msgspec.ValidationError) as error:
            raise Unfit(
                f"train is {train!r}, layout is {layout!r} and the sizes of axes are {sizes!r}; write slots as "
                f'numbers, such as range(4) or [0, 2, 5], a layout as text, such as "{EXAMPLE}", and sizes as numbers, '
                "such as dp_replicate=2"
            ) from error
        return self._ask(ask, Resized, timeout_s)

    def status(self, timeout_s: float = STATUS_S) -> RunStatus:
        return self._ask(Status(), RunStatus, timeout_s)

    def fleet(
        self,
        action: Literal["list", "join", "drain", "evict"] = "list",
        server: str = "",
        timeout_s: float = FLEET_S,
    ) -> FleetStatus:
        """Return the run's servers, once what is asked for is done.

        Args:
            action: join: a server comes, has the live weights and generates. drain: one leaves when it has finished
                what it generates. evict: one leaves at once, and others go on with what it has.
            server: address of the one that comes; id or address of the one that leaves.

        Raises Unfit, or RunFailed when it was not done or the run does not reply in time.
        """
        return self._ask(FleetRequest(action, server, timeout_s), FleetStatus, timeout_s)

    def drain(self, slots: Iterable[int] = (), node: int | None = None, deadline_s: float = DRAIN_S) -> Drained:
        """Have slots emptied and ended, and wait until they are gone: requests go on at other generators, and the
        trainer on other slots.

        Args:
            slots: the slots.
            node: a node whose slots are meant, besides.
            deadline_s: seconds until they must be gone.

        Raises Unfit, or RunFailed when they cannot be emptied, or were not in time.
        """
        ask = DrainRequest(tuple(slots), node, deadline_s)
        return self._ask(ask, Drained, deadline_s + REPLIES_S)

    def bring_back(self, slots: Iterable[int] = (), node: int | None = None, timeout_s: float = BACK_S) -> Drained:
        """Have slots come back that were drained, and wait until they work. Raises Unfit or RunFailed."""
        return self._ask(DrainRequest(tuple(slots), node, back=True), Drained, timeout_s)

    def _ask(self, ask: ResizeRequest | Status | FleetRequest | DrainRequest, expected: type[R], timeout_s: float) -> R:
        if not (isfinite(timeout_s) and timeout_s > 0):
            raise Unfit(f"the timeout is {timeout_s:g} s; it must be above 0, and finite")
        host, port, token = self._where()
        line = msgspec.json.encode(ControlRequest(VERSION, token, ask)) + b"\n"
        try:
            with socket.create_connection((host, port), timeout=STATUS_S) as connection:
                connection.sendall(line)
                response = msgspec.json.decode(_line(connection, timeout_s), type=Response)
        except TimeoutError as error:
            raise RunFailed(
                f"the run in {self.folder} did not reply within {timeout_s:g} s; it may do it yet. See: "
                f"{pasteable('status', self.folder)}"
            ) from error
        except (OSError, EOFError) as error:
            raise RunFailed(f"the run in {self.folder} did not reply: {error or 'it ended'}") from error
        except msgspec.DecodeError as error:
            raise RunFailed(f"the run in {self.folder} gave a response that cannot be read: {error}") from error
        if isinstance(response.result, expected):
            return response.result
        raise (Unfit if response.unfit else RunFailed)(response.error or "the run responded with something else")

    def _where(self) -> tuple[str, int, str]:
        if not self.folder.is_dir():
            raise Unfit(f"there is no run in {self.folder}: no such folder")
        try:
            known: dict[str, Any] = json.loads((self.folder / FILE).read_text("utf-8"))
            version, pid, started = known["version"], known["pid"], known["started"]
            machine = str(known["machine"])
            host, port, token = str(known["host"]), int(known["port"]), str(known["token"])
        except FileNotFoundError:
            if ended := self._ending():
                raise Unfit(
                    f"no run is at work in {self.folder}: the last one has ended. {ended} What it did: "
                    f"{pasteable('report', self.folder)}"
                ) from None
            if (self.folder / "summary.json").exists():
                raise Unfit(
                    f"no run is at work in {self.folder}: the last one has ended (or one has just been started, and "
                    f"has no slots yet). What the last one did: {pasteable('report', self.folder)}"
                ) from None
            if not (log := self.folder / "logs" / "processes.log").exists():
                raise Unfit(f"there is no run in {self.folder}: nothing has run there yet") from None
            raise Unfit(
                f"no run is at work in {self.folder}, and nothing is recorded of it yet: it is still starting, and its "
                f"slots have no roles yet, or it has failed, at its start or with a full disk; see {log}"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unfit(f"{self.folder / FILE} cannot be read: {error}") from None
        if start_time(pid) != started:
            if machine != socket.gethostname():  # the folder is on a file system that several share
                what = f"the run in {self.folder} is, or was, on the machine {machine}: ask it from there"
                raise OnAnotherMachine(self.folder, what)
            raise Unfit(f"no run is at work in {self.folder}: process {pid}, which wrote its {FILE}, has ended")
        if version != VERSION:
            raise Unfit(f"the run in {self.folder} speaks version {version} of the control words, this is {VERSION}")
        return host, port, token

    def _ending(self) -> str:
        """How the last run has ended, as a sentence; "" when it has not, or did all that it was to do."""
        for event in reversed(read_jsonl(self.folder / "events.jsonl")):
            if event.get("kind") in ENDINGS:
                return str(event.get("sentence", ""))
            if event.get("kind") not in AFTER_THE_END:
                break
        return ""


def _line(connection: socket.socket, timeout_s: float) -> bytes:
    """One line, with its end. Raises TimeoutError, EOFError or OSError."""
    deadline_s, received = time.monotonic() + timeout_s, b""
    while not received.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        chunk = connection.recv(65536)
        if not chunk:
            raise EOFError("it closed the connection")
        received += chunk
        if len(received) > MAX_RESPONSE_BYTES:
            raise OSError(f"its response is longer than {MAX_RESPONSE_BYTES} bytes")
    return received
