"""A server as `ductile inference` starts it, in which something goes wrong:

python -m tests.generator.faulty_server CONFIG device_lost     its engine's step fails on the prompt 7 7 7
python -m tests.generator.faulty_server CONFIG SIGTERM         it gets the signal before uvicorn looks for any
python -m tests.generator.faulty_server CONFIG few_files       it may have 256 open files
python -m tests.generator.faulty_server CONFIG points          it has the points of `tests.generator.fault_points`
"""

import resource
import signal
import socket
import sys

import uvicorn

from ductile.generator.engine.engine import Engine
from ductile.generator.server.serve import main
from ductile.records import Generation
from tests.generator import fault_points

step, serve = Engine.step, uvicorn.Server.run


def breaking_step(engine: Engine) -> list[Generation]:
    if any(sequence.request.prompt == (7, 7, 7) for sequence in engine._live.values()):
        raise RuntimeError("device lost")
    return step(engine)


def signalled_run(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
    signal.raise_signal(signal.Signals[fault])
    serve(server, sockets)


if __name__ == "__main__":
    fault = sys.argv.pop()
    if fault == "device_lost":
        Engine.step = breaking_step
    elif fault == "few_files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    elif fault == "points":
        fault_points.install()
    else:
        uvicorn.Server.run = signalled_run
    sys.exit(main())
