"""`ductile inference`: load a model and serve it until told to stop.

Run as `python -m ductile.generator.serve config.json`, so that the one who launches it needs no torch.
"""

import ipaddress
import signal
import socket
import sys
from pathlib import Path

import torch
import uvicorn

from ductile.config.inference import ServerConfig
from ductile.config.run import InferenceRunConfig
from ductile.generator.server import create_app
from ductile.generator.worker import load_engine
from ductile.model.checkpoint import ModelFolderError
from ductile.tasks.tokenizer import Tokenizer, TokenizerError

DRAIN_S = 30
"""After the first signal, answers under way have this long; a second signal ends them at once."""


class ServeError(Exception):
    """The server cannot start. The text names the key and what to write instead."""


def serve(config: InferenceRunConfig) -> int:
    """Returns the exit code: 0 after SIGINT or SIGTERM, 1 when it could not start (the reason is on stderr)."""
    try:
        name, listener = _model_name(config), _listen(config.server)
    except ServeError as error:
        return _complain(error)
    with listener:
        try:
            tokenizer = Tokenizer.from_folder(name, config.model.chat_template)
            engine = load_engine(config, _device(config), tokenizer)
        except (ModelFolderError, TokenizerError, ValueError) as error:
            return _complain(error)
        app = create_app(engine, tokenizer, name, config.server.api_key)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S)
        )
        # uvicorn takes these two for itself and raises them again once it is through; by then they have been heeded.
        signal.signal(signal.SIGINT, lambda signum, frame: None)
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
        print(f"serving {name} on {_url(listener)}", flush=True)
        server.run(sockets=[listener])
    return 0


def _model_name(config: InferenceRunConfig) -> str:
    if config.model.name is None:
        raise ServeError("model.name is not set; it must be a Hugging Face model folder (--model.name FOLDER)")
    if config.parallel.dp not in (None, 1):
        raise ServeError(
            f"parallel.dp is {config.parallel.dp}; a server holds one copy of the model, so start one server for each"
        )
    return config.model.name


def _listen(server: ServerConfig) -> socket.socket:
    if server.api_key is None and not _is_loopback(server.host):
        raise ServeError(
            f"server.host {server.host!r} can be reached from other machines; set server.api_key "
            "(clients then send it as a bearer token), or use 127.0.0.1"
        )
    try:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        return socket.create_server((server.host, server.port), family=family, backlog=2048)
    except OSError as error:
        raise ServeError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror}; server.port = 0 takes a free port"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _device(config: InferenceRunConfig) -> str:
    wanted = config.cluster.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if wanted == "cuda" else "cpu"


def _complain(error: Exception) -> int:
    print(f"ductile inference: {error}", file=sys.stderr)
    return 1


def main() -> int:
    torch.set_num_threads(1)  # more threads only wait for each other on shared cores
    return serve(InferenceRunConfig.model_validate_json(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    sys.exit(main())
