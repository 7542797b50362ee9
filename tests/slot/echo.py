"""A role for tests: it replies to anything, and fails, sleeps or dies as its settings ask."""

import os
import signal
import sys
import time
from typing import Any

from ductile.columns import Floats
from ductile.messages.workers import Done, Finished, Generate, OptimStep, Publish, Score, Scores
from ductile.records import Generation
from ductile.roles import Later, RoleAssignment

ECHO = {role: "tests.slot.echo:EchoRole" for role in ("train", "generate", "score")}


class EchoRole:
    """Settings: `fail_on` (a command's name), `sleep_s` (for each command of the main thread), `later_s` (after which
    an optimizer step is done, or raises for a loss denominator of 0), `made_in_s`, `step` ("fails", "kills")."""

    def __init__(self, settings: dict[str, Any], place: RoleAssignment) -> None:
        if settings.get("refuse"):
            raise ValueError(f"cannot live in slot {place.slot}")
        time.sleep(settings.get("made_in_s", 0.0))
        self._settings, self._place = settings, place
        self._waiting: list[str] = []
        print("echo is ready")

    def handle(self, command: Any) -> Any:
        if not command.is_beside:
            time.sleep(self._settings.get("sleep_s", 0.0))
        if type(command).__name__ == self._settings.get("fail_on"):
            raise RuntimeError("as the settings ask")
        match command:
            case Generate(requests):
                self._waiting += [request.id for request in requests]
                return Done()
            case Score(samples):
                return Scores(tuple(Floats(sample.token_ids) for sample in samples))
            case OptimStep(loss_denominator) if "later_s" in self._settings:
                return Later(lambda: self._done_later(loss_denominator))
            case OptimStep(loss_denominator):
                print(f"loss denominator {loss_denominator}", file=sys.stderr)
                return Done()
            case Publish():
                return Scores((Floats((self._place.epoch, self._place.slot)),))
            case _:
                return Done()

    def _done_later(self, loss_denominator: float) -> Done:
        time.sleep(self._settings["later_s"])
        print(f"1 / {1 / loss_denominator}", file=sys.stderr)
        return Done()

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Any]:
        match self._settings.get("step"):
            case "fails":
                raise RuntimeError("out of blocks")
            case "kills":
                os.kill(os.getpid(), signal.SIGSEGV)
        return [Finished((Generation(self._waiting.pop(0), (1,), (0.0,), (0,), "stop"),))]

    def close(self) -> None:
        if self._settings.get("fail_on") == "close":
            raise RuntimeError("as the settings ask")
        print("echo is closed")
