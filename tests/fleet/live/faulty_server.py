"""A server as `ductile inference` starts it, with more that may go wrong than `tests.generator.fault_points` has:

    wrong-bytes       a byte of each bucket is another one when it is loaded
    wedge             the engine does no step, and HTTP answers
    slow 0.02         each step of the engine takes so much longer
    500 /weights      routes that begin so fail with status 500
    no-room           there is no memory to stage a version
    unsent NAME       this tensor is as it was when a version goes live, after it was verified
    negated NAME      its values have the other sign then

Each is a file in the folder of DUCTILE_FAULTS, as those are.
"""

import sys
import time
from typing import Any

from ductile.generator.engine.engine import Engine
from ductile.generator.server import serve
from ductile.weights.staged_weights import StagedWeights
from tests.generator import fault_points
from tests.generator.fault_points import create_faulty_app, said

step, load, prepare, commit = Engine.step, StagedWeights.load, StagedWeights.prepare, StagedWeights.commit


def slow_step(engine: Engine) -> Any:
    while said("wedge"):
        time.sleep(0.01)
    if words := said("slow"):
        time.sleep(float(words[0]))
    return step(engine)


def wrong_load(self: StagedWeights, bucket: Any, buffer: Any) -> None:
    if bucket.num_bytes and said("wrong-bytes"):
        buffer = buffer.clone()
        buffer[bucket.num_bytes // 2] ^= 1
    load(self, bucket, buffer)


def commit_what_was_not_verified(self: StagedWeights, swap: Any) -> None:
    assert self._new is not None
    for name in said("unsent"):
        self._new.tensors[name].copy_(self._live.current.tensors[name])
    for name in said("negated"):
        self._new.tensors[name].copy_(-self._new.tensors[name])
    commit(self, swap)


def prepare_without_room(self: StagedWeights, *args: Any, **kwargs: Any) -> None:
    if said("no-room"):
        raise MemoryError("a test has left no room")
    prepare(self, *args, **kwargs)


class FailingRoutes:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and said("500", of=lambda words: bool(words) and scope["path"].startswith(words[0])):
            await send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, send)


def create_failing_app(*args: Any, **kwargs: Any) -> Any:
    app = create_faulty_app(*args, **kwargs)
    app.add_middleware(FailingRoutes)
    return app


if __name__ == "__main__":
    fault_points.install()
    Engine.step, StagedWeights.load = slow_step, wrong_load  # type: ignore[method-assign]
    StagedWeights.commit = commit_what_was_not_verified  # type: ignore[method-assign]
    StagedWeights.prepare, serve.create_app = prepare_without_room, create_failing_app  # type: ignore[method-assign]
    sys.exit(serve.main())
