"""Places where a server does what a broken one does. A file `<folder>/<point>` with one word in it is a fault, for as
long as it is there:

    hold            go no further while the file says so; no bucket that comes later does, either
    exit            end the process at once
    drop            no reply comes
    late 3.5        go on so many seconds later

A fault that was met leaves a file `<point>.reached`. The folder is that of the environment variable DUCTILE_FAULTS.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.middleware import Middleware

from ductile.generator.server import serve
from ductile.generator.server.weight_receiver import WeightReceiver

FAULTS = "DUCTILE_FAULTS"
EXIT_CODE = 86
LOOK_S = 0.01
BEFORE = {
    "/fleet/state": "state",
    "/weights/prepare": "prepare",
    "/weights/verify": "verify",
    "/weights/commit": "commit",
    "/resume": "resume",
    "/v1/completions": "generate",
    "/v1/chat/completions": "generate",
    "/inference/v1/generate": "generate",
}
"""Points before a route does anything."""
AFTER = {"/weights/commit": "commit-reply"}
"""Points at which it has done everything, and says so."""

load, create_app = WeightReceiver._load, serve.create_app
_counting, _num_begun = Lock(), Counter[str]()


class Dropped(Exception):
    """No reply may come."""


def said(point: str, of: Callable[[list[str]], bool] = bool) -> list[str]:
    """Return what the point's file says, and leave one that says that it was met. of: whether the words are about what
    goes on here."""
    if not of(words := _words(point)):
        return []
    (Path(os.environ[FAULTS]) / f"{point}.reached").touch()
    return words


def meet(point: str) -> None:
    """Do what the point's file says, in a thread that may wait. Raises `Dropped`."""
    match said(point):
        case ["exit", *_]:
            os._exit(EXIT_CODE)
        case ["drop", *_]:
            raise Dropped(point)
        case ["late", seconds]:
            time.sleep(float(seconds))
        case ["hold"]:
            hold(point)


def hold(point: str) -> None:
    """Wait as long as the point's file says so. It leaves no file: whoever takes the fault back has taken that, too."""
    while _words(point) == ["hold"]:
        time.sleep(LOOK_S)


def _words(point: str) -> list[str]:
    try:
        return (Path(os.environ[FAULTS]) / point).read_text("utf-8").split()
    except FileNotFoundError:
        return []


def places(num_buckets: int) -> dict[str, int]:
    """The points that are met by a bucket of an update, each with the buckets that have begun before it."""
    return {"bucket-first": 0, "bucket-mid": num_buckets // 2, "bucket-last": num_buckets - 1}


def faulty_load(self: WeightReceiver, update: Any, *args: Any) -> None:
    dropped: Dropped | None = None
    with _counting:  # buckets of several senders are loaded at a time
        num_begun = _num_begun[update.update_id]
        _num_begun[update.update_id] += 1
    try:
        for point, place in places(len(update.buckets)).items():
            if num_begun == place:
                meet(point)
            elif num_begun > place:
                hold(point)  # else all that another sender has would go past the bucket that waits
    except Dropped as fault:
        dropped = fault
    load(self, update, *args)
    if dropped:
        raise dropped


class FaultyRoutes:
    """ASGI middleware: the innermost, so that a fault is met by whoever is let in, and with a body that is read."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path")

        async def send_or_not(message: Any) -> None:
            if message["type"] == "http.response.start" and path in AFTER:
                await asyncio.to_thread(meet, AFTER[path])
            await send(message)

        try:
            if path in BEFORE:
                await asyncio.to_thread(meet, BEFORE[path])
            await self._app(scope, receive, send_or_not)
        except Dropped:
            while (await receive())["type"] != "http.disconnect":
                pass


def create_faulty_app(*args: Any, **kwargs: Any) -> Any:
    app = create_app(*args, **kwargs)
    app.user_middleware.append(Middleware(FaultyRoutes))
    return app


def install() -> None:
    """Give the server of this process its fault points."""
    WeightReceiver._load = faulty_load  # type: ignore[method-assign]
    serve.create_app = create_faulty_app
