"""`ductile inference`: load a model and serve it until told to stop.

Run as `python -m ductile.generator.server.serve config.json`, so that the one who launches it needs no torch. With a
process id behind that, the server ends when that process does.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import torch
import uvicorn
from fastapi import FastAPI

from ductile.config.checks.generation_config import GenerationDefaults, generation_defaults
from ductile.config.checks.weight_headers import ModelFolderError
from ductile.config.schema.fleet import FileRegistry
from ductile.config.schema.inference import ServerConfig
from ductile.config.schema.run import InferenceRunConfig
from ductile.generator.generate_role import load_engine
from ductile.generator.server.registrar import Registrar
from ductile.generator.server.runner import EngineFailed
from ductile.generator.server.server import create_app, most_bucket_bytes
from ductile.generator.server.service import Service
from ductile.lifeline import signal_on_parent_death
from ductile.messages.control_token import ControlToken, control_token
from ductile.messages.server_lease import ServerLease
from ductile.tasks.tokenizer import Tokenizer, TokenizerError
from ductile.transport.http_server.listener import BACKLOG, DRAIN_S, listen, url_of, uvicorn_settings
from ductile.transport.http_server.log_limit import log_to_stderr

LOG = logging.getLogger("ductile.generator.server.serve")  # this file's __name__ is "__main__" in the process

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals at which the server leaves. The last two are a batch system's notice, as by `sbatch --signal=USR1@120`."""

LOOK_S = 0.1
"""Seconds between two looks for whether a server that leaves may end."""


def serve(config: InferenceRunConfig) -> int:
    """Returns the exit code: 0 after one of `STOPS`, 1 when it could not start or its engine is dead (stderr says
    why)."""
    try:
        name, listener = _model_name(config), listen(config.server)
    except ValueError as error:
        return _print_error(error)
    with ExitStack() as stack:
        stack.enter_context(listener)
        try:
            tokenizer = Tokenizer.of(config.model)
            engine = load_engine(config, _device(config), tokenizer)
            defaults = _defaults(config, name).used
            control = _control(config.server, listener, stack)
        except (ModelFolderError, TokenizerError, ValueError) as error:
            return _print_error(error)
        failures: list[EngineFailed] = []

        def end(failure: EngineFailed) -> None:
            failures.append(failure)
            server.should_exit = True

        app = create_app(engine, tokenizer, name, config.server, end, defaults=defaults, control=control)
        server = _Server(uvicorn_settings(app, config.server, partial(most_bucket_bytes, app)), app, config.server)

        def leave(signum: int, frame: FrameType | None) -> None:
            server.should_exit = True

        # uvicorn takes the first two for itself while it serves, and raises them again once it is through. Until then
        # all of them end the server before it has begun.
        for signum in STOPS:
            signal.signal(signum, leave)

        def lease() -> ServerLease:
            state = app.state.service.control.state()
            file = str(control.file) if control and control.file else ""
            return ServerLease(
                url_of(listener, config.server),
                state.incarnation,
                state.model,
                file,
                os.getpid(),
                state.host,
                version=state.version,
            )

        registrar = Registrar(config.registry, lease, lambda said: print(said, file=sys.stderr, flush=True))
        server.while_serving(registrar)
        print(f"serving {name} on {url_of(listener, config.server)}", flush=True)
        if isinstance(config.registry, FileRegistry):
            folder = Path(config.registry.folder).expanduser().absolute()
            print(f"announced in {folder} (registry.folder)", flush=True)
        server.run(sockets=[listener])
    return _print_error(failures[0]) if failures else 0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: ServerConfig) -> None:
        super().__init__(config)
        self._app, self._settings = app, settings
        self._registrar: Registrar | None = None

    def while_serving(self, registrar: Registrar) -> None:
        """Have the server announced from when it responds until it takes nothing new."""
        self._registrar = registrar

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set it to what it accepts in one go
        if sockets and self.started:
            state = self._service.control.state()
            LOG.info(
                "listening at %s: model %s, version %d of the weights (digest %s), %d sequences at a time",
                *(
                    url_of(sockets[0], self._settings),
                    state.model_name,
                    state.version,
                    state.digest,
                    state.max_num_seqs,
                ),
            )
        if self._registrar is not None and self.started:
            self._registrar.__enter__()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._registrar is not None and self.started:
            await asyncio.to_thread(self._registrar.leave)
        if self.started:
            await self._say_goodbye()
        LOG.info("shutting down: connections are closed")
        await super().shutdown(sockets)
        if self._registrar is not None and self.started:
            await asyncio.to_thread(self._registrar.__exit__)

    @property
    def _service(self) -> Service:
        return cast("Service", self._app.state.service)

    async def _say_goodbye(self) -> None:
        """Listen until the fleet that has this server has heard that it leaves: a port that is closed is one that has
        failed."""
        service = self._service
        service.control.leave()
        stats = service.runner.engine.stats()
        LOG.info(
            "leaving: nothing new is taken, and %d sequences that run and %d that wait have %d s to end",
            *(stats.num_running, stats.num_waiting, DRAIN_S),
        )
        ends_at = time.monotonic() + DRAIN_S
        with suppress(EngineFailed):
            for _ in range(int(DRAIN_S / LOOK_S)):
                service.runner.check_alive()
                if service.control.is_heard_out or self.force_exit:
                    break
                await asyncio.sleep(LOOK_S)
        self.config.timeout_graceful_shutdown = max(1, round(ends_at - time.monotonic()))


def _model_name(config: InferenceRunConfig) -> str:
    if config.model.name is None:
        raise ValueError("model.name is not set; it must be a Hugging Face model folder (--model.name FOLDER)")
    if config.parallel.dp not in (None, 1):
        raise ValueError(
            f"parallel.dp is {config.parallel.dp}; a server holds one copy of the model, so start one server for each"
        )
    return config.model.name


def _defaults(config: InferenceRunConfig, name: str) -> GenerationDefaults:
    return generation_defaults(Path(name)) if config.server.generation_config == "auto" else GenerationDefaults()


def _control(server: ServerConfig, listener: socket.socket, stack: ExitStack) -> ControlToken | None:
    """Return the token of the control routes, which is in a file; None where there is an API key, which opens them,
    too. Raises `UnsafeFolder`."""
    if server.api_key is not None:
        return None
    host, port = listener.getsockname()[:2]
    return stack.enter_context(control_token(host, port))


def _device(config: InferenceRunConfig) -> str:
    wanted = config.cluster.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if wanted == "cuda" else "cpu"


def _print_error(error: Exception) -> int:
    print(f"ductile inference: {error}", file=sys.stderr)
    return 1


def main() -> int:
    torch.set_num_threads(1)  # more threads only wait for each other on shared cores
    log_to_stderr()
    if len(sys.argv) > 2:
        signal_on_parent_death(int(sys.argv[2]), signal.SIGKILL)
    return serve(InferenceRunConfig.model_validate_json(Path(sys.argv[1]).read_text("utf-8")))


if __name__ == "__main__":
    sys.exit(main())
